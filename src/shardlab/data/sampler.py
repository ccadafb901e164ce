"""Which samples a step reads, and which of them each rank: pure functions, no state.

The law: an epoch is an order of all samples, from seed and epoch alone. What is read next is
the next slice of that order, whatever the world; a rank takes every world-th of the slice. So
any rank of any world can say what any other reads, and a run that stops after ``position``
samples continues at another world size with nothing repeated or skipped.

What the ranks or batches cannot share evenly at an epoch's end is decided by the mode:

- ``padded``: filled up with samples from the order's start, as often round as it takes;
- ``exact``: kept as it is, each sample once: the last batch is short, ranks differ by one;
- ``continuous`` (for batches only): filled up from the next epoch's start, which then continues
  behind them. Each sample once in each epoch, and no batch is short.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardlab.config import CONTINUOUS
from shardlab.errors import unknown

Ids = npt.NDArray[np.int64]

MODES = ("padded", "exact")


class Draw(NamedTuple):
    """Samples to read, and the epoch in which each is read."""

    ids: Ids
    epochs: Ids


@lru_cache(maxsize=2)  # a step may straddle two epochs
def epoch_order(length: int, seed: int, epoch: int, shuffle: bool) -> Ids:
    """The order of all samples in an epoch."""
    if shuffle:
        order = np.random.default_rng((seed, epoch)).permutation(length).astype(np.int64)
    else:
        order = np.arange(length, dtype=np.int64)
    order.flags.writeable = False  # the cache shares it with the next caller
    return order


# ------------------------------------------------------------------ an epoch, sample by sample


def epoch_slots(length: int, unit: int, mode: str, position: int = 0) -> int:
    """How many samples an epoch still reads after ``position`` of them, in whole ``unit``s."""
    left = max(0, length - position)
    if mode == "exact":
        return left
    if mode == "padded":
        return -(-left // unit) * unit
    raise unknown("sampler mode", mode, MODES)


def rank_ids(
    length: int,
    world: int,
    rank: int,
    seed: int,
    epoch: int,
    *,
    mode: str,
    position: int = 0,
    shuffle: bool = True,
) -> Ids:
    """What one rank reads in an epoch, after all ranks of any world have read ``position``."""
    order = epoch_order(length, seed, epoch, shuffle)
    slots = epoch_slots(length, world, mode, position)
    mine = position + np.arange(rank, slots, world, dtype=np.int64)
    # Slots past the end are padding, and begin again at the order's start.
    return order[mine % length] if length else mine


# ------------------------------------------------------------------ batch by batch


def steps_per_epoch(length: int, size: int, mode: str) -> int:
    """Batches in an epoch; not for "continuous", where an epoch may end inside one."""
    return -(-epoch_slots(length, size, mode) // size)


def steps_of_epochs(epochs: float, size: int, length: int, mode: str) -> int:
    """Steps after which this many epochs are read; the last step may begin the next epoch."""
    in_one = length / size if mode == CONTINUOUS else steps_per_epoch(length, size, mode)
    return max(1, math.ceil(round(epochs * in_one, 6)))  # 0.1 of 30 is 3, not 3.0000000000000004


def draw(
    step: int, size: int, length: int, seed: int, shuffle: bool, mode: str = CONTINUOUS
) -> Draw:
    """A step's samples, over all ranks: ``size`` of them, or fewer at the end of an exact epoch."""
    if mode == CONTINUOUS:
        positions = np.arange(step * size, (step + 1) * size, dtype=np.int64)
        epochs = positions // length
    else:
        epoch, batch = divmod(step, steps_per_epoch(length, size, mode))
        end = min((batch + 1) * size, epoch_slots(length, size, mode))
        positions = np.arange(batch * size, end, dtype=np.int64)
        epochs = np.full(len(positions), epoch, dtype=np.int64)
    if not shuffle:  # an endless stream has no order of all samples
        return Draw(positions % length, epochs)
    ids = np.empty(len(positions), dtype=np.int64)
    for epoch in np.unique(epochs).tolist():
        here = epochs == epoch
        ids[here] = epoch_order(length, seed, epoch, shuffle)[positions[here] % length]
    return Draw(ids, epochs)


def rank_share(ids: Ids, ranks: int, rank: int, accumulate: int) -> list[Ids]:
    """The micro-batches of one rank: a partition of ``ids`` over ranks, then micro-batches.

    Dealt out one by one, so sizes differ by at most one, the first ranks have the most, and a
    rank may have none. ``rank`` is the data-parallel coordinate (of all hosts), never the local
    rank: two hosts would read the same samples.
    """
    mine = ids[rank::ranks]
    return [mine[part::accumulate] for part in range(accumulate)]
