"""The difference of two runs' traces, in the terminal."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shardlab.report import format as fmt
from shardlab.trace.diff import Diff, Row, sentence

TITLES = {
    "part": "where the step went",
    "phase": "phases, on the host",
    "collective": "collectives, the time a rank was in them",
    "label": "by bucket or block",
    "operator": "operators",
}
SHOWN = {"part": 6, "phase": 4, "collective": 8, "label": 8, "operator": 12}


def show(diff: Diff, file: Path | None = None) -> None:
    out = Console(highlight=False)
    out.print(sentence(diff), markup=False)
    out.print("milliseconds per step and rank:")
    for note in diff.notes:
        out.print(f"note: {note}", markup=False, style="yellow")
    for group, title in TITLES.items():
        rows = [row for row in diff.of(group) if row.a.us or row.b.us]
        if rows:
            out.print()
            out.print(_table(diff, title, rows[: SHOWN[group]]))
            if len(rows) > SHOWN[group]:
                out.print(f"and {len(rows) - SHOWN[group]} more, which changed less")
    if file is not None:
        out.print()
        out.print(f"  {file}", soft_wrap=True, markup=False)


def _table(diff: Diff, title: str, rows: list[Row]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column(title, style="bold", overflow="fold", min_width=24, max_width=48)
    for name in (diff.a, diff.b):
        short = name if len(name) <= 18 else "…" + name[-17:]
        table.add_column(escape(short), justify="right", no_wrap=True)
    table.add_column("change", justify="right")
    table.add_column("", justify="right")
    table.add_column("calls/step", justify="right")
    for row in rows:
        grew = row.change_us > 0
        colour = "red" if grew else "green" if row.change_us < 0 else "default"
        change = f"{'+' if grew else ''}{fmt.number(row.change_us / 1000)}"
        table.add_row(
            escape(row.name if len(row.name) <= 96 else row.name[:95] + "…"),
            fmt.number(row.a.us / 1000),
            fmt.number(row.b.us / 1000),
            f"[{colour}]{change}[/]",
            _ratio(row),
            _counts(row),
        )
    return table


def _ratio(row: Row) -> str:
    if not row.a.us:
        return "new"
    return "gone" if not row.b.us else f"{row.ratio:.2f}×"


def _counts(row: Row) -> str:
    a, b = (fmt.number(side.count or 0) for side in (row.a, row.b))
    if row.a.count is None and row.b.count is None:
        return ""
    return a if a == b else f"{a} → {b}"
