"""The right answers, by ``shardlab.trace``, and those that known mistakes lead to.

Nothing is written down here: all comes from the trace, at every check.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shardlab import trace
from shardlab.learn.exercises.read_trace import TRACE
from shardlab.trace.intervals import Intervals, union
from shardlab.trace.model import Breakdown, Collective

WARM_UP = 0  # the step that is left out
FAST, LATE = 0, 1  # seen in the table of stragglers, and checked in the tests


@dataclass(frozen=True)
class Answer:
    """One question: what is right, how near is near enough, and what a mistake would give."""

    right: Any
    tolerance: float = 0.0  # relative
    points: float = 0.0  # absolute
    mistakes: tuple[tuple[str, Any], ...] = field(default=())

    def matches(self, given: Any, value: Any) -> bool:
        if isinstance(value, str) or isinstance(given, str):
            return str(given).strip().lower() == str(value).strip().lower()
        if not isinstance(given, int | float) or isinstance(given, bool):
            return False
        return bool(abs(given - value) <= self.tolerance * abs(value) + self.points)

    def mistake(self, given: Any) -> str | None:
        """The known mistake that leads to this answer, the nearest one first."""
        near = [(cause, value) for cause, value in self.mistakes if self.matches(given, value)]
        if not near or isinstance(given, str):
            return near[0][0] if near else None
        return min(near, key=lambda item: abs(given - item[1]))[0]


@functools.cache
def answers() -> dict[str, Answer]:
    traces = trace.load(TRACE)
    rows = traces.breakdown()
    steps = [row for row in rows if row.step != WARM_UP]
    fast = [row for row in steps if row.rank == FAST]
    late = [row for row in steps if row.rank == LATE]
    with_warm_up = [row for row in rows if row.rank == FAST]
    calls = [c for c in traces.collectives() if c.step is not None and c.step != WARM_UP]
    count = len(fast)
    lanes = {(lane.rank, lane.lane): union(lane.start_ns, lane.end_ns) for lane in traces.lanes()}
    step_ms = _mean(fast, "wall_us")
    wait_ms = _mean(fast, "wait_us")
    comm_ms = _mean(late, "comm_us")
    overlap = _overlap(late)
    moved = sum(c.bytes or 0 for c in calls) / count
    exposed = _by_label(calls, lambda c: _exposed(c, LATE, lanes[LATE, "compute"]))
    buckets = {label: ms for label, ms in exposed.items() if label.startswith("bucket")}
    longest = _by_label(calls, lambda c: _length(c, FAST))
    return {
        "STEP_MS": Answer(
            step_ms,
            tolerance=0.04,
            mistakes=(
                ("counted-warm-up", _mean(with_warm_up, "wall_us")),
                *_units(step_ms),
                ("whole-trace", step_ms * count),
                ("whole-trace", sum(r.wall_us for r in with_warm_up) / 1000),
            ),
        ),
        "LATE_RANK": Answer(
            traces.stragglers()[0].rank,
            mistakes=(("blamed-the-victim", FAST),),
        ),
        "LATE_BECAUSE": Answer(
            _grows(fast, late),
            mistakes=(("not-the-cause", "compute"), ("not-the-cause", "communication")),
        ),
        "WAIT_MS": Answer(
            wait_ms,
            tolerance=0.08,
            mistakes=(
                ("wait-is-communication", _mean(fast, "comm_us")),
                ("counted-warm-up", _mean(with_warm_up, "wait_us")),
                ("summed-intervals", sum(_waits(calls, FAST)) / count),
                ("wrong-rank", _mean(late, "wait_us")),
                *_units(wait_ms),
                ("whole-trace", wait_ms * count),
            ),
        ),
        "COMM_MS": Answer(
            comm_ms,
            tolerance=0.08,
            mistakes=(
                ("summed-intervals", sum(_length(c, LATE) for c in calls) / count),
                ("counted-the-wait", _mean(fast, "comm_us")),
                ("exposed-only", _mean(late, "exposed_comm_us")),
                ("counted-warm-up", _mean([r for r in rows if r.rank == LATE], "comm_us")),
                *_units(comm_ms),
                ("whole-trace", comm_ms * count),
            ),
        ),
        "OVERLAP_PERCENT": Answer(
            overlap,
            points=4.0,
            mistakes=(
                ("fraction-not-percent", overlap / 100),
                ("exposed-not-hidden", 100 - overlap),
                ("counted-the-wait", _overlap(fast)),
                ("of-the-step", 100 * _mean(late, "hidden_comm_us") / _mean(late, "wall_us")),
                ("counted-warm-up", _overlap([r for r in rows if r.rank == LATE])),
            ),
        ),
        "BYTES_PER_STEP": Answer(
            moved,
            tolerance=0.01,
            mistakes=(
                ("ranks-added", 2 * moved),
                ("whole-trace", count * moved),
                ("whole-trace", sum(c.bytes or 0 for c in traces.collectives())),
                ("elements-not-bytes", moved / 4),
                ("megabytes", moved / 1e6),
                ("megabytes", moved / 2**20),
            ),
        ),
        "TOP_OPERATOR": Answer(
            next(k.name for k in traces.kernels() if k.rank == FAST),
            mistakes=tuple(("not-own-time", name) for name in _that_call_others(traces)),
        ),
        "EXPOSED_BUCKET": Answer(
            max(buckets, key=lambda label: buckets[label]),
            mistakes=(
                ("blamed-the-wait", max(longest, key=lambda label: longest[label])),
                *(
                    ("another-bucket" if label in buckets else "no-bucket", label)
                    for label in exposed
                ),
            ),
        ),
    }


def _units(ms: float) -> tuple[tuple[str, float], ...]:
    return ("microseconds", ms * 1000), ("seconds", ms / 1000)


def _mean(rows: Sequence[Breakdown], part: str) -> float:
    """In ms per step."""
    return float(sum(getattr(row, part) for row in rows)) / len(rows) / 1000


def _overlap(rows: Sequence[Breakdown]) -> float:
    return 100 * sum(r.hidden_comm_us for r in rows) / sum(r.comm_us for r in rows)


def _grows(fast: Sequence[Breakdown], late: Sequence[Breakdown]) -> str:
    """Of what has the late rank more than the other?"""
    parts = {"compute": "compute_us", "communication": "exposed_comm_us", "host": "idle_host_us"}
    more = {name: _mean(late, part) - _mean(fast, part) for name, part in parts.items()}
    return max(more, key=lambda name: more[name])


def _by_label(
    calls: Iterable[Collective], value: Callable[[Collective], float]
) -> dict[str, float]:
    totals: dict[str, float] = {}
    for call in calls:
        totals[call.label] = totals.get(call.label, 0.0) + value(call)
    return totals


def _span(call: Collective, rank: int) -> Intervals:
    part = next(p for p in call.participants if p.rank == rank)
    return union(np.array([part.start_ns]), np.array([part.end_ns]))


def _length(call: Collective, rank: int) -> float:
    return _span(call, rank).length / 1e6


def _exposed(call: Collective, rank: int, compute: Intervals) -> float:
    return (_span(call, rank) - compute).length / 1e6


def _waits(calls: Iterable[Collective], rank: int) -> list[float]:
    return [p.wait_us / 1000 for c in calls for p in c.participants if p.rank == rank]


def _that_call_others(traces: trace.TraceSet) -> list[str]:
    """Operators of the fast rank that are long because of what runs inside them."""
    one = next(t for t in traces.traces if t.rank == FAST)
    own = {k.name: k.sum_us * 1000 for k in traces.kernels(top=len(one.names)) if k.rank == FAST}
    total = np.bincount(one.events.name, one.events.dur_ns, minlength=len(one.names))
    return [name for i, name in enumerate(one.names) if name in own and total[i] > 2 * own[name]]
