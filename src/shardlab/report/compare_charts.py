"""Where the charts of a comparison have their bars, dots and curves; the template draws them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from shardlab import text as fmt
from shardlab.measure import fields
from shardlab.measure.fields import Cell, Result
from shardlab.report.charts import Amounts, StackChart, Tick, line, stacked, ticks
from shardlab.trace.model import PARTS


class Dot(NamedTuple):
    x: float  # percent
    lane: float  # which repeat, from 0 (the first) to 1 (the last)
    beyond: bool  # drawn at the axis' end, for it lies past it


class StepRow(NamedTuple):
    cell: Cell
    beyond: bool = False  # all of it past the axis
    median: float = 0  # percent, as are the next two
    p10: float = 0
    p90: float = 0
    dots: Sequence[Dot] = ()


class StepChart(NamedTuple):
    ticks: list[Tick]
    baseline: float | None  # percent
    rows: list[StepRow]
    every: int  # steps for one dot
    stalls: int  # single steps past the axis


FAR = 2.5  # times the fastest: at 8 ranks ``single`` would press all the others into a corner
DOTS_PER_REPEAT = 100


def step_chart(result: Result) -> StepChart:
    """Median, spread and single steps, on an axis that shows the strategies near the fastest."""
    cells = fields.measured(result)
    best = min(cell["step_ms"]["median"] for cell in cells)
    near = [cell for cell in cells if cell["step_ms"]["median"] <= FAR * best]
    times = [ms for cell in near for repeat in cell["step_ms_repeats"] for ms in repeat]
    low: float = min(times)
    p90: float = max(cell["step_ms"]["p90"] for cell in near)
    high: float = min(max(times), p90 + 0.2 * (p90 - low))  # a stalled step does not stretch it
    margin = 0.04 * (high - low) or 0.1 * high or 1.0
    low, high = max(low - margin, 0), high + margin
    every = math.ceil(result["timed_steps"] / DOTS_PER_REPEAT)

    def percent(ms: float) -> float:
        return min(max(100 * (ms - low) / (high - low), 0), 100)

    def row(cell: Cell) -> StepRow:
        if cell not in near:
            return StepRow(cell, beyond=cell["step_ms"] is not None)
        lanes = max(len(cell["step_ms_repeats"]) - 1, 1)
        dots = [
            Dot(percent(ms), lane / lanes, ms > high)
            for lane, repeat in enumerate(cell["step_ms_repeats"])
            for step, ms in enumerate(repeat)
            if step % every == 0 or ms > high
        ]
        time = cell["step_ms"]
        return StepRow(
            cell,
            median=percent(time["median"]),
            p10=percent(time["p10"]),
            p90=percent(time["p90"]),
            dots=dots,
        )

    rows = [row(cell) for cell in result["cells"]]
    reference = fields.baseline(result)
    return StepChart(
        ticks=ticks(low, high),
        baseline=percent(reference["step_ms"]["median"]) if reference in near else None,
        rows=rows,
        every=every,
        stalls=sum(dot.beyond for row in rows for dot in row.dots),
    )


class BarRow(NamedTuple):
    cell: Cell
    rate: float  # percent of the longest bar
    memory: float


def bar_rows(result: Result) -> list[BarRow]:
    """Throughput and peak memory, each as a share of the largest."""
    key = fields.rate_key(result)
    most_rate = max(cell[key] or 0 for cell in result["cells"]) or 1
    most_memory = max(fields.peak(cell) or 0 for cell in result["cells"]) or 1
    return [
        BarRow(
            cell, 100 * (cell[key] or 0) / most_rate, 100 * (fields.peak(cell) or 0) / most_memory
        )
        for cell in result["cells"]
    ]


def stack_chart(result: Result) -> StackChart | None:
    """A profiled step of each strategy: the mean over its ranks and steps."""
    bars = [
        Amounts(
            cell,
            {part: profile.get(f"{part.removesuffix('_us')}_ms", 0.0) for part in PARTS},
            profile["hidden_comm_ms"],
        )
        for cell in fields.measured(result)
        if (profile := cell.get("profile"))
    ]
    return stacked(bars, PARTS, lambda ms: f"{fmt.number(ms)} ms", ("ms", 1)) if bars else None


def memory_chart(result: Result) -> StackChart | None:
    """What the fullest rank held at its peak, and what for."""
    bars = [
        Amounts(cell, {cause: peak[cause] for cause in fields.CAUSES}, note=_estimated(cell))
        for cell in fields.measured(result)
        if fields.CAUSES.keys() <= (peak := cell["peak_bytes"] or {}).keys()
    ]
    if not bars:
        return None
    most = max(bar.of["peak_bytes"]["total"] for bar in bars)
    return stacked(bars, fields.CAUSES, fmt.size, fmt.unit_of(most))


def _estimated(cell: Cell) -> str:
    """How far the estimate was off, where there is one."""
    estimate = (cell.get("estimated_bytes") or {}).get("total")
    if estimate is None:
        return ""
    error = 100 * (estimate / cell["peak_bytes"]["total"] - 1)
    return f"estimate {error:+.1f}%"


class Scaling(NamedTuple):
    """How one strategy's throughput grows with the ranks."""

    name: str
    path: str  # of an SVG, in a square of 100 by 100
    ideal: str
    points: list[tuple[float, float, str]]  # x, y, and what it says
    text: str


class ScalingChart(NamedTuple):
    curves: list[Scaling]
    worlds: list[Tick]
    y_ticks: list[Tick]


