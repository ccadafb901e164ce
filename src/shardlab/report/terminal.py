"""What every view in the terminal is drawn with: consoles, one kind of table, lines and paths."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.style import Style
from rich.table import Table
from rich.text import Text

from shardlab import output

# How a column is laid out, by the first character of its heading.
_ALIGNED = {"<": ("left", False), "|": ("left", True), ">": ("right", False)}


def out() -> Console:
    return Console(file=output.stream(), highlight=False)


def errors() -> Console:
    return Console(stderr=True, highlight=False)


def table(
    *headings: str, title: str | None = None, caption: Text | None = None, least: int | None = None
) -> Table:
    """An empty table. A column holds numbers, to the right and never broken, unless its heading
    begins with ``<`` (words, to the left, folded if need be), ``|`` (to the left, never broken) or
    ``>`` (to the right, folded). ``least``: the least width of the first column, in characters.

    With a title, columns lie closer than rich would have them, so that more fit into 80 characters.
    """
    made = Table(
        title=None if title is None else Text(title),  # a str's brackets would be read as markup
        title_style="bold",
        title_justify="left",
        caption=caption,
        caption_style=Style.null(),
        caption_justify="left",
        box=None if title is None else box.SIMPLE_HEAD,
        padding=(0, 1) if title is None else (0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    for i, heading in enumerate(headings):
        side, whole = _ALIGNED.get(heading[:1], ("right", True))
        text = heading[1:] if heading[:1] in _ALIGNED else heading
        made.add_column(
            escape(text),
            justify="left" if side == "left" else "right",
            no_wrap=whole,
            overflow="ellipsis" if whole else "fold",
            min_width=least if i == 0 else None,
        )
    return made


def say(console: Console, *lines: str, wraps: bool = False) -> None:
    """Lines as they are: brackets are no markup. ``wraps``: at the terminal's width."""
    for line in lines:
        console.print(line, markup=False, soft_wrap=not wraps)


def about(env: Mapping[str, Any]) -> Iterator[str]:
    """What was measured, as far as it is not in the numbers: the data, and what there is to note.

    Records of earlier versions have neither.
    """
    if env.get("data"):
        yield f"data: {env['data']}"
    yield from (f"note: {note}" for note in env.get("notes", ()))


def say_paths(console: Console, paths: Iterable[Path | str]) -> None:
    """The files that were written."""
    say(console, *(f"  {path}" for path in paths))
