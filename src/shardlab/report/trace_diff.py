"""The difference between runs' traces, in the terminal: two, or more side by side."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from shardlab import text as fmt
from shardlab.report import terminal
from shardlab.report.trace_terminal import SHORT, SPARE
from shardlab.trace.diff import Diff, Row, sentence
from shardlab.trace.model import PARTS

# By group of rows: what the table is called, and how many rows it shows.
GROUPS = {
    "part": ("where the step went", 6),
    "rank": ("where ranks changed differently", 8),
    "phase": ("phases, on the host", 4),
    "collective": ("collectives, the time a rank was in them", 8),
    "label": ("by bucket or block", 8),
    "operator": ("operators", 12),
}
NAME, LEAST = 12, 24  # characters of a run's name in a line, and of a row's
NOISE_SAID = "noise: 95% interval of a change, by the steps here; other runs may vary more"
IN_JSON = "; diff.json has all (--out DIR)"


def show(diff: Diff, file: Path | None = None) -> None:
    out = terminal.out()
    terminal.say(out, sentence(diff), "milliseconds per step and rank:", wraps=True)
    for note in diff.notes:
        out.print(f"note: {note}", markup=False, style="yellow")
    two = len(diff.runs) == 2
    if two and diff.step.noise_us is not None:
        out.print(NOISE_SAID, style="dim")
    if not two:
        out.print()
        terminal.show(
            out, terminal.fit(_by_run(diff), out.width, (*SPARE, "of the\nfirst"), IN_JSON)
        )
    for group, (title, most) in GROUPS.items():
        rows = [row for row in diff.of(group) if any(value.us for value in row.values)]
        if not rows or (group == "part" and not two):
            continue
        tables = [_changes(diff, title, rows[:most])] if two else []
        for table in tables or _side_by_side(diff, title, rows[:most], out.width):
            out.print()
            terminal.show(
                out, terminal.fit(table, out.width, ("calls/step", "ratio", "change"), IN_JSON)
            )
        if len(rows) > most:
            out.print(f"and {len(rows) - most} more, which {'changed' if two else 'differ'} less")
    if file is not None:
        out.print()
        terminal.say_paths(out, [file])


def _by_run(diff: Diff) -> Table:
    """A line for each run, however many there are: where its step went."""
    parts = {row.name: row for row in diff.of("part")}
    heads = {
        SHORT.get(part, name): parts[name]
        for part, name in PARTS.items()
        if any(value.us for value in parts[name].values)
    }
    table = terminal.table(
        "<run", "step", "of the\nfirst", *heads, "overlap", title="where the step went, in each run"
    )
    for i, name in enumerate(diff.runs):
        step, first = diff.step.values[i].us, diff.step.a.us
        table.add_row(
            escape(name),
            fmt.ms(step),
            fmt.speed(step / first if first else None),
            *(fmt.ms(row.values[i].us) for row in heads.values()),
            fmt.percent(diff.overlaps[i]),
        )
    return table


def _side_by_side(diff: Diff, title: str, rows: list[Row], width: int) -> Iterator[Table]:
    """A column for each run. Runs for which there is no room follow in another table."""
    room = max(1, (width - LEAST) // (NAME + 2))
    for begin in range(0, len(diff.runs), room):
        runs = range(begin, min(begin + room, len(diff.runs)))
        table = terminal.table(f"<{title}", *(_heading(diff.runs[i]) for i in runs))
        table.columns[0].style = "bold"
        for row in rows:
            cells = (fmt.ms(us) if (us := row.values[i].us) else fmt.NOTHING for i in runs)
            table.add_row(escape(terminal.short(row.name)), *cells)
        yield table


def _heading(name: str) -> str:
    return terminal.folded(terminal.short(name, 3 * NAME), NAME)


def _changes(diff: Diff, title: str, rows: list[Row]) -> Table:
    runs = map(_heading, diff.runs)
    by_steps = any(row.noise_us is not None for row in rows)
    last = "noise" if by_steps else "calls/step"
    table = terminal.table(f"<{title}", *runs, "change", "ratio", last)
    table.columns[0].style = "bold"
    for row in rows:
        grew = row.change_us > 0
        colour = "red" if grew else "green" if row.change_us < 0 else "default"
        colour = "dim" if row.is_noise else colour
        table.add_row(
            escape(terminal.short(row.name)),
            fmt.ms(row.a.us),
            fmt.ms(row.b.us),
            f"[{colour}]{'+' if grew else ''}{fmt.ms(row.change_us)}[/]",
            "in the noise" if row.is_noise else _ratio(row),
            f"±{fmt.ms(row.noise_us)}" if by_steps else _counts(row),
        )
    return table


def _ratio(row: Row) -> str:
    if not row.a.us:
        return "new"
    if not row.b.us:
        return "gone"
    return f"{row.ratio:,.0f}×" if row.ratio and row.ratio >= 100 else fmt.speed(row.ratio)


def _counts(row: Row) -> str:
    a, b = (fmt.number(side.count or 0) for side in (row.a, row.b))
    if row.a.count is None and row.b.count is None:
        return ""
    return a if a == b else f"{a} → {b}"
