"""Run folders on the terminal: a table of all, and one in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.markup import escape

from shardlab import text as fmt
from shardlab.report import terminal
from shardlab.training.housekeeping import Run

COLOURS = {"running": "cyan", "finished": "green", "passed": "green", "interrupted": "yellow"}


def show(runs: Sequence[Run], root: Path, cache_bytes: int) -> None:
    out = terminal.out()
    if runs:
        table = terminal.table("<run", "<what", "<workload", "steps", "|state", "size")
        for run in runs:
            what = run.strategy if run.command == "train" else f"{run.command}: {run.strategy}"
            table.add_row(
                escape(run.folder.name), escape(what), escape(Path(run.workload).name),
                _steps(run), _state(run), fmt.size(run.bytes),
            )  # fmt: skip
        out.print(table)
        out.print()
    total = fmt.size(sum(run.bytes for run in runs))
    terminal.say(out, f"{root}: {fmt.count(len(runs), 'run')}, {total}")
    terminal.say(out, f"cache: {fmt.size(cache_bytes)}")


def _steps(run: Run) -> str:
    if run.steps is None:
        return ""
    is_short = run.steps_asked not in (None, run.steps)
    return f"{run.steps}/{run.steps_asked}" if is_short else str(run.steps)


def _state(run: Run) -> str:
    colour = COLOURS.get(run.state, "red")
    return f"[{colour}]{escape(run.state)}[/]"


def show_one(run: Run) -> None:
    terminal.say(terminal.out(), *_lines(run), wraps=True)


def _lines(run: Run) -> Iterator[str]:
    details = run.details
    world = f" on {fmt.count(details['world'], 'rank')}" if details.get("world") else ""
    yield f"{run.folder}: {run.command}, {run.state}, {fmt.size(run.bytes)}, {run.time}"
    if details.get("command"):
        yield f"command: {details['command']}"
    if details.get("reason"):
        yield f"reason: {details['reason']}"
    yield f"strategy: {', '.join(details.get('strategies', ())) or run.strategy}{world}"
    yield f"workload: {run.workload}"
    if run.steps:
        asked = f" of {run.steps_asked}" if run.steps_asked else ""
        loss = ""
        if details.get("loss") is not None:
            loss = f", loss {details['first_loss']:.4f} → {details['loss']:.4f}"
        time = f", {details['step_ms']:.1f} ms/step" if details.get("step_ms") else ""
        yield f"steps: {run.steps}{asked}{loss}{time}"
    if details.get("checkpoints"):
        steps = fmt.names([str(step) for step in details["checkpoints"]])
        yield f"checkpoints: after step {steps}; shardlab train --resume {run.folder}"
    if (run.folder / "traces").is_dir():
        yield f"traces: shardlab trace analyze {run.folder}"
