"""The difference of two runs' traces, in the terminal."""

from __future__ import annotations

from pathlib import Path

from rich.markup import escape
from rich.table import Table

from shardlab import numbers as fmt
from shardlab.report import terminal
from shardlab.trace.diff import Diff, Row, sentence

# By group of rows: what the table is called, and how many rows it shows.
GROUPS = {
    "part": ("where the step went", 6),
    "phase": ("phases, on the host", 4),
    "collective": ("collectives, the time a rank was in them", 8),
    "label": ("by bucket or block", 8),
    "operator": ("operators", 12),
}


def show(diff: Diff, file: Path | None = None) -> None:
    out = terminal.out()
    terminal.say(out, sentence(diff), "milliseconds per step and rank:", wraps=True)
    for note in diff.notes:
        out.print(f"note: {note}", markup=False, style="yellow")
    for group, (title, most) in GROUPS.items():
        rows = [row for row in diff.of(group) if row.a.us or row.b.us]
        if rows:
            out.print()
            out.print(_table(diff, title, rows[:most]))
            if len(rows) > most:
                out.print(f"and {len(rows) - most} more, which changed less")
    if file is not None:
        out.print()
        terminal.say_paths(out, [file])


def _table(diff: Diff, title: str, rows: list[Row]) -> Table:
    runs = (name if len(name) <= 18 else "…" + name[-17:] for name in (diff.a, diff.b))
    table = terminal.table(f"<{title}", *runs, "change", "", "calls/step", least=24)
    table.columns[0].style, table.columns[0].max_width = "bold", 48
    for row in rows:
        grew = row.change_us > 0
        colour = "red" if grew else "green" if row.change_us < 0 else "default"
        table.add_row(
            escape(row.name if len(row.name) <= 96 else row.name[:95] + "…"),
            fmt.ms(row.a.us),
            fmt.ms(row.b.us),
            f"[{colour}]{'+' if grew else ''}{fmt.ms(row.change_us)}[/]",
            _ratio(row),
            _counts(row),
        )
    return table


def _ratio(row: Row) -> str:
    if not row.a.us:
        return "new"
    return "gone" if not row.b.us else fmt.speed(row.ratio)


def _counts(row: Row) -> str:
    a, b = (fmt.number(side.count or 0) for side in (row.a, row.b))
    if row.a.count is None and row.b.count is None:
        return ""
    return a if a == b else f"{a} → {b}"
