"""Which elements of the whole model a rank holds, where an axis of the mesh cuts it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from shardlab.strategies.shards import Runs

# Where the elements lie that this rank holds of each tensor of the whole model, by its first name.
# What is missing is not held here.
Layout = dict[str, Runs]


def rows(shape: Sequence[int], ranges: Sequence[range], dim: int = 0) -> Runs:
    """The part that keeps these ranges of indices along ``dim``, one after the other."""
    inner = math.prod(shape[dim + 1 :])
    size = shape[dim] * inner
    runs: list[tuple[int, int]] = []
    for outer in range(math.prod(shape[:dim])):
        for kept in ranges:
            start, length = outer * size + kept.start * inner, len(kept) * inner
            if runs and sum(runs[-1]) == start:
                runs[-1] = runs[-1][0], runs[-1][1] + length
            elif length:
                runs.append((start, length))
    return tuple(runs)


def inside(outer: Runs, inner: Runs) -> Runs:
    """A part of a part: ``inner`` counts in the elements of ``outer``."""
    return tuple(run for start, length in inner for run in _between(outer, start, start + length))


def _between(runs: Runs, begin: int, end: int) -> Iterator[tuple[int, int]]:
    """The runs of some elements of a part, by their places in the part."""
    at = 0
    for start, length in runs:
        low, high = max(begin, at), min(end, at + length)
        if low < high:
            yield start + low - at, high - low
        at += length
