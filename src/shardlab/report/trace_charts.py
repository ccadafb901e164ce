"""Where the charts of a trace have their bars, lines and curves; the template draws them.

Charts use percentages across and pixels down, so that they stretch with the window while their text
keeps its size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from shardlab.report import format as fmt
from shardlab.report.timeline import MAX_RANKS, Shifts
from shardlab.trace import model

if TYPE_CHECKING:
    from shardlab.trace import TraceSet

MAX_STACKS = 64  # rows of the stacked chart, one for each step; beyond, one for each rank
MAX_COLLECTIVES, MAX_TRACKS = 48, 600  # rows of the bucket timeline, and lines in all
CURVE_POINTS = 500


def ms(us: float | None) -> str:
    """Microseconds as milliseconds, for reading."""
    return fmt.NOTHING if us is None else fmt.number(us / 1000)


def step_us(row: model.Breakdown) -> float:
    return row.wall_us / max(row.steps, 1)


@dataclass(frozen=True)
class Segment:
    part: str
    x: float  # percent
    width: float
    us: float


@dataclass(frozen=True)
class StackRow:
    rank: int
    step: int | None
    wall_us: float
    segments: list[Segment]
    hidden: tuple[float, float]  # x and width, inside compute, at its end
    text: str  # all of it in words


@dataclass(frozen=True)
class Stacks:
    rows: list[StackRow]
    per_step: bool
    ticks: list[tuple[float, str]]
    parts: list[str]  # those that appear, for the legend
    has_hidden: bool
    left_out: int  # ranks, the fastest


def stacks(ranks: Sequence[model.Breakdown], steps: Sequence[model.Breakdown]) -> Stacks:
    per_step = len(steps) <= MAX_STACKS
    shown = steps if per_step else sorted(ranks, key=step_us, reverse=True)[:MAX_RANKS]
    values = [
        (row, 1 if row.step is not None else max(row.steps, 1))
        for row in sorted(shown, key=lambda r: (r.rank, -1 if r.step is None else r.step))
    ]
    most = max((row.wall_us / n for row, n in values), default=0) or 1.0
    rows = []
    for row, n in values:
        x, segments = 0.0, []
        for part in model.PARTS:
            us = getattr(row, part) / n
            width = 100 * us / most
            if width > 0:
                segments.append(Segment(part, x, width, us))
            x += width
        compute = 100 * row.compute_us / n / most
        hidden = 100 * row.hidden_comm_us / n / most
        said = ", ".join(f"{model.PARTS[s.part]} {ms(s.us)} ms" for s in segments)
        if hidden:
            said += f"; {ms(row.hidden_comm_us / n)} ms of communication behind compute"
        rows.append(
            StackRow(
                row.rank, row.step, row.wall_us / n, segments, (compute - hidden, hidden), said
            )
        )
    return Stacks(
        rows,
        per_step,
        _ticks(most / 1000),
        [part for part in model.PARTS if any(s.part == part for r in rows for s in r.segments)],
        any(row.hidden[1] for row in rows),
        0 if per_step else len(ranks) - len(rows),
    )


def _ticks(high: float, about: int = 6) -> list[tuple[float, str]]:
    """Round numbers from 0 to ``high``: place in percent, text."""
    if high <= 0:
        return []
    power = 10.0 ** math.floor(math.log10(high / about))
    step = next(power * factor for factor in (1, 2, 5, 10) if high <= power * factor * about)
    decimals = max(0, -math.floor(math.log10(step)))
    count = math.floor(high / step * (1 + 1e-9))
    return [(100 * i * step / high, f"{i * step:,.{decimals}f}") for i in range(count + 1)]


@dataclass(frozen=True)
class Track:
    """One rank's part in one collective, in percent of the step."""

    rank: int
    ready: float | None
    start: float
    arrived: float  # all ranks are in: the wait ends, the transfer begins
    end: float


@dataclass(frozen=True)
class BucketRow:
    kind: str
    label: str
    id: str
    tracks: list[Track]
    pitch: float  # pixels from one to the next: 12, less for many ranks
    text: str


