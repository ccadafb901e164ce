"""Where the charts of a trace have their bars, lines and curves; the template draws them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shardlab import numbers as fmt
from shardlab.report.charts import Amounts, StackChart, Tick, stacked, ticks
from shardlab.report.timeline import MAX_RANKS
from shardlab.trace import model

if TYPE_CHECKING:
    from shardlab.trace import TraceSet

MAX_STACKS = 64  # rows of the stacked chart, one for each step; beyond, one for each rank
MAX_COLLECTIVES, MAX_TRACKS = 48, 600  # rows of the bucket timeline, and lines in all
CURVE_POINTS = 500


class Stacks(NamedTuple):
    chart: StackChart
    per_step: bool
    left_out: int  # ranks, the fastest


def stacks(ranks: Sequence[model.Breakdown], steps: Sequence[model.Breakdown]) -> Stacks:
    """A bar for each rank and step; for each of the slowest ranks, if that would be too many."""
    per_step = len(steps) <= MAX_STACKS
    shown = (
        steps if per_step else sorted(ranks, key=model.Breakdown.per_step, reverse=True)[:MAX_RANKS]
    )
    bars = []
    for row in sorted(shown, key=lambda r: (r.rank, -1 if r.step is None else r.step)):
        parts = {part: row.per_step(part) for part in model.PARTS}
        bars.append(Amounts(row, parts, row.per_step("hidden_comm_us")))
    chart = stacked(bars, model.PARTS, lambda us: f"{fmt.ms(us)} ms", ("ms", 1000))
    return Stacks(chart, per_step, 0 if per_step else len(ranks) - len(bars))


class Track(NamedTuple):
    """One rank's part in one collective, in percent of the step."""

    rank: int
    ready: float | None
    start: float
    arrived: float  # all ranks are in: the wait ends, the transfer begins
    end: float


class BucketRow(NamedTuple):
    kind: str
    label: str
    id: str
    tracks: list[Track]
    pitch: float  # pixels from one to the next: 12, less for many ranks
    text: str


class Buckets(NamedTuple):
    step: int
    rows: list[BucketRow]
    left_out: int
    ticks: list[Tick]


def buckets(
    collectives: Sequence[model.Collective], traces: TraceSet, steps: Sequence[model.Breakdown]
) -> Buckets | None:
    """The collectives of the step of median length, from ready to finished."""
    numbers = {c.step for c in collectives if c.step is not None}
    walls: dict[int, float] = {}
    for row in steps:
        if row.step is not None and row.step in numbers:
            walls[row.step] = max(walls.get(row.step, 0.0), row.wall_us)
    if not walls:
        return None
    step = sorted(walls, key=lambda number: (walls[number], number))[(len(walls) - 1) // 2]
    chosen = [c for c in collectives if c.step == step and c.participants]
    low, high = _step_span(traces, step, chosen)

    def place(ns: float) -> float:
        return min(max(100 * (ns - low) / (high - low), 0.0), 100.0)

    kept = sorted(chosen, key=lambda c: max(p.end_ns - p.start_ns for p in c.participants))
    ranks = max(len(c.participants) for c in chosen)
    kept = kept[-max(min(MAX_COLLECTIVES, MAX_TRACKS // ranks), 4) :]
    kept.sort(key=lambda c: min(p.start_ns for p in c.participants))
    rows = []
    for c in kept:
        tracks = [
            Track(
                p.rank,
                None if p.ready_ns is None else place(p.ready_ns),
                place(p.start_ns),
                place(min(p.start_ns + 1000 * p.wait_us, p.end_ns)),
                place(p.end_ns),
            )
            for p in c.participants
        ]
        last = f", rank {c.last_rank} last" if c.last_rank is not None and c.skew_us > 0 else ""
        text = f"transfer {fmt.ms(c.transfer_us)} ms, waits {fmt.ms(c.wait_us)} ms{last}"
        rows.append(
            BucketRow(c.called, c.label, c.id, tracks, min(12, max(3, 120 / len(tracks))), text)
        )
    return Buckets(step, rows, len(chosen) - len(kept), ticks(0, (high - low) / 1e6))


def _step_span(
    traces: TraceSet, step: int, collectives: Sequence[model.Collective]
) -> tuple[int, int]:
    """When the first rank began a step and when the last one ended it, on the common clock."""
    spans = [(p.start_ns, p.end_ns) for c in collectives for p in c.participants]
    shifts = traces.shifts()
    for trace in traces.traces:
        shift = shifts[trace.path]
        spans += [(s.start_ns + shift, s.end_ns + shift) for s in trace.steps if s.number == step]
    starts, ends = zip(*spans, strict=True)
    return min(starts), max(*ends, min(starts) + 1)


class MemoryCurve(NamedTuple):
    memory: model.Memory
    path: str  # in a square of 100 by 100
    peak_x: float
    peak_y: float
    steps: list[tuple[int, float]]  # number and place


class Curves(NamedTuple):
    rows: list[MemoryCurve]
    ticks: list[Tick]  # from the top


def curves(memory: Sequence[model.Memory], traces: TraceSet) -> Curves | None:
    shown = [m for m in memory if len(m.at_ns) > 1][:16]
    if not shown:
        return None
    most = max(int(m.bytes.max()) for m in shown) or 1
    unit, one = fmt.unit_of(most)
    axis = [Tick(100 - x, f"{text} {unit}") for x, text in ticks(0, most / one, about=4)]
    rows = []
    for m in shown:
        low, high = int(m.at_ns[0]), max(int(m.at_ns[-1]), int(m.at_ns[0]) + 1)
        path = _steps_path((m.at_ns - low) / (high - low), m.bytes / most)
        marks = [
            (step.number, 100 * (step.start_ns - low) / (high - low))
            for trace in traces.traces
            if trace.rank == m.rank
            for step in trace.steps
            if low <= step.start_ns <= high
        ]
        peak_x = min(max(100 * (m.peak_at_ns - low) / (high - low), 0.0), 100.0)
        rows.append(MemoryCurve(m, path, peak_x, 100 * (1 - m.peak_bytes / most), marks[:24]))
    return Curves(rows, axis)


def _steps_path(x: Any, y: Any) -> str:
    """A staircase; where points are closer than can be seen, their least and their most."""
    columns = np.minimum((x * CURVE_POINTS).astype(np.int64), CURVE_POINTS - 1)
    parts = []
    for column in np.unique(columns):
        values = y[columns == column]
        place = 100 * column / CURVE_POINTS
        for value in dict.fromkeys((float(values[0]), float(values.max()), float(values.min()),
                                    float(values[-1]))):  # fmt: skip
            parts.append(f"{place:.1f} {100 * (1 - value):.2f}")
    if not parts:
        return ""
    return "M" + " L".join(parts) + f" L100 {100 * (1 - float(y[-1])):.2f}"
