"""What a forward pass depends on besides parameters and data: random numbers, what it has seen.

Dropout, noise that is drawn in the loss, layers that are skipped by chance: none of it has to be
switched off in a proof. Before each micro-batch's loss the generators are seeded from the number of
that micro-batch, wherever it is computed. In training every rank draws its own numbers and sees its
own micro-batches. Where the loss depends on either, two strategies that are both right have
different losses, and only a proof can tell.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from shardlab import world as worlds
from shardlab.config import Config
from shardlab.training import builders
from shardlab.workloads.base import Batch, LossFn
from shardlab.world import World

RANDOM = (
    "forward draws random numbers (dropout, noise), and ranks draw others than one process does"
)
STATE = (
    "forward changes what its next loss depends on (a buffer, a cache), and a rank sees other "
    "micro-batches than one process does"
)
SAME = 1e-5  # share of the loss that a GPU's order of summation may change between two calls


class Place(NamedTuple):
    """Which micro-batch."""

    step: int
    rank: int
    micro: int


class Seeded:
    """A loss function whose random numbers depend on nothing but the micro-batch.

    A micro-batch is known by its identity, so that it does not matter who computes it, or when.
    """

    def __init__(self, loss: LossFn, seed: int, steps: Sequence[Sequence[Sequence[Batch]]]) -> None:
        self.loss = loss
        places = {
            Place(s, r, m): batch
            for s, shares in enumerate(steps)
            for r, share in enumerate(shares)
            for m, batch in enumerate(share)
        }
        self.batches = list(places.values())
        self.places = {id(batch): place for place, batch in places.items()}
        self.seeds = {id(b): 1_000_003 * (seed + 1) + i for i, b in enumerate(self.batches)}
        self.current: Place | None = None  # the micro-batch whose loss was computed last

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        self.current = self.places.get(id(batch))
        if id(batch) in self.seeds:
            worlds.seed(self.seeds[id(batch)])
        return self.loss(model, batch)


@dataclass(frozen=True)
class ForwardTraits:
    """What a forward pass depends on besides parameters, buffers and data."""

    uses_rng: bool
    stateful: bool  # it depends on what it has seen, beyond its buffers: a counter, a generator
    repeats: bool  # a new model, with the same seeds, computes the same again


def nature(make_model: Callable[[], nn.Module], loss: Seeded) -> ForwardTraits:
    """Find out by running the first micro-batch that has samples, twice and with the same seed."""
    batch = next((b for b in loss.batches if b.samples), loss.batches[0])
    model = make_model()
    outside = {n: t.detach().clone() for n, t in untrained(model).items()}

    def run(model: nn.Module) -> tuple[Tensor, bool]:
        worlds.seed(loss.seeds[id(batch)])
        before = generators()
        value = loss.loss(model, batch).detach()
        return value, generators() != before

    first, uses_rng = run(model)
    put_back(model, outside)
    second, _ = run(model)
    if _same(first, second):
        return ForwardTraits(uses_rng, stateful=False, repeats=True)
    third, _ = run(make_model())
    return ForwardTraits(uses_rng, stateful=True, repeats=_same(first, third))


def _same(a: Tensor, b: Tensor) -> bool:
    """Equal but for rounding: on a GPU sums may be made in any order. NaN equals NaN."""
    rounding = 1e-10 if a.dtype == torch.float64 else 1e-5
    return torch.allclose(a, b, rtol=rounding, atol=0, equal_nan=True)


def untrained(model: nn.Module) -> dict[str, Tensor]:
    """What only forward can change: buffers, and parameters that are frozen."""
    frozen = {n: p for n, p in model.named_parameters() if not p.requires_grad}
    return {**frozen, **dict(model.named_buffers())}


@torch.no_grad()
def put_back(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Restore those that have changed. (Most have not; an expanded buffer cannot be written to.)"""
    tensors = dict((*model.named_parameters(), *model.named_buffers()))
    for name, value in values.items():
        if not torch.equal(tensors[name], value):
            tensors[name].copy_(value)


def generators() -> bytes:
    """The state of every generator that ``worlds.seed`` seeds."""
    states = [random.getstate(), np.random.get_state(), torch.get_rng_state().numpy().tobytes()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state().numpy().tobytes())
    return pickle.dumps(states)


def why_losses_differ(world: World, config: Config) -> str | None:
    """Why the losses of two worlds cannot agree, whatever the strategy; None if they should.

    The loss of one micro-batch is run twice from the same random state: does it move that state,
    and is it the same again? A model that cannot run like this will fail when it is timed.
    """
    training, precision = config.training, config.precision.compute
    workload = builders.build_workload(config)
    parts = (config.launch.world or 1) * config.accumulate
    rows = min(len(workload.dataset), max(2, -(-training.global_batch // parts)))
    try:
        model = workload.make_model()
        model.to(world.device, torch.float64 if precision == "fp64" else torch.float32)
        batch = workload.dataset.batch(list(range(rows))).to(world.device)
        loss = builders.in_precision(workload.loss, precision)
        losses = []
        for _ in range(2):
            worlds.seed(training.seed)
            before = generators()
            losses.append(float(loss(model, batch).detach()))
            moved = generators() != before
    except Exception:
        return None
    if moved:
        return RANDOM
    return STATE if abs(losses[1] - losses[0]) > SAME * abs(losses[0]) else None
