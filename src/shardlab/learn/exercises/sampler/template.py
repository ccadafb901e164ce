"""Exercise: the distributed sampler.

Contract: ``indices(length, world, rank, epoch, seed, shuffle)`` returns the list of the samples
(numbers from 0 to length - 1) that this rank reads in this epoch.

- Every sample is read by some rank.
- Every rank gets equally many: length / world, rounded up. Where that is too many, samples are
  repeated: the order begins again at its start, as often as needed.
- With ``shuffle`` the whole data set is shuffled, by ``seed`` and ``epoch`` alone: every rank
  computes the same order by itself, without communicating, and each epoch has another one.
- Without it the order is 0, 1, 2 …
- Random numbers of other code are left alone: use a generator of your own.

Check with:  shardlab learn check sampler
"""

import torch


def indices(
    length: int, world: int, rank: int, epoch: int = 0, seed: int = 0, shuffle: bool = True
) -> list[int]:
    # TODO 1: the order of the whole data set, the same on every rank.
    # TODO 2: pad it, so that every rank gets equally many.
    # TODO 3: this rank's part.
    raise NotImplementedError("TODO: the samples that this rank reads in this epoch")
