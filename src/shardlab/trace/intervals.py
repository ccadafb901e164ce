"""Sets of time, as sorted lists of intervals that do not touch: union, intersection, difference.

All are numpy and linear in the number of intervals once sorted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardlab.trace.model import Ints


@dataclass(frozen=True)
class Intervals:
    """Sorted, disjoint, not empty: ``start[i] < end[i] < start[i + 1]``."""

    start: Ints
    end: Ints

    def __len__(self) -> int:
        return len(self.start)

    @property
    def length(self) -> int:
        return int((self.end - self.start).sum())

    def __and__(self, other: Intervals) -> Intervals:
        return _where(self, other, both=True)

    def __or__(self, other: Intervals) -> Intervals:
        return union(
            np.concatenate([self.start, other.start]), np.concatenate([self.end, other.end])
        )

    def __sub__(self, other: Intervals) -> Intervals:
        return _where(self, other, both=False)

    def lengths(self, edges: Ints) -> Ints:
        """How much lies between each two neighbours of sorted ``edges``."""
        # Covered time up to a moment, at every boundary of an interval, is linear in between.
        covered = np.concatenate([[0], np.cumsum(self.end - self.start)])
        before = np.searchsorted(self.end, edges, side="right")  # intervals wholly before
        inside = np.zeros(len(edges), np.int64)
        some = before < len(self)
        inside[some] = np.maximum(0, edges[some] - self.start[before[some]])
        result: Ints = np.diff(covered[before] + inside)
        return result


NOTHING = Intervals(np.empty(0, np.int64), np.empty(0, np.int64))


def union(start: Ints, end: Ints) -> Intervals:
    """The time covered by any of these spans, which may overlap and come in any order."""
    some = end > start
    start, end = start[some], end[some]
    if not len(start):
        return NOTHING
    order = np.argsort(start, kind="stable")
    start, end = start[order], np.maximum.accumulate(end[order])
    first = np.concatenate([[True], start[1:] > end[:-1]])
    last = np.concatenate([first[1:], [True]])
    return Intervals(start[first], end[last])


def _where(a: Intervals, b: Intervals, both: bool) -> Intervals:
    """Where a holds and b does too (``both``), or does not."""
    if not len(a) or not len(b):
        return NOTHING if both or not len(a) else a
    times = np.concatenate([a.start, a.end, b.start, b.end])
    in_a = np.repeat([1, -1, 0, 0], [len(a), len(a), len(b), len(b)])
    in_b = np.repeat([0, 0, 1, -1], [len(a), len(a), len(b), len(b)])
    order = np.argsort(times, kind="stable")
    times = times[order]
    wanted = (np.cumsum(in_a[order]) > 0) & ((np.cumsum(in_b[order]) > 0) == both)
    start, end = times[:-1][wanted[:-1]], times[1:][wanted[:-1]]
    return union(start, end)


def to_ns(us: NDArray[np.float64]) -> Ints:
    """Microseconds below 2**43, or whole ones, to the exact nanosecond."""
    whole = np.floor(us)
    return whole.astype(np.int64) * 1000 + np.rint((us - whole) * 1000).astype(np.int64)
