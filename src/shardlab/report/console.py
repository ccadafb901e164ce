"""What a person sees while a command runs and when it ends. Progress goes to stderr."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from shardlab import output
from shardlab import text as fmt
from shardlab.report import compare_terminal, terminal


@contextmanager
def _bar(description: str) -> Iterator[tuple[Progress, Any]]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=terminal.errors(), transient=True) as progress:
        yield progress, progress.add_task(description, total=None)


@contextmanager
def training_progress(enabled: bool) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """A bar on a terminal; in a log, a line now and then."""
    console = terminal.errors()
    if not enabled:
        yield lambda event: _warn(console, event)
        return
    if not console.is_terminal:
        yield lambda event: _log_line(console, event)
        return
    with _bar("starting the ranks") as (progress, task):

        def on_event(event: Mapping[str, Any]) -> None:
            _announce(progress.console, event)
            if "step" in event:
                text = (
                    f"loss {event['loss']:.4f}  lr {event['learning_rate']:.3g}  "
                    f"{event['step_ms']:.0f} ms/step"
                )
                progress.update(
                    task, description=text, completed=event["step"] + 1, total=event["steps"]
                )

        yield on_event


def _warn(console: Console, event: Mapping[str, Any]) -> None:
    """Say what a user must know who asked for no progress."""
    if output.tells("warning", quiet=True):
        kinds = ("warning", "restart", "checkpoint")
        _announce(console, {k: v for k, v in event.items() if k in kinds or "restart" in event})


def _announce(console: Console, event: Mapping[str, Any]) -> None:
    """What a person should know at once, in a line each."""
    lines: list[str] = []
    if "trace_bytes_estimated" in event:
        size = fmt.size(event["trace_bytes_estimated"])
        lines.append(f"recording: the traces will take about {size} per rank")
    lines += [f"{kind}: {event[kind]}" for kind in ("warning", "data", "note") if kind in event]
    if "resumed" in event:
        lines += resumption(event["resumed"])
    if "restart" in event:
        ranks = fmt.count(event["world"], "rank")
        lines.append(f"{event['reason']}; restart {event['restart']} of {event['of']} with {ranks}")
    if (event.get("checkpoint") or {}).get("error"):
        row = event["checkpoint"]
        lines.append(
            f"warning: the checkpoint of step {row['step']} was not written: {row['error']}; the "
            "run continues, and the one before it stays"
        )
    if "stopping" in event:
        lines.append(
            f"{event['stopping']}: the run stops after this step, with a checkpoint; a second one "
            "ends it at once"
        )
    if "evaluation" in event:
        lines.append(f"held out: {evaluation_text(event['evaluation'])}")
    terminal.say(console, *lines)


def _log_line(console: Console, event: Mapping[str, Any]) -> None:
    _announce(console, event)
    if event.get("logged"):
        console.print(
            f"step {event['step'] + 1}/{event['steps']}  loss {event['loss']:.4f}  "
            f"lr {event['learning_rate']:.3g}  {event['step_ms']:.1f} ms  "
            f"after {fmt.duration(event['seconds'])}"
        )


@contextmanager
def comparison_progress(enabled: bool) -> Iterator[Callable[[str, int, int], None]]:
    if not enabled:
        yield lambda _what, _done, _total: None
        return
    console = terminal.errors()
    if not console.is_terminal:
        yield lambda what, done, total: console.print(f"[{done}/{total}] {what}", markup=False)
        return
    with _bar("starting the ranks") as (progress, task):
        yield lambda what, done, total: progress.update(
            task, description=escape(what), completed=done, total=total
        )


def training_line(result: Mapping[str, Any]) -> str:
    """``20 steps: loss 5.2647 → 4.9858, 73.4 ms/step (p10–p90 70.1–80.0), 3,500 tokens/s``."""
    time = result["step_ms"]
    rate = (
        f"{result['samples_per_s']:,.1f} samples/s"
        if result["tokens_per_s"] is None
        else f"{result['tokens_per_s']:,.0f} tokens/s"
    )
    return (
        f"{result['steps']} steps: loss {result['first_loss']:.4f} → {result['loss']:.4f}, "
        f"{time['median']:.1f} ms/step (p10–p90 {time['p10']:.1f}–{time['p90']:.1f}), {rate}"
    )


def print_training(result: Mapping[str, Any]) -> None:
    out = terminal.out()
    out.print(training_line(result))
    if result["data"]:
        terminal.say(out, f"data: {result['data']}", wraps=True)
    wait = result["data_ms"]
    out.print(
        f"waiting for data: {wait['median']:.2f} ms/step (p10–p90 {wait['p10']:.2f}–"
        f"{wait['p90']:.2f}), beside the step"
    )
    since = "the first step" if not result["first_step"] else f"step {result['first_step'] + 1}"
    out.print(f"total time: {fmt.duration(result['seconds'])}, from {since} to the end")
    if evaluations := result["evaluations"]:
        out.print(f"held out: {evaluation_text(evaluations[-1])}")
    if result["ended_early"]:
        terminal.say(out, f"ended early: {result['ended_early']}", wraps=True)
    if (checkpoint := result["checkpoint"]) is not None and checkpoint["error"] is None:
        out.print(
            f"checkpoint after step {checkpoint['step']}: {fmt.size(checkpoint['bytes'])}, the run "
            f"waited {checkpoint['held_up_s']:.2f} s"
        )
    terminal.say(out, f"files: {result['folder']}")
    if traces := result.get("traces"):
        out.print(
            f"traces: {fmt.count(len(traces['files']), 'file')}, {fmt.size(traces['bytes'])} "
            f"(estimated {fmt.size(traces['estimated_bytes'])}); to see where the time went:"
        )
        terminal.say(out, f"  shardlab trace analyze {result['folder']}")


def resumption(row: Mapping[str, Any]) -> Iterator[str]:
    """Where a run continues, and what has changed."""
    for reason in row["passed_over"]:
        yield f"passed over: {reason}"
    if row["checkpoint"] is None:
        yield "no checkpoint to continue from: it begins at step 0"
    else:
        yield f"continues after step {row['step']}, from {row['checkpoint']}"
    for change in row["changed"]:
        yield f"changed: {change}"


def evaluation_text(row: Mapping[str, Any]) -> str:
    """``loss 2.3010, accuracy 0.1250 (360 samples, after 20 steps)``."""
    beside = ("steps", "samples", "targets", "seconds")
    numbers = (f"{name} {value:.4f}" for name, value in row.items() if name not in beside)
    return f"{', '.join(numbers)} ({row['samples']:,} samples, after {row['steps']} steps)"


def print_comparison(result: Mapping[str, Any], files: Mapping[str, Path]) -> None:
    out = terminal.out()
    _show(out, compare_terminal.compare_table(result))
    out.print()
    if (explained := compare_terminal.explained_table(result)) is not None:
        _show(out, explained, compare_terminal.SPARE)
        out.print()
    terminal.say(out, *compare_terminal.verdict_lines(result), wraps=True)
    if len(result["env"].get("nodes", ())) > 1:
        terminal.say(out, f"measured on {fmt.nodes(result['env']['nodes'])}", wraps=True)
    terminal.say(out, *terminal.about(result["env"]), wraps=True)
    terminal.say_paths(out, files.values())
    found = {cell["label"]: cell["traces"] for cell in result["cells"] if cell.get("traces")}
    size = sum(traces.get("bytes", 0) for traces in found.values())
    if size:
        terminal.say_paths(out, [f"{files['html'].parent}/<strategy>/traces  {fmt.size(size)}"])
    for label, traces in found.items():
        if "reason" in traces:
            terminal.say(out, f"not explained, {label}: {traces['reason']}", wraps=True)


def _show(out: Console, table: Table, spare: Sequence[str] = ()) -> None:
    where = "; compare.csv has all"
    terminal.show(out, terminal.fit(table, out.width, spare, where, terminal.STRATEGY))


def print_gate(gate: Mapping[str, Any]) -> None:
    out = terminal.out()
    out.print()
    terminal.say(out, *(f"warning: {warning}" for warning in gate["warnings"]), wraps=True)
    _show(out, compare_terminal.gate_table(gate))
    terminal.say(out, compare_terminal.gate_verdict(gate), wraps=True)


def print_names(rows: Mapping[str, str], kind: str) -> None:
    table = terminal.table(f"|{kind}", "<what it is")
    for name, summary in rows.items():
        table.add_row(f"[bold]{name}[/]", escape(summary))
    terminal.out().print(table)


def print_diagnosis(checks: Sequence[Mapping[str, str]]) -> None:
    marks = {"ok": "[green]✓[/]", "missing": "[yellow]–[/]", "failed": "[red]✗[/]"}
    table = Table(box=None, pad_edge=False, show_header=False)
    for check in checks:
        table.add_row(marks[check["status"]], f"[bold]{check['name']}[/]", escape(check["detail"]))
    terminal.out().print(table)
