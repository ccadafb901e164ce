"""What strategies reach, in the terminal and as a page: a table, curves of loss, a verdict."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table
from rich.text import Text

from shardlab import text as fmt
from shardlab.report import charts, page, terminal
from shardlab.report.compare import environment_rows

Result = Mapping[str, Any]  # the content of to_loss.json
Cell = Mapping[str, Any]
COLOURS = 8  # of curves on the page; then they begin again, dashed


def write(folder: Path, result: Result) -> dict[str, Path]:
    """``to_loss.json``, and the page ``report.html``."""
    return page.write(folder, result, html(result), ("to_loss.json", "report.html"))


def show(result: Result, files: Mapping[str, Path]) -> None:
    out = terminal.out()
    terminal.show(out, terminal.fit(table(result), out.width, ("step\nms",), ", in to_loss.json"))
    out.print()
    terminal.say(out, *sentences(result), *terminal.about(result["env"]), wraps=True)
    terminal.say_paths(out, files.values())


# ------------------------------------------------------------------ words


def title(result: Result) -> str:
    """``gpt2-tiny until a held-out loss of 3.2``"""
    goal = result["goal"]
    if goal["loss"] is not None:
        return f"{result['workload']} until a held-out loss of {goal['loss']:g}"
    return f"{result['workload']} after {goal['tokens']:,} tokens"


HEADS = {
    "loss": ("steps", "seconds\n(min–max)", "time to\nbaseline", "95%", "step\nms", "sent"),
    "tokens": ("held-out\nloss", "difference\n95%", "seconds", "time to\nbaseline", "95%",
               "step\nms", "sent"),
}  # fmt: skip


def heads(result: Result) -> tuple[str, ...]:
    return HEADS["loss" if result["goal"]["tokens"] is None else "tokens"]


def table(result: Result) -> Table:
    """A row for each strategy. ``sentences`` say why one is not ranked."""
    shown = terminal.table(
        "<strategy", *heads(result),
        title=f"{title(result)} · {fmt.count(len(result['seeds']), 'seed')} · "
        f"baseline {result['baseline']}",
        least=12,
    )  # fmt: skip
    best = first(result)
    for cell in result["cells"]:
        mark = "*" if cell["changes"] else ""
        style = "bold" if cell["label"] == result["baseline"] else ""
        values = texts(result, cell) if cell["ranked"] else ["not ranked"]
        if cell is best:
            values = [f"[green]{values[0]}[/]", *values[1:]]
        shown.add_row(Text(cell["label"] + mark), *values, style=style)
    return shown


def texts(result: Result, cell: Cell) -> list[str]:
    """A ranked row's numbers, by its heads."""
    seconds, ratio = cell["seconds"], cell["seconds_ratio"] or {}
    rest = [
        fmt.speed(ratio.get("mean")),
        fmt.interval(ratio.get("interval")) or fmt.NOTHING,
        fmt.number(cell["step_ms"]["median"]),
        fmt.size(cell["bytes"]["median"]),
    ]
    median = fmt.number(seconds["median"])
    if result["goal"]["tokens"] is None:
        low, high = seconds["low"], seconds["high"]
        spread = f"{fmt.number(low, like=high)}–{fmt.number(high)}"
        return [f"{cell['steps']['median']:g}", f"{median} ({spread})", *rest]
    difference = (cell["loss_difference"] or {}).get("interval")
    between = f"{difference[0]:+.3f} to {difference[1]:+.3f}" if difference else fmt.NOTHING
    between = fmt.NOTHING if cell["label"] == result["baseline"] else between
    return [fmt.loss(cell["loss"]["median"]), between, median, *rest]


def not_ranked(result: Result, cell: Cell) -> str | None:
    """Why a strategy has no numbers; None if it has them."""
    if cell["ranked"]:
        return None
    if cell["status"] != "ok":
        return f"{cell['status']}: {cell['reason'] or 'no reason'}"
    if any(not math.isfinite(run["loss"] or math.nan) for run in cell["runs"]):
        return "its held-out loss was no longer a number"
    lowest = f"; the lowest was {fmt.loss(cell['lowest_loss'])}"
    where = f"{cell['reached']} of {fmt.count(len(result['seeds']), 'seed')}"
    return f"reached it with {where} in {fmt.count(result['max_steps'], 'step')}{lowest}"


def first(result: Result) -> Cell | None:
    """The ranked strategy that took the least time."""
    ranked = [cell for cell in result["cells"] if cell["ranked"]]
    return min(ranked, key=lambda cell: float(cell["seconds"]["median"]), default=None)


