"""Guards over what ranks must do alike: collectives, replicas, data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardlab.config import Config
from shardlab.errors import UsageError
from shardlab.guard import drift
from shardlab.guard.nodes import names
from shardlab.guard.sequence import Sequence
from shardlab.ledger import LEDGER
from shardlab.strategies.base import Strategy
from shardlab.workloads.base import Workload
from shardlab.world import World

if TYPE_CHECKING:
    from shardlab.checkpoint.parts import Numbers, Parts


class Guards:
    """Made by every rank, with a fresh ledger, before it builds its strategy."""

    def __init__(self, config: Config, world: World) -> None:
        self.config = config.guard
        self.world = world
        self.done = 0  # steps that were made since this start of the run
        is_checked = world.size > 1 and (self.config.check_steps or self.config.check_every)
        self.sequence = Sequence(world) if is_checked else None
        if self.sequence is not None and self.config.check_steps:
            LEDGER.check = self.sequence.check

    def after_step(self, step: int, strategy: Strategy) -> None:
        """Check what is due after a step, before it is evaluated or saved."""
        self.done += 1
        config = self.config
        if self.sequence is not None:
            if self.done == config.check_steps:
                LEDGER.check = None
            is_due = config.check_every and self.done % config.check_every == 0
            if is_due and self.done > config.check_steps:
                self.sequence.compare()
        if config.drift_every and self.done % config.drift_every == 0:
            drift.check(strategy, self.world, step)

    def after_loop(self) -> None:
        """Wait for all ranks: the next calls of a rank alone would pair with the others' step."""
        if self.sequence is not None:
            self.sequence.exchange("left the loop", self.done)

    def before_checkpoint(self) -> None:
        """Stop if the ranks called different collectives so far: the results are mixed up."""
        if self.sequence is not None:
            self.sequence.compare()

    def check_saved(self, parts: Parts, numbers: Numbers, step: int) -> None:
        """Stop if replicas would write parts that do not belong together. A collective.

        So every checkpoint is one that all ranks agreed on, and a run that drifts can be started
        again from the newest. Each element is read once, which costs less than its SHA-256.
        """
        if self.config.drift_every and self.world.size > 1:
            drift.check_saved(parts, numbers, self.world, step)


def refuse_unequal_data(workload: Workload, world: World) -> None:
    """Refuse ranks that count their samples differently: they would leave the loop at different
    times, and read different samples under one number."""
    lengths = world.gather(
        {
            "data": len(workload.dataset),
            "held-out data": None if workload.held_out is None else len(workload.held_out),
            "identity": getattr(workload.dataset, "identity", None),  # of iterable data
            "chosen": dict(workload.chosen),
        }
    )
    for rank, row in enumerate(lengths):
        for key, value in lengths[0]["chosen"].items():
            if row["chosen"].get(key) != value:
                raise UsageError(
                    f"nobody set {key}, and the ranks chose differently by what their nodes have: "
                    f"{value} on rank 0, {row['chosen'].get(key)} on rank {rank}; set it"
                )
    if len({row["identity"] for row in lengths}) > 1:
        raise UsageError(
            "the ranks' data or losses differ: iterable data begin with other samples, or the loss "
            "is a mean on some ranks alone; give every rank all of the data, in the same order: "
            "which samples are a rank's own is shardlab's to decide"
        )
    for kind in ("data", "held-out data"):
        found = [row[kind] for row in lengths]
        if len(set(found)) > 1:
            by_length = {
                n: [r for r, m in enumerate(found) if m == n] for n in dict.fromkeys(found)
            }
            counts = ", ".join(f"{names(ranks)}: {n or 0}" for n, ranks in by_length.items())
            raise UsageError(
                f"the ranks' {kind} sets have different lengths ({counts} samples), so the ranks "
                "would not make the same steps; give every rank the whole data set: which samples "
                "are a rank's own is shardlab's to decide"
            )
