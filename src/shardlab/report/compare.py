"""A comparison as files: ``compare.json``, ``compare.csv`` and a page that needs nothing else.

The page is laid out here and drawn by the template. Charts use percentages across and pixels
down, so that they stretch with the window while their text and dots keep their size.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import jinja2

from shardlab.record import write_json
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
    _write_text(files["csv"], csv_text(result))
    _write_text(files["html"], html(result))
    return files


def _write_text(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8", newline="\n")
    os.replace(part, path)  # noqa: PTH105


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
    has_numbers = bool(fmt.measured(result))
    return environment.get_template("compare.html.j2").render(
        result=result,
        fmt=fmt,
        verdict=verdict(result),
        baseline=fmt.baseline(result),
        ranks=max(cell["world"] for cell in result["cells"]),
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


def _ticks(low: float, high: float, about: int = 5) -> list[Tick]:
    """Round numbers (1, 2 or 5 times a power of ten apart) between ``low`` and ``high``."""
    span = high - low
    if not span > 0:
        return [Tick(0, fmt.number(low))]
    power = 10.0 ** math.floor(math.log10(span / about))
    step = next(power * factor for factor in (1, 2, 5, 10) if span <= power * factor * about)
    decimals = max(0, -math.floor(math.log10(step)))
    first, last = math.ceil(low / step), math.floor(high / step)
    return [
        Tick(100 * (i * step - low) / span, f"{i * step:,.{decimals}f}")
        for i in range(first, last + 1)
    ]


@dataclass(frozen=True)
class Dot:
    x: float  # percent
    y: float  # from 0, the row's top, to 1
    beyond: bool  # drawn at the edge, for it lies past the axis


@dataclass(frozen=True)
class StepRow:
    cell: Cell
    median: float = 0  # these are percent of the axis
    p10: float = 0
    p90: float = 0
    dots: Sequence[Dot] = ()


@dataclass(frozen=True)
class StepChart:
    ticks: list[Tick]
    baseline: float | None  # percent
    rows: list[StepRow]
    every: int  # of how many steps one is drawn
    beyond: int  # steps past the axis


DOTS_PER_REPEAT = 100


def _step_chart(result: Result) -> StepChart:
    """Median and spread of each strategy over its single steps, one lane of dots per repeat."""
    cells = fmt.measured(result)
    slowest = max(ms for cell in cells for repeat in cell["step_ms_repeats"] for ms in repeat)
    # One stalled step shall not squeeze all the others into a corner.
    top = min(slowest, 1.25 * max(cell["step_ms"]["p90"] for cell in cells)) * 1.02
    every = math.ceil(max(result["timed_steps"], 1) / DOTS_PER_REPEAT)

    def row(cell: Cell) -> StepRow:
        if cell["step_ms"] is None:
            return StepRow(cell)
        dots = [
            Dot(min(100 * ms / top, 100), (lane + 0.5) / len(cell["step_ms_repeats"]), ms > top)
            for lane, repeat in enumerate(cell["step_ms_repeats"])
            for step, ms in enumerate(repeat)
            if step % every == 0 or ms > top
        ]
        spread = {key: 100 * cell["step_ms"][key] / top for key in ("median", "p10", "p90")}
        return StepRow(cell, dots=dots, **spread)

    rows = [row(cell) for cell in result["cells"]]
    reference = next(r for r in rows if r.cell["label"] == result["baseline"])
    return StepChart(
        ticks=_ticks(0, top),
        baseline=None if reference.cell["step_ms"] is None else reference.median,
        rows=rows,
        every=every,
        beyond=sum(dot.beyond for r in rows for dot in r.dots),
    )


@dataclass(frozen=True)
class BarRow:
    cell: Cell
    rate: float  # percent of the longest bar
    memory: float


def _bar_rows(result: Result) -> list[BarRow]:
    """Throughput and peak memory, each as a share of the largest."""
    key = fmt.rate_key(result)
    most_rate = max(cell[key] or 0 for cell in result["cells"])
    most_memory = max(fmt.peak(cell) or 0 for cell in result["cells"])
    return [
        BarRow(
            cell,
            rate=100 * (cell[key] or 0) / (most_rate or 1),
            memory=100 * (fmt.peak(cell) or 0) / (most_memory or 1),
        )
        for cell in result["cells"]
    ]


@dataclass(frozen=True)
class Curve:
    cell: Cell
    path: str  # of an SVG, in a square of 100 by 100
    kind: str  # "band": the reference, broad and pale; "same": lies on it; "apart"
    dashes: str


@dataclass(frozen=True)
class LossChart:
    x_ticks: list[Tick]
    y_ticks: list[Tick]  # from the bottom
    warmup: float  # percent: where the timed steps begin
    curves: list[Curve]
    note: str


DASHES = ("none", "9 5", "3 4", "12 4 3 4", "6 3", "1.5 5")


def _loss_chart(result: Result) -> LossChart | None:
    """The curves over each other. They normally coincide, so the reference is drawn broad."""
    cells = [cell for cell in fmt.measured(result) if cell["losses"]]
    values = [loss for cell in cells for loss in cell["losses"] if math.isfinite(loss)]
    if not values:
        return None
    low, high = min(values), max(values)
    margin = 0.06 * (high - low) or abs(high) * 0.01 or 1.0
    low, high = low - margin, high + margin
    steps = max(len(cell["losses"]) for cell in cells)
    width = max(steps - 1, 1)

    def place(step: int, loss: float) -> str:
        return f"{100 * step / width:.2f} {100 * (high - loss) / (high - low):.2f}"

    def curve(index: int, cell: Cell) -> Curve:
        is_reference = cell is cells[0] if reference is None else cell is reference
        apart = fmt.agrees(cell, result) is False
        return Curve(
            cell,
            path=_path(cell["losses"], place),
            kind="band" if is_reference else "apart" if apart else "same",
            dashes="none" if is_reference else DASHES[index % len(DASHES)],
        )

    reference = next((c for c in cells if c["label"] == result["baseline"]), None)
    return LossChart(
        x_ticks=[
            Tick(100 * (int(t.text.replace(",", "")) - 1) / width, t.text)
            for t in _ticks(1, steps, about=8)
            if "." not in t.text
        ],
        y_ticks=_ticks(low, high),
        warmup=min(100 * result["warmup_steps"] / width, 100),
        curves=[curve(index, cell) for index, cell in enumerate(cells)],
        note=_loss_note(result),
    )