def sentences(result: Result) -> Iterator[str]:
    """The verdict, how sure it is, and which rows ms per step would mislead about."""
    best, goal, seeds = first(result), result["goal"]["loss"], len(result["seeds"])
    if best is None:
        yield nothing_reached(result)
    elif goal is not None:
        sure = _sure(best, result)
        yield f"{best['label']} reached {goal:g} in the least time, {_time(best)}{sure}."
    else:
        lowest = min((c for c in result["cells"] if c["ranked"]), key=lambda c: c["loss"]["median"])
        yield (
            f"{best['label']} took the least time, {_time(best)}{_sure(best, result)}; "
            f"{lowest['label']} had the lowest loss, {fmt.loss(lowest['loss']['median'])}"
            f"{_by(lowest, result)}."
        )
    for cell in result["cells"]:
        if why := not_ranked(result, cell):
            yield f"{cell['label']} is not ranked: {why}."
    changed: dict[str, list[str]] = {}
    for cell in result["cells"]:
        if cell["changes"]:
            changed.setdefault(cell["changes"], []).append(cell["label"])
    if changed:
        reasons = "; ".join(f"{fmt.names(labels)}: {why}" for why, labels in changed.items())
        yield f"* takes other steps than one process would ({reasons})."
        yield "Milliseconds per step alone do not rank these: what they reach, and when, does."
    else:
        yield "Every strategy here takes one process's steps, so ms per step would rank them too."
    every = result["evaluate_every"]
    yield (
        f"Evaluated after {'each step' if every == 1 else f'every {every:,} steps'} on "
        f"{result['evaluate_samples']:,} held-out samples. The times leave that out; steps and "
        "times are known to within one such stretch. Every strategy had the same seeds"
        + (", and is compared seed by seed." if seeds > 1 else "; one seed has no interval.")
    )


def nothing_reached(result: Result) -> str:
    losses = [c["lowest_loss"] for c in result["cells"] if c["lowest_loss"] is not None]
    goal = result["goal"]["loss"]
    if goal is None or not losses:
        return "No strategy finished."
    return (
        f"No strategy reached {goal:g} with every seed within {result['max_steps']:,} steps; the "
        f"lowest loss was {min(losses):.4f}. Try --to-loss above that, or more --steps."
    )


def _time(cell: Cell) -> str:
    steps = fmt.count(round(cell["steps"]["median"]), "step")
    return f"{fmt.duration(cell['seconds']['median'])} and {steps}"


def _sure(cell: Cell, result: Result) -> str:
    ratio = cell["seconds_ratio"]
    if ratio is None or cell["label"] == result["baseline"]:
        return ""
    text = f": {fmt.speed(ratio['mean'])} the time of {result['baseline']}"
    interval = ratio["interval"]
    if interval is None:
        return text
    text += f" (95% {fmt.interval(interval)})"
    return text if interval[1] < 1 else text + ", which may be chance"


def _by(cell: Cell, result: Result) -> str:
    found = cell["loss_difference"]
    if found is None or cell["label"] == result["baseline"]:
        return ""
    text = f", {found['mean']:+.4f} against {result['baseline']}"
    if found["interval"] is None:
        return text
    low, high = found["interval"]
    return f"{text} (95% {low:+.4f} to {high:+.4f})"


# ------------------------------------------------------------------ the page


class Curve(NamedTuple):
    cell: Cell
    paths: list[str]  # of an SVG, in a square of 100 by 100: one for each seed
    number: int
    dashes: str


class Chart(NamedTuple):
    heading: str
    unit: str
    curves: list[Curve]
    across: list[charts.Tick]
    down: list[charts.Tick]
    goal: float | None  # percent from the top


def chart(result: Result, heading: str, unit: str, key: str, factor: float = 1.0) -> Chart | None:
    """Held-out loss against what ``key`` of a point says, a line for each seed."""
    runs = [run for cell in result["cells"] for run in cell["runs"]]
    losses = [p["loss"] for run in runs for p in run["points"] if _is_number(p["loss"])]
    most = factor * max((p[key] for run in runs for p in run["points"]), default=0.0)
    if not losses or most <= 0:
        return None
    goal = result["goal"]["loss"]
    ends = losses if goal is None else [*losses, goal]
    margin = 0.04 * (max(ends) - min(ends)) or 0.1
    low, high = min(ends) - margin, max(ends) + margin

    def path(points: Sequence[Mapping[str, Any]]) -> str:
        return charts.line(
            (100 * factor * p[key] / most, 100 * (high - p["loss"]) / (high - low))
            for p in points
            if _is_number(p["loss"])
        )

    curves = [
        Curve(
            cell, [path(run["points"]) for run in cell["runs"]], i % COLOURS,
            "none" if i < COLOURS else "6 4",
        )
        for i, cell in enumerate(result["cells"])
    ]  # fmt: skip
    return Chart(
        heading, unit, curves, charts.ticks(0, most), charts.ticks(low, high),
        None if goal is None else 100 * (high - goal) / (high - low),
    )  # fmt: skip


def _is_number(loss: float | None) -> bool:
    return loss is not None and math.isfinite(loss)


def html(result: Result) -> str:
    unit = result["unit"]
    drawn = [
        chart(result, "Loss against time", "seconds of training", "seconds"),
        chart(result, f"Loss against {unit}", unit, "steps", result["units_per_step"]),
    ]
    verdict, *others = sentences(result)
    return page.render(
        "to_loss.html.j2",
        result=result,
        title=title(result),
        css=page.asset("trace.css"),
        verdict=verdict,
        sentences=others,
        facts=[
            ("Parameters", fmt.compact(result["parameters"])),
            ("Global batch", f"{result['global_batch']:,} samples"),
            ("Seeds", f"{len(result['seeds']):,}"),
            ("Most steps", f"{result['max_steps']:,}"),
        ],
        charts=[c for c in drawn if c is not None],
        heads=[head.replace("\n", " ") for head in heads(result)],
        texts=texts,
        not_ranked=not_ranked,
        environment_rows=list(environment_rows(result["env"])),
    )  # fmt: skip
