"""A comparison as files: ``compare.json``, ``compare.csv`` and a page that needs nothing else.

The page is laid out here and drawn by the template. Charts use percentages across and pixels
down, so that they stretch with the window while their text and dots keep their size.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import jinja2

from shardlab.record import write_json, write_text
from shardlab.report import format as fmt
from shardlab.report.format import Cell, Result
from shardlab.report.terminal import verdict

CSV_COLUMNS = (
    "workload", "parameters", "global_batch", "strategy", "label", "options", "world", "accumulate",
    "status", "reason", "step_ms_median", "step_ms_p10", "step_ms_p90", "step_ms_n",
    "speed_to_baseline", "skew_ms", "samples_per_s", "tokens_per_s", "peak_bytes_total", "loss",
    "loss_difference",
)  # fmt: skip


def write(folder: Path, result: dict[str, Any]) -> dict[str, Path]:
    """The three files of a comparison, each whole or not there at all; by kind."""
    files = {
        "json": folder / "compare.json",
        "csv": folder / "compare.csv",
        "html": folder / "report.html",
    }
    write_json(files["json"], result)
    write_text(files["csv"], csv_text(result))
    write_text(files["html"], html(result))
    return files


def csv_text(result: Result) -> str:
    """One line per cell; what is the same for all is repeated, so that files can be joined."""
    text = io.StringIO()
    writer = csv.DictWriter(text, CSV_COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for cell in result["cells"]:
        row = {**result, **cell, "options": json.dumps(cell["options"])}
        for name in ("step_ms", "peak_bytes"):
            row |= {f"{name}_{key}": value for key, value in (cell[name] or {}).items()}
        writer.writerow(row)
    return text.getvalue()


def html(result: Result) -> str:
    """The page: no scripts, styles, fonts or images from elsewhere."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("shardlab.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    ranks = fmt.count(max(cell["world"] for cell in result["cells"]), "rank")
    strategies = fmt.count(len(result["cells"]), "strategy", "strategies").replace(" ", "\u00a0")
    has_numbers = bool(fmt.measured(result))
    return environment.get_template("compare.html.j2").render(
        result=result,
        fmt=fmt,
        title=f"{result['workload']} on {ranks}: {strategies} side by side",
        verdict=verdict(result),
        leanest=fmt.leanest(result),
        step_chart=_step_chart(result) if has_numbers else None,
        bar_rows=_bar_rows(result) if has_numbers else None,
        loss_chart=_loss_chart(result) if has_numbers else None,
        environment_rows=list(_environment_rows(result["env"])),
    )


# ------------------------------------------------------------------ layout of the charts


@dataclass(frozen=True)
class Tick:
    at: float  # percent of the axis
    text: str


def _ticks(low: float, high: float, about: int = 7, whole: bool = False) -> list[Tick]:
    """Round numbers (1, 2 or 5 times a power of ten apart) between ``low`` and ``high``."""
    span = high - low
    if span <= 0:
        return []
    power = 10.0 ** math.floor(math.log10(span / about))
    step = next(power * factor for factor in (1, 2, 5, 10) if span <= power * factor * about)
    step = max(step, 1) if whole else step
    decimals = max(0, -math.floor(math.log10(step)))
    return [
        Tick(100 * (i * step - low) / span, f"{i * step:,.{decimals}f}")
        for i in range(math.ceil(low / step), math.floor(high / step) + 1)
    ]


@dataclass(frozen=True)
class Dot:
    x: float  # percent
    lane: float  # which repeat, from 0 (the first) to 1 (the last)
    beyond: bool  # drawn at the axis' end, for it lies past it


@dataclass(frozen=True)
class StepRow:
    cell: Cell
    beyond: bool = False  # all of it past the axis
    median: float = 0  # percent, as are the next two
    p10: float = 0
    p90: float = 0
    dots: Sequence[Dot] = ()


@dataclass(frozen=True)
class StepChart:
    ticks: list[Tick]
    baseline: float | None  # percent
    rows: list[StepRow]
    every: int  # one dot for so many steps
    stalls: int  # single steps past the axis


FAR = 2.5  # times the fastest: at 8 ranks ``single`` would press all the others into a corner
DOTS_PER_REPEAT = 100


