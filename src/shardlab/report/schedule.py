"""Pipeline schedules in the terminal: who works on what when, and the bubble."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from shardlab import text as fmt
from shardlab.report import charts, terminal
from shardlab.strategies.pipeline.schedules import NAMES

Result = Mapping[str, Any]  # what ``shardlab schedule --json`` prints
Row = Mapping[str, Any]  # of one schedule
# A rank's every second stage is drawn in small letters, on the second of the colours.
COLOURS = {
    "F": ("white on blue", "black on cyan"),
    "B": ("black on yellow", "black on bright_yellow"),
    "I": ("white on magenta", "black on bright_magenta"),
    "W": ("white on green", "black on bright_green"),
}
LETTERS = "P ranks, M micro-batches, v stages each; a stage's F, B = I+W; a send c"
IDLE = "·"
WIDEST = 4  # characters of the shortest action


def show(result: Result) -> None:
    out = terminal.out()
    rows = result["schedules"]
    terminal.say(out, title(result), times(result), "", wraps=True)
    if len(rows) == 1:
        for line in drawing(rows[0], out.width):
            out.print(line, no_wrap=True, crop=False, overflow="ignore")
        out.print()
        for name, text in numbers(rows[0]):
            indent = " " * 9
            words = f"{name:{len(indent)}}{text}"
            terminal.say(out, *textwrap.wrap(words, out.width, subsequent_indent=indent))
    else:
        out.print(table(result))
        out.print()
        terminal.say(out, *notes(rows), wraps=True)


def title(result: Result) -> str:
    """``interleaved · 4 ranks with 2 stages each · 8 micro-batches``."""
    rows = result["schedules"]
    words = [rows[0]["name"]] if len(rows) == 1 else []
    words.append(fmt.count(result["ranks"], "rank"))
    if len(rows) == 1 and rows[0]["chunks"] > 1:
        words[-1] += f" with {rows[0]['chunks']} stages each"
    words.append(fmt.count(result["microbatches"], "micro-batch", "micro-batches"))
    return " · ".join(words)


def times(result: Result) -> str:
    """What a micro-batch costs on a rank."""
    backward = f"{result['backward_ms']:g}"
    if any("W" in _kinds(row) for row in result["schedules"]):
        backward += f" (weights {result['weight_ms']:g})"
    return (
        f"per micro-batch and rank: forward {result['forward_ms']:g} ms, backward {backward}; "
        f"a message {result['send_ms']:g} ms"
    )


def _kinds(row: Row) -> set[str]:
    return {action["kind"] for actions in row["ranks"] for action in actions}


def drawing(row: Row, width: int) -> Iterator[Text]:
    """A line for each rank, a line with the time, and what the letters mean."""
    names = [f"rank {rank} " for rank in range(len(row["ranks"]))]
    left = len(names[-1])
    scale, is_exact = scaled(row, width - left)
    for name, actions in zip(names, row["ranks"], strict=True):
        draw = _line if is_exact else _shares
        yield Text(name.ljust(left)).append_text(draw(actions, row, scale))
    yield Text(" " * left + _axis(row["step_ms"], scale, width - left), "dim")
    yield Text()
    for words in legend(row, scale, is_exact):
        yield from map(Text, textwrap.wrap(words, width))


def legend(row: Row, scale: float, is_exact: bool) -> Iterator[str]:
    kinds = [f"{kind} {name}" for kind, name in NAMES.items() if kind in _kinds(row)]
    numbers = ["number: micro-batch"] if is_exact else []
    yield ", ".join([*kinds, *numbers, f"{IDLE} idle"])
    if row["chunks"] > 1:
        which = "second stage" if row["chunks"] == 2 else "every second stage"
        yield f"small letters: a rank's {which}"
    if not is_exact:
        yield f"a character is {fmt.number(1 / scale)} ms, and shows what took most of it"


def scaled(row: Row, width: int) -> tuple[float, bool]:
    """Characters per millisecond, and whether even the shortest action has one of its own. If it
    has, it has a whole number of them; if possible one with which all others begin at a whole one,
    too, so that equal actions look equal."""
    width = max(width, 20)
    actions = [action for rank in row["ranks"] for action in rank]
    spans = (action["end_ms"] - action["start_ms"] for action in actions)
    shortest = min(span for span in spans if span > 0)
    most = min(WIDEST, int(width * shortest / row["step_ms"] * (1 + 1e-9)))
    if not most:
        return width / row["step_ms"], False
    times = {action[key] for action in actions for key in ("start_ms", "end_ms")}
    for whole in range(most, 0, -1):
        if all(abs(time * whole / shortest % 1 - 0.5) > 0.499 for time in times):
            return whole / shortest, True
    return most / shortest, True


def _line(actions: Sequence[Row], row: Row, scale: float) -> Text:
    """A rank's actions, each with its letter and, where there is room, its micro-batch."""
    line = Text()
    for action in actions:
        begin, end = (round(action[key] * scale) for key in ("start_ms", "end_ms"))
        line.append(IDLE * (begin - len(line)), "dim")
        letter, style = _look(action, row)
        room = end - begin
        label = f"{letter}{action['micro']}"
        label = (label if len(label) <= room else letter)[:room]
        line.append(label.ljust(room, "-"), style)
    line.append(IDLE * (round(row["step_ms"] * scale) - len(line)), "dim")
    return line


