"""The model on held-out samples: each exactly once, whatever the number of ranks.

Sums and counts are added up over the ranks, so the result is that of one process. A rank with no
samples left continues with batches of zero rows: under a sharded strategy the others need its part
of the parameters.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shardlab import comm
from shardlab import text as fmt
from shardlab.axes import Axes
from shardlab.config import TrainingConfig
from shardlab.data import loader
from shardlab.errors import UsageError
from shardlab.pulse import PULSE
from shardlab.strategies.base import Strategy
from shardlab.workloads.base import Batch, Dataset, Evaluate, Sums, Workload
from shardlab.world import World


@dataclass(frozen=True)
class Evaluation:
    """What is evaluated, and how: everything but the moment."""

    strategy: Strategy
    workload: Workload
    world: World
    function: Evaluate  # in the precision of the run
    chunk: int  # samples at a time, over all ranks: as many as in a micro-batch
    samples: int | None = None  # this many of the held-out ones, evenly spread; None: all
    dtype: torch.dtype = torch.float32
    of_average: bool = False  # evaluate the parameters' moving average, not the parameters
    axes: Axes | None = None  # None: every rank has samples of its own

    def __call__(self) -> dict[str, Any]:
        """Loss, accuracy, perplexity: what the workload's sums amount to. A collective."""
        held_out = held_out_of(self.workload)
        count = min(len(held_out), self.samples or len(held_out))
        start = time.perf_counter()
        total: Sums = {}
        with self._evaluating():
            for batch in self._batches(held_out, count):
                PULSE.beats += 1  # it may take long, and nothing else shows that it moves
                sums = self.strategy.infer(self.function, batch)
                counts = {"targets": batch.count, "samples": batch.samples}
                sums = sums | {name: torch.tensor(float(n)) for name, n in counts.items()}
                for name, value in sums.items():
                    total[name] = total.get(name, 0) + value.detach().double()
        result = self._means(total)
        if result["samples"] != count:
            raise RuntimeError(f"evaluated {result['samples']} samples of {count}")
        return {**result, "seconds": time.perf_counter() - start}

    def _batches(self, held_out: Dataset, count: int) -> Iterator[Batch]:
        """This rank's part of each chunk, perhaps of no rows; as many on every rank."""
        world, axes = self.world, self.axes
        share, shares = (world.rank, world.size) if axes is None else axes.data_share(world.rank)
        chosen = np.arange(count) * len(held_out) // count
        for first in range(0, count, self.chunk):
            mine = np.array_split(chosen[first : first + self.chunk], shares)[share]
            yield loader.cast(held_out.batch(mine.tolist()), self.dtype).to(world.device)

    def _means(self, total: Sums) -> dict[str, Any]:
        """The sums of all ranks, each divided by its number of targets or samples."""
        names = sorted(total)
        message = torch.stack([total[name].to(self.world.device).double() for name in names])
        # Ranks that cut one model between them have the same sums: those of one of them count.
        if self.axes is not None and self.world.rank % self.axes.model_ranks:
            message.zero_()
        comm.all_reduce(message, self.world.group, label="evaluation")
        sums = dict(zip(names, message.tolist(), strict=True))
        targets, samples = sums.pop("targets"), sums.pop("samples")
        result: dict[str, Any] = {"samples": int(samples), "targets": int(targets)}
        if "loss" in sums:
            result["loss"] = sums.pop("loss") / max(1.0, targets)
            if self.workload.tokens_per_sample is not None:
                result["perplexity"] = math.exp(min(result["loss"], 700.0))
        if "correct" in sums:
            result["accuracy"] = sums.pop("correct") / max(1.0, samples)
        return result | {name: value / max(1.0, samples) for name, value in sums.items()}

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """The model is in eval mode inside; afterwards it is as it was before."""
        strategy, model = self.strategy, self.strategy.model
        if self.of_average:
            strategy.exchange_averages()
        modes = {module: module.training for module in model.modules()}
        try:
            with strategy.as_one():
                model.eval()
                yield
        finally:
            for module, was_training in modes.items():
                module.training = was_training
            if self.of_average:
                strategy.exchange_averages()


def held_out_of(workload: Workload) -> Dataset:
    if workload.held_out is None or not len(workload.held_out):
        raise UsageError(
            f"the workload {workload.name} holds no samples out, so there is nothing to evaluate "
            "on; give it a held_out data set, or leave training.evaluate_every out"
        )
    return workload.held_out


def sums_of(workload: Workload) -> Evaluate:
    """The workload's own evaluation, or its loss alone."""

    def loss_alone(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        return {"loss": workload.loss(model, batch)}

    return workload.evaluate or loss_alone


def why_ended(rows: Sequence[Mapping[str, Any]], training: TrainingConfig) -> str | None:
    """Why a run ends after the last of these evaluations, before its last step; None: it does not.

    An evaluation at the end of a run that went on later does not count: without that end it would
    not have been made.
    """
    if training.patience is None:
        return None
    if any("loss" not in row for row in rows):
        raise UsageError(
            "training.patience is about the held-out loss, and evaluate of this workload gives no "
            "'loss'; add it, or leave training.patience out"
        )
    counted = [row for row in rows if row["steps"] % (training.evaluate_every or 1) == 0]
    losses = [loss if isinstance(loss := row["loss"], float) and loss == loss else math.inf
              for row in counted]  # fmt: skip
    best = losses.index(min(losses)) if losses else 0
    since = len(losses) - 1 - best
    if since < training.patience:
        return None
    return (
        f"{since} evaluations in a row have not lowered the held-out loss of {losses[best]:.4g} "
        f"after {fmt.count(counted[best]['steps'], 'step')} (training.patience "
        f"{training.patience})"
    )


def is_due(finished: int, every: int, total: int) -> bool:
    """After every ``every`` steps and after the last; ``every`` 0: after the last alone."""
    return finished == total or (every > 0 and finished % every == 0)