def _step_chart(result: Result) -> StepChart:
    """Median, spread and single steps, on an axis that shows the strategies near the fastest."""
    cells = fmt.measured(result)
    best = min(cell["step_ms"]["median"] for cell in cells)
    near = [cell for cell in cells if cell["step_ms"]["median"] <= FAR * best]
    times = [ms for cell in near for repeat in cell["step_ms_repeats"] for ms in repeat]
    low: float = min(times)
    p90: float = max(cell["step_ms"]["p90"] for cell in near)
    high: float = min(
        max(times), p90 + 0.2 * (p90 - low)
    )  # one stalled step does not stretch the axis
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
    reference = fmt.baseline(result)
    return StepChart(
        ticks=_ticks(low, high),
        baseline=percent(reference["step_ms"]["median"]) if reference in near else None,
        rows=rows,
        every=every,
        stalls=sum(dot.beyond for row in rows for dot in row.dots),
    )


@dataclass(frozen=True)
class BarRow:
    cell: Cell
    rate: float  # percent of the longest bar
    memory: float


def _bar_rows(result: Result) -> list[BarRow]:
    """Throughput and peak memory, each as a share of the largest."""
    key = fmt.rate_key(result)
    most_rate = max(cell[key] or 0 for cell in result["cells"]) or 1
    most_memory = max(fmt.peak(cell) or 0 for cell in result["cells"]) or 1
    return [
        BarRow(cell, 100 * (cell[key] or 0) / most_rate, 100 * (fmt.peak(cell) or 0) / most_memory)
        for cell in result["cells"]
    ]


@dataclass(frozen=True)
class Curve:
    cell: Cell
    path: str  # of an SVG, in a square of 100 by 100
    kind: str  # "band": the reference, broad and pale; "same": lies on it; "apart": does not
    dashes: str


@dataclass(frozen=True)
class LossChart:
    x_ticks: list[Tick]
    y_ticks: list[Tick]  # from the bottom
    timed_from: float  # percent: before it is the warm-up, if there is any
    curves: list[Curve]
    note: str


DASHES = ("none", "9 5", "3 4", "12 4 3 4", "6 3", "1.5 5")


def _loss_chart(result: Result) -> LossChart | None:
    """The curves over each other. They normally coincide, so the first is drawn broad and pale."""
    cells = [cell for cell in fmt.measured(result) if cell["losses"]]
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
        apart = fmt.agrees(cell, result) is False
        kind = "band" if index == 0 else "apart" if apart else "same"
        dashes = DASHES[(index - 1) % len(DASHES)] if index else "none"
        return Curve(cell, _path(cell["losses"], point), kind, dashes)

    return LossChart(
        x_ticks=_ticks(1, steps, about=8, whole=True),
        y_ticks=_ticks(low, high),
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
    if any(fmt.agrees(cell, result) is None for cell in cells):
        return "There is no finite loss of single to compare with."
    if len(cells) == 1:
        return ""
    tolerance = f"{100 * fmt.tolerance(result):g}% of the loss"
    apart = [cell["label"] for cell in cells if not fmt.agrees(cell, result)]
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


ENVIRONMENT_NAMES = {
    "time": "measured at",
    "device": "device",
    "gpus": "GPUs",
    "cuda": "CUDA",
    "cpu": "CPU",
    "cores": "CPU cores",
    "threads_per_rank": "threads per rank",
    "memory_bytes": "memory",
    "backend": "communication",
    "torch": "PyTorch",
    "python": "Python",
    "shardlab": "shardlab",
    "git": "commit",
    "platform": "platform",
}
ELSEWHERE = {"command", "workload", "parameters"}  # the page has them in other places


def _environment_rows(env: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Name and text, in our order; then what a later version may have added."""
    for key in dict.fromkeys((*ENVIRONMENT_NAMES, *env)):
        value = env.get(key)
        if value is None or value == [] or key in ELSEWHERE:
            continue
        if key == "memory_bytes":
            text = fmt.size(value)
        elif key == "git":
            text = value["commit"][:12] + (", with uncommitted changes" if value["dirty"] else "")
        elif key == "gpus":
            text = ", ".join(f"{value.count(gpu)} × {gpu}" for gpu in dict.fromkeys(value))
        else:
            text = str(value)
        yield ENVIRONMENT_NAMES.get(key, key), text
