"""Where the charts of a trace have their bars, lines and curves; the template draws them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shardlab import text as fmt
from shardlab.report.charts import Amounts, StackChart, Tick, stacked, ticks
from shardlab.report.timeline import MAX_RANKS
from shardlab.trace import model

if TYPE_CHECKING:
    from shardlab.trace import TraceSet

MAX_STACKS = 64  # rows of the stacked chart, one for each step; beyond, one for each rank
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
