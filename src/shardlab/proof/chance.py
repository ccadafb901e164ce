"""Random numbers in a forward pass: the same in the strategy's ranks and in one process.

Dropout, noise that is drawn in the loss, layers that are skipped by chance: none of it has to be
switched off. Before each micro-batch's loss the generators are seeded from the number of that
micro-batch, wherever it is computed. Only a proof does so; in training every rank draws its own.
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
from shardlab.workloads.base import Batch, LossFn


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
        self.batches = [batch for shares in steps for share in shares for batch in share]
        places = [
            Place(s, r, m)
            for s, shares in enumerate(steps)
            for r, share in enumerate(shares)
            for m, _ in enumerate(share)
        ]
        self.places = dict(zip(map(id, self.batches), places, strict=True))
        self.seeds = {id(b): 1_000_003 * (seed + 1) + i for i, b in enumerate(self.batches)}
        self.current: Place | None = None  # the micro-batch whose loss was computed last

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        self.current = self.places.get(id(batch))
        if id(batch) in self.seeds:
            worlds.seed(self.seeds[id(batch)])
        return self.loss(model, batch)


@dataclass(frozen=True)
class Nature:
    """What a forward pass depends on besides parameters, buffers and data."""

    draws: bool  # it uses random numbers
    remembers: bool  # it depends on what it has seen, beyond its buffers: a counter, a generator
    repeats: bool  # a new model, with the same seeds, computes the same again


def nature(make_model: Callable[[], nn.Module], loss: Seeded) -> Nature:
    """Find out by running the first micro-batch that has samples, twice and with the same seed."""
    batch = next((b for b in loss.batches if b.samples), loss.batches[0])
    model = make_model()
    outside = {n: t.detach().clone() for n, t in untrained(model)}

    def run(model: nn.Module) -> tuple[Tensor, bool]:
        worlds.seed(loss.seeds[id(batch)])
        before = generators()
        value = loss.loss(model, batch).detach()
        return value, generators() != before

    first, draws = run(model)
    put_back(model, outside)
    second, _ = run(model)
    if _same(first, second):
        return Nature(draws, remembers=False, repeats=True)
    third, _ = run(make_model())
    return Nature(draws, remembers=True, repeats=_same(first, third))


def _same(a: Tensor, b: Tensor) -> bool:
    """Equal but for rounding: on a GPU sums may be made in any order. NaN equals NaN."""
    rounding = 1e-10 if a.dtype == torch.float64 else 1e-5
    return torch.allclose(a, b, rtol=rounding, atol=0, equal_nan=True)


def untrained(model: nn.Module) -> list[tuple[str, Tensor]]:
    """What only forward can change: buffers, and parameters that are frozen."""
    frozen = ((n, p) for n, p in model.named_parameters() if not p.requires_grad)
    return [*frozen, *model.named_buffers()]


@torch.no_grad()
def put_back(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Restore those that have changed. (Most have not; an expanded buffer cannot be written to.)"""
    for name, tensor in untrained(model):
        if not torch.equal(tensor, values[name]):
            tensor.copy_(values[name])


def generators() -> bytes:
    """The state of every generator that ``worlds.seed`` seeds."""
    states = [random.getstate(), np.random.get_state(), torch.get_rng_state().numpy().tobytes()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state().numpy().tobytes())
    return pickle.dumps(states)