def _shares(actions: Sequence[Row], row: Row, scale: float) -> Text:
    """A line in which each character shows what the rank did for most of its time."""
    spent: list[dict[tuple[str, str], float]] = [{} for _ in range(round(row["step_ms"] * scale))]
    for action in actions:
        begin, end = action["start_ms"] * scale, action["end_ms"] * scale
        for column in range(int(begin), min(math.ceil(end), len(spent))):
            part = min(end, column + 1) - max(begin, column)
            look = _look(action, row)
            spent[column][look] = spent[column].get(look, 0.0) + part
    line = Text()
    for looks in spent:
        looks[IDLE, "dim"] = 1 - sum(looks.values())
        line.append(*max(looks, key=lambda look: looks[look]))
    return line


def _look(action: Row, row: Row) -> tuple[str, str]:
    """An action's letter and colours."""
    kind, is_second = action["kind"], action["stage"] // len(row["ranks"]) % 2
    return (kind.lower() if is_second else kind), COLOURS[kind][is_second]


def _axis(end: float, scale: float, width: int) -> str:
    """Times below the columns where they are."""
    line = ""
    for tick in charts.ticks(0, end, about=max(1, min(7, round(end * scale) // 10))):
        at = round(tick.at / 100 * end * scale)
        text = tick.text if line else f"{tick.text} ms"
        if (not line or at > len(line)) and at + len(text) <= width:
            line = line.ljust(at) + text
    return line


def numbers(row: Row) -> list[tuple[str, str]]:
    """What a schedule costs, each with its name."""
    work, idle = row["work_ms"], row["step_ms"] - row["work_ms"]
    claimed = row["bubble_by_formula"]
    formula = f"idle = {row['idle_formula']}"
    if claimed is None:
        formula += f", known for {row['formula_for']} alone"
    else:
        formula += f" = {_ms(claimed * work)}, a bubble of {fmt.share(claimed, decimals=1)}"
    chunks = row["chunks"]
    size = "" if chunks == 1 else f", each of a stage, 1/{chunks} of a rank's layers"
    most = max(row["live"])
    return [
        ("step", f"{_ms(row['step_ms'])}: each rank works {_ms(work)} and is idle {_ms(idle)}"),
        ("bubble", f"{fmt.share(row['bubble'], decimals=1)} of the work"),
        ("formula", formula),
        ("", LETTERS),
        ("kept", f"at most {fmt.count(most, 'activation')}{size}; by rank {_list(row['live'])}"),
        ("sent", f"{fmt.count(sum(row['messages']), 'message')}; by rank {_list(row['messages'])}"),
    ]


def _ms(value: float) -> str:
    return f"{float(f'{value:.4g}'):,g} ms"


def _list(values: Sequence[int], most: int = 16) -> str:
    """``4 3 2 1``; the first and the last of many."""
    texts = [str(value) for value in values]
    return " ".join(texts if len(texts) <= most else [*texts[: most - 2], "…", texts[-1]])


def table(result: Result) -> Table:
    """One line for each schedule."""
    shown = terminal.table(
        "|schedule", "stages\nper rank", "step\nms", "bubble", "by the\nformula",
        "kept,\nin stages", "kept,\nin ranks", "messages", title="what each schedule costs",
    )  # fmt: skip
    for row in result["schedules"]:
        most = max(row["live"])
        shown.add_row(
            row["name"],
            str(row["chunks"]),
            fmt.number(row["step_ms"]),
            fmt.share(row["bubble"], decimals=1),
            fmt.share(row["bubble_by_formula"], decimals=1),
            f"{most:,}",
            f"{most / row['chunks']:g}",
            f"{sum(row['messages']):,}",
        )
    return shown


def notes(rows: Sequence[Row]) -> Iterator[str]:
    yield (
        "bubble: idle time as a part of the work. kept: activations on the rank that keeps most, "
        "as stages' and as whole ranks' layers, of one micro-batch each."
    )
    if any(row["bubble_by_formula"] is None for row in rows):
        yield f"{fmt.NOTHING}: no formula is known for these times."
    yield f"To see one: shardlab schedule {rows[-1]['name']} with the same options."