def scaling(result: Result) -> ScalingChart | None:
    """Throughput by number of ranks, for what ran in several; ideal: from its smallest world."""
    key = fields.rate_key(result)
    groups: dict[str, dict[int, float]] = {}
    cells = [cell for cell in fields.measured(result) if cell["strategy"] != "single"]
    several = {
        name: len({cell[name] for cell in cells}) > 1 for name in ("precision", "accumulate")
    }
    for cell in cells:
        parts = [f"{k}={v}" for k, v in cell["options"].items()]
        parts += [cell["precision"]] if several["precision"] else []
        parts += [f"accumulate={cell['accumulate']}"] if several["accumulate"] else []
        name = f"{cell['strategy']} ({', '.join(parts)})" if parts else cell["strategy"]
        groups.setdefault(name, {})[cell["world"]] = cell[key]
    groups = {name: rates for name, rates in groups.items() if len(rates) > 1}
    if not groups:
        return None
    worlds = sorted({world for rates in groups.values() for world in rates})
    ideals = {
        name: {w: rates[min(rates)] * w / min(rates) for w in rates}
        for name, rates in groups.items()
    }
    most = max(max(*rates.values(), *ideals[name].values()) for name, rates in groups.items())

    def place(world: int, rate: float) -> tuple[float, float]:
        across = (world - worlds[0]) / (worlds[-1] - worlds[0])
        return 100 * across, 100 * (1 - rate / most)

    def through(rates: Mapping[int, float]) -> str:
        return line(place(world, rates[world]) for world in sorted(rates))

    curves = []
    for name, rates in groups.items():
        first, last = min(rates), max(rates)
        efficiency = 100 * rates[last] / ideals[name][last]
        points = [
            (*place(w, rates[w]), f"{fmt.count(w, 'rank')}: {fmt.compact(rates[w])}")
            for w in sorted(rates)
        ]
        text = f"{efficiency:.0f}% of ideal from {first} to {fmt.count(last, 'rank')}"
        curves.append(Scaling(name, through(rates), through(ideals[name]), points, text))
    across = [Tick(place(world, 0)[0], str(world)) for world in worlds]
    return ScalingChart(curves, across, ticks(0, most, about=4))


class Curve(NamedTuple):
    cell: Cell
    path: str  # of an SVG, in a square of 100 by 100
    kind: str  # "band": the reference, broad and pale; "same": lies on it; "apart": does not
    dashes: str


class LossChart(NamedTuple):
    x_ticks: list[Tick]
    y_ticks: list[Tick]  # from the bottom
    timed_from: float  # percent: before it is the warm-up, if there is any
    curves: list[Curve]
    note: str


DASHES = ("none", "9 5", "3 4", "12 4 3 4", "6 3", "1.5 5")


def loss_chart(result: Result) -> LossChart | None:
    """The curves over each other. They normally coincide, so the first is drawn broad and pale."""
    cells = [cell for cell in fields.measured(result) if cell["losses"]]
    cells.sort(key=lambda cell: cell["label"] != result["baseline"])  # drawn first, below the rest
    finite = [loss for cell in cells for loss in cell["losses"] if math.isfinite(loss)]
    if not finite:
        return None
    margin = 0.06 * (max(finite) - min(finite)) or 0.01 * abs(max(finite)) or 1.0
    low, high = min(finite) - margin, max(finite) + margin
    steps = max(len(cell["losses"]) for cell in cells)

    def point(step: int, loss: float) -> str:
        x, y = step / max(steps - 1, 1), (high - loss) / (high - low)
        return f"{100 * x:.2f} {100 * y:.2f}"

    def curve(index: int, cell: Cell) -> Curve:
        apart = fields.agrees(cell, result) is False
        kind = "band" if index == 0 else "apart" if apart else "same"
        dashes = DASHES[(index - 1) % len(DASHES)] if index else "none"
        return Curve(cell, _path(cell["losses"], point), kind, dashes)

    return LossChart(
        x_ticks=ticks(1, steps, about=8, whole=True),
        y_ticks=ticks(low, high),
        timed_from=100 * min((result["warmup_steps"] - 0.5) / max(steps - 1, 1), 1),
        curves=[curve(index, cell) for index, cell in enumerate(cells)],
        note=_loss_note(cells, result),
    )


def _path(losses: Sequence[float], point: Callable[[int, float], str]) -> str:
    """A line through the finite losses, broken where there are others."""
    parts = []
    for is_finite, run in groupby(enumerate(losses), key=lambda item: math.isfinite(item[1])):
        if is_finite:
            points = [point(step, loss) for step, loss in run]
            # A line to where it starts: a single point is then a dot, by its round cap.
            parts.append(f"M{points[0]} L" + " ".join(points[1:] or points))
    return "".join(parts)


def _loss_note(cells: Sequence[Cell], result: Result) -> str:
    if result.get("loss_not_compared"):
        return f"They need not coincide: {result['loss_not_compared']}."
    unknown = [cell["label"] for cell in cells if fields.agrees(cell, result) is None]
    if unknown and (len(unknown) == len(cells) or fields.baseline(result)["label"] in unknown):
        return "There is no finite loss of single to compare with."
    if len(cells) == 1:
        return ""
    if unknown:
        cells = [cell for cell in cells if cell["label"] not in unknown]
    loosest = max(fields.tolerance(result, cell) for cell in cells)
    tolerance = f"{100 * loosest:g}% of the loss"
    apart = [cell["label"] for cell in cells if not fields.agrees(cell, result)]
    if apart:
        verb = "is" if len(apart) == 1 else "are"
        return f"At the last step {fmt.names(apart)} {verb} further from single than {tolerance}."
    largest = max(cells, key=lambda cell: cell["loss_difference"])
    text = f"At the last step all {len(cells)} are within {tolerance} of single"
    if largest["loss_difference"] == 0:
        return f"{text}: exactly the same."
    return (
        f"{text}; {largest['label']} is furthest, by {fmt.difference(largest['loss_difference'])}."
    )
