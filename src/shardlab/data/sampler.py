"""Which samples a step reads, and which of them each rank: pure functions, no state.

The position of a run is its step number. Everything else follows from (length, global
batch, seed), so any rank of any world can say what any other reads.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]


@lru_cache(maxsize=2)  # a step may straddle two epochs
def epoch_order(length: int, seed: int, epoch: int, shuffle: bool) -> Ids:
    """The order of all samples in an epoch."""
    if not shuffle:
        return np.arange(length, dtype=np.int64)
    return np.random.default_rng((seed, epoch)).permutation(length).astype(np.int64)


def global_batch_ids(step: int, size: int, length: int, seed: int, shuffle: bool) -> Ids:
    """The sample ids of a step, over all ranks: (size,). Epochs follow without a gap."""
    positions = np.arange(step * size, (step + 1) * size, dtype=np.int64)
    ids = np.empty(size, dtype=np.int64)
    for epoch in np.unique(positions // length):
        here = positions // length == epoch
        ids[here] = epoch_order(length, seed, int(epoch), shuffle)[positions[here] % length]
    return ids


def rank_share(ids: Ids, ranks: int, rank: int, accumulate: int) -> list[Ids]:
    """The micro-batches of one rank: a partition of ``ids`` over ranks, then micro-batches.

    Sizes differ by at most one, the first ranks have the most, and a rank may have none.
    ``rank`` is the data-parallel coordinate (of all hosts), never the local rank: two
    hosts would read the same samples.
    """
    return np.array_split(np.array_split(ids, ranks)[rank], accumulate)