@dataclass(frozen=True)
class Buckets:
    step: int
    rows: list[BucketRow]
    left_out: int
    ticks: list[tuple[float, str]]
    phases: list[tuple[str, float, float]]  # of the first rank: name, x, width


def buckets(
    collectives: Sequence[model.Collective],
    traces: TraceSet,
    steps: Sequence[model.Breakdown],
    shifts: Shifts,
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
    low, high = _step_span(traces, step, chosen, shifts)

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
        text = f"transfer {ms(c.transfer_us)} ms, waits {ms(c.wait_us)} ms{last}"
        rows.append(
            BucketRow(c.kind, c.label, c.id, tracks, min(12, max(3, 120 / len(tracks))), text)
        )
    ticks = _ticks((high - low) / 1e6)
    return Buckets(step, rows, len(chosen) - len(kept), ticks, [])


def _step_span(
    traces: TraceSet, step: int, collectives: Sequence[model.Collective], shifts: Shifts
) -> tuple[int, int]:
    """From the first rank's begin of a step to the last's end, on the common clock."""
    low = min(p.start_ns for c in collectives for p in c.participants)
    high = max(p.end_ns for c in collectives for p in c.participants)
    for trace in traces.traces:
        shift = shifts[trace.path]
        for s in trace.steps:
            if s.number == step:
                low, high = min(low, s.start_ns + shift), max(high, s.end_ns + shift)
    return low, max(high, low + 1)


@dataclass(frozen=True)
class MemoryCurve:
    memory: model.Memory
    path: str  # in a square of 100 by 100
    peak_x: float
    peak_y: float
    steps: list[tuple[int, float]]  # number and place


@dataclass(frozen=True)
class Curves:
    rows: list[MemoryCurve]
    ticks: list[tuple[float, str]]  # from the bottom


def curves(memory: Sequence[model.Memory], traces: TraceSet) -> Curves | None:
    shown = [m for m in memory if len(m.at_ns) > 1][:16]
    if not shown:
        return None
    most = max(int(m.bytes.max()) for m in shown) or 1
    unit, name = max(
        (u for u in ((1, "B"), (1 << 10, "KiB"), (1 << 20, "MiB"), (1 << 30, "GiB"))
         if most >= u[0]), key=lambda u: u[0], default=(1, "B"),
    )  # fmt: skip
    ticks = [(100 - x, f"{text} {name}") for x, text in _ticks(most / unit, about=4)]
    rows = []
    for m in shown:
        low, high = int(m.at_ns[0]), max(int(m.at_ns[-1]), int(m.at_ns[0]) + 1)
        at = (m.at_ns - low) / (high - low)
        path = _steps_path(at, m.bytes / most)
        marks = []
        for trace in traces.traces:
            if trace.rank == m.rank:
                for s in trace.steps:
                    x = (s.start_ns - low) / (high - low)
                    if 0 <= x <= 1:
                        marks.append((s.number, 100 * x))
        peak_x = min(max(100 * (m.peak_at_ns - low) / (high - low), 0.0), 100.0)
        rows.append(MemoryCurve(m, path, peak_x, 100 * (1 - m.peak_bytes / most), marks[:24]))
    return Curves(rows, ticks)


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


def kernels(traces: TraceSet) -> list[dict[str, Any]]:
    """The top operators, ranks taken together: per rank and step."""
    together: dict[tuple[str, str], list[float]] = {}
    ranks = traces.breakdown(per="rank")
    steps = sum(row.steps for row in ranks) or 1
    for kernel in traces.kernels(top=40):
        entry = together.setdefault((kernel.name, kernel.kind), [0.0, 0.0, 0.0])
        entry[0] += kernel.count
        entry[1] += kernel.sum_us
        entry[2] = max(entry[2], kernel.max_us)
    wall = sum(row.wall_us for row in ranks) or 1
    rows: list[dict[str, Any]] = [
        {
            "name": name,
            "kind": kind,
            "count": count / steps,
            "us": total / steps,
            "mean_us": total / count,
            "max_us": longest,
            "share": 100 * total / wall,
        }
        for (name, kind), (count, total, longest) in together.items()
        if count
    ]
    return sorted(rows, key=lambda row: row["us"], reverse=True)[:25]
