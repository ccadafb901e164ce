"""What a learner sees on the terminal."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from rich.console import Console
from rich.markdown import Markdown
from rich.markup import escape
from rich.padding import Padding
from rich.syntax import Syntax

from shardlab.report import terminal

if TYPE_CHECKING:
    from shardlab.learn.exercise import Exercise, Finding
    from shardlab.learn.grade import Verdict

SHOWN = 1500  # characters of what a rank printed
WIDTH = 100


def _out() -> Console:
    console = terminal.out()
    console.width = min(console.width, WIDTH)
    return console


def print_overview(rows: Sequence[Mapping[str, Any]], folder: Path) -> None:
    console = _out()
    table = terminal.table("<", "<exercise", "<what you write", "<state")
    for i, row in enumerate(rows, start=1):
        table.add_row(str(i), row["name"], escape(row["title"]), _state(row))
    console.print(table)
    passed = sum(row["passed"] is not None for row in rows)
    console.print(f"\n{passed} of {len(rows)} passed; your files are in {escape(str(folder))}")
    to_do = [row for row in rows if row["passed"] is None]
    if to_do:
        verb = "check" if to_do[0]["started"] else "start"
        console.print(f"next: shardlab learn {verb} {to_do[0]['name']}")


def _state(row: Mapping[str, Any]) -> str:
    hints = f", {row['hints']} hint{'s' * (row['hints'] != 1)}" if row["hints"] else ""
    if row["passed"]:
        return f"[green]passed[/green] {row['passed'][:10]}{hints}"
    if row["started"] or row["checks"]:
        return f"[yellow]started[/yellow]{hints}"
    return f"–{hints}"


def print_started(exercise: Exercise, path: Path, flag: str) -> None:
    console = _out()
    name, file, flag = exercise.name, escape(str(path)), escape(flag)
    console.print(f"wrote [bold]{file}[/bold]: {escape(exercise.title)}")
    console.print(f"  read   shardlab learn show {name}{flag}")
    console.print(f"  edit   {file}: its docstring is the contract, TODO is yours")
    console.print(f"  check  shardlab learn check {name}{flag}")
    console.print(f"  stuck  shardlab learn hint {name}{flag}")


def print_readme(exercise: Exercise, with_pitfalls: bool) -> None:
    """The picture is replaced by what it shows and by its path, in one piece to be copied."""
    console = _out()
    readme = exercise.readme
    if not with_pitfalls:
        later = f"After your first `shardlab learn check {exercise.name}`, or with `--pitfalls`."
        readme = re.sub(r"(?ms)^## Pitfalls$.*?(?=^## |\Z)", f"## Pitfalls\n\n{later}\n\n", readme)
    before, _, after = re.split(r"(!\[.*\]\(picture\.svg\))", readme)
    console.print(Markdown(before))
    shows = ElementTree.parse(exercise.picture).findtext("{*}title") or ""
    console.print(f"\n[italic]Picture:[/italic] {escape(shows)}")
    console.print(f"[dim]{escape(str(exercise.picture))}[/dim]\n", soft_wrap=True)
    console.print(Markdown(after))


def checking(exercise: Exercise) -> AbstractContextManager[Any]:
    """A sign of life on a terminal; nothing in a log."""
    return terminal.errors().status(f"checking {exercise.name} on real ranks")


def print_verdict(verdict: Verdict, flag: str) -> None:
    console = _out()
    name = verdict.exercise
    if verdict.passed:
        console.print(f"[bold green]passed[/bold green]  {name}")
        for case in verdict.cases:
            console.print(f"  [dim]- {escape(case)}[/dim]")
        console.print(f"  [dim]compare with ours: shardlab learn solution {name}[/dim]")
    else:
        console.print(f"[bold red]not yet[/bold red]  {name}")
    by_cause: dict[str, list[Finding]] = defaultdict(list)
    for finding in verdict.findings:
        by_cause[finding.cause].append(finding)
    for cause, (first, *others) in by_cause.items():
        where = f" [dim]({escape(first.case)})[/dim]" if first.case else ""
        also = f" [dim]Also: {escape(', '.join(f.case for f in others))}[/dim]" if others else ""
        said = f"[red]{cause}[/red]{where}: {escape(first.message)}{also}"
        console.print(Padding(said, (0, 0, 0, 2)))
    for rank, text in enumerate(verdict.printed):
        if text.strip():
            console.print(f"  [dim]rank {rank} printed:\n{escape(text[-SHOWN:].rstrip())}[/dim]")
    if not verdict.passed:
        console.print(f"  [dim]stuck? shardlab learn hint {name}{escape(flag)}[/dim]")
        console.print(f"  [dim]what often goes wrong: shardlab learn show {name} --pitfalls[/dim]")


def print_hints(exercise: Exercise, seen: int) -> None:
    console = _out()
    hints = exercise.hints
    console.print(f"[bold]hint {seen} of {len(hints)}[/bold]")
    console.print(Markdown(hints[seen - 1]))
    if seen == len(hints):
        console.print(
            f"\n[dim]That was the last; ours: shardlab learn solution {exercise.name}[/dim]"
        )


def print_solution(exercise: Exercise) -> None:
    console = _out()
    console.print(
        Syntax(exercise.solution, "python", theme="ansi_dark", background_color="default")
    )
    if exercise.corresponds_to:
        console.print(f"\nin the package: src/shardlab/{exercise.corresponds_to}", soft_wrap=True)
