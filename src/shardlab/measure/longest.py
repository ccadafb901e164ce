"""The longest samples of the data: a step of them holds the most that any step does."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice

from shardlab.batch import Batch, Dataset, tensors_of
from shardlab.workloads.base import Workload
from shardlab.workloads.samples import ENDLESS

LOOKED_AT = 4096  # samples: of those that are 0.2% of the data, nearly surely one is among them
LOOK_S = 20.0  # slow data is not looked at for longer


@dataclass(frozen=True)
class Found:
    """What a look at the samples has found."""

    ids: Sequence[int] = ()  # of which batches are made; none: all samples are of one size
    note: str | None = None  # what an estimate is made of, in words


@dataclass(frozen=True)
class Longest:
    """A data set of which each batch is of the same samples, in turn if there are too few.

    So is each step: the first has no state of the optimizer yet, and must not be the largest.
    """

    whole: Dataset
    ids: Sequence[int]

    def __len__(self) -> int:
        return len(self.whole)

    def batch(self, ids: Sequence[int]) -> Batch:
        return self.whole.batch(list(islice(cycle(self.ids), len(ids))))


def of_longest(workload: Workload, ids: Sequence[int]) -> Workload:
    """The workload with batches of these samples alone; as it is, if there are none."""
    return replace(workload, dataset=Longest(workload.dataset, ids)) if ids else workload


def look(data: Dataset) -> Found:
    """Read samples one by one, chosen at random where there are many, and see which are large."""
    total = len(data)
    if total == ENDLESS:
        return _of_first(data, "the data is a stream, and longer ones may follow")
    sizes: dict[int, int] = {}
    limit, failure = time.monotonic() + LOOK_S, ""
    for i in random.Random(0).sample(range(total), min(total, LOOKED_AT)):
        try:
            batch = data.batch([i])
        except Exception as error:  # training may never meet this sample
            failure = f"sample {i}: {error}"
        else:
            tensors = tensors_of((batch.inputs, batch.targets))
            sizes[i] = sum(t.numel() * t.element_size() for t in tensors)
        if time.monotonic() > limit:
            break
    if not sizes:
        return _of_first(data, f"the sizes of single samples are not known ({failure})")
    among = "" if len(sizes) == total else f" that were looked at, of {total:,},"
    longest = sorted(sizes, key=lambda i: -sizes[i])
    largest, middle = sizes[longest[0]], statistics.median(sizes.values())
    if largest == min(sizes.values()):
        note = f"the {len(sizes):,} samples{among} are all of one size" if among else None
        return Found(note=note)
    times = f" is {largest / middle:.1f} times as large as the median one" if middle else ""
    return Found(
        longest,
        "the estimate is of batches of the longest samples: the largest of "
        f"{len(sizes):,}{among}{times}",
    )


def _of_first(data: Dataset, why: str) -> Found:
    return Found(range(len(data)), f"the estimate is of batches of the first samples: {why}")
