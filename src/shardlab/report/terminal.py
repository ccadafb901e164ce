"""What every view in the terminal is drawn with: consoles, one kind of table, lines and paths."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.segment import Segment
from rich.style import Style
from rich.table import Column, Table
from rich.text import Text

from shardlab import output

# How a column is laid out, by the first character of its heading.
_ALIGNED = {"<": ("left", False), "|": ("left", True), ">": ("right", False)}
# Where a name may be folded: after marks, and before a capital letter inside it.
_PIECES = re.compile(r"(?<=[\s_:./,<>(=-])(?=[^\s_:./,<>(=-])|(?<=[a-z0-9])(?=[A-Z])")
LONGEST = 16  # characters of a name that is not folded
STRATEGY = 12  # the same of a strategy's, where there are many columns


class SafeConsole(Console):
    """A console that prints no control characters: others wrote the names in traces."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            text = segment.text
            if segment.control or text.isprintable() or text == "\n":
                yield segment
            else:
                yield Segment("".join(map(_harmless, text)), segment.style)


def _harmless(character: str) -> str:
    """The character, or a replacement for one that moves the cursor or turns the line around."""
    is_control = unicodedata.category(character) in ("Cc", "Cf", "Cs") and character != "\n"
    return "\N{REPLACEMENT CHARACTER}" if is_control else character


def out() -> Console:
    return SafeConsole(file=output.stream(), highlight=False)


def errors() -> Console:
    return SafeConsole(stderr=True, highlight=False)


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


def fit(
    made: Table, width: int, spare: Sequence[str] = (), where: str = "", longest: int = LONGEST
) -> Table:
    """The table, changed so that it is no wider than ``width`` and breaks no word and no number.

    As long as it is too wide, a column of ``spare`` (headings, the first to go first) is left out,
    and a line below names it and says ``where`` it can be read. Texts fold between words, names
    of more than ``longest`` characters after ``_``, ``::`` and the like. What does not fit even so
    makes long lines.
    """
    kept, missing = made.columns, []
    for heading in spare:
        if _together(_least(column, longest) for column in kept) <= width:
            break
        if any(column.header == escape(heading) for column in kept):
            kept = [column for column in kept if column.header != escape(heading)]
            missing.append(heading.replace("-\n", "").replace("\n", " "))
    least = [_least(column, longest) for column in kept]
    widths = [_most(column) for column in kept]
    while _together(widths) > width:
        wide = [i for i, own in enumerate(widths) if own > least[i]]
        if not wide:
            made.width = _together(widths)
            break
        widths[max(wide, key=lambda i: widths[i])] -= 1
    styles = [row.style for row in made.rows]
    made.columns, made.rows = [], []
    for column, own in zip(kept, widths, strict=True):
        made.add_column(
            column.header, style=column.style, justify=column.justify, no_wrap=column.no_wrap,
            overflow=column.overflow, width=own,
        )  # fmt: skip
    for style, *cells in zip(styles, *(column.cells for column in kept), strict=True):
        made.add_row(
            *(
                cell if column.no_wrap else _fold(_text(cell), own)
                for cell, column, own in zip(cells, kept, widths, strict=True)
            ),
            style=style,
        )
    if missing:
        said = Text(f"left out, as the terminal is narrow: {', '.join(missing)}{where}", "dim")
        made.caption = Text("\n").join(
            [Text.assemble(made.caption), said] if made.caption else [said]
        )
    return made


def _together(widths: Iterable[int]) -> int:
    """The width of columns and of the space between them, two characters each."""
    widths = list(widths)
    return sum(widths) + 2 * (len(widths) - 1)


def _text(cell: RenderableType) -> Text:
    return cell if isinstance(cell, Text) else Text.from_markup(str(cell))


def _lines(column: Column) -> list[Text]:
    cells = (column.header, *column.cells)
    return [line for cell in cells for line in _text(cell).split("\n")]


def _most(column: Column) -> int:
    return max((line.cell_len for line in _lines(column)), default=0)


def _least(column: Column, longest: int) -> int:
    """What a column needs so that no number and no word is broken; a long name may be folded."""
    if column.no_wrap:
        return _most(column)
    words = {word for line in _lines(column) for word in line.plain.split()}
    return max((_unbroken(word, longest) for word in words), default=0)


def _unbroken(word: str, longest: int) -> int:
    if cell_len(word) <= longest:
        return cell_len(word)
    return max(longest, *map(cell_len, _PIECES.split(word)))


def _fold(cell: Text, width: int) -> Text:
    text = folded(cell.plain, width)
    return cell if text == cell.plain else Text(text, cell.style)


def folded(text: str, width: int) -> str:
    """Long names on several lines, each ending after a mark that belongs to such names."""
    if all(cell_len(word) <= width for word in text.split()):
        return text  # rich folds it between words
    lines = [""]
    for piece in _PIECES.split(text):
        if cell_len((lines[-1] + piece).rstrip()) > width and lines[-1]:
            lines.append(piece)
        else:
            lines[-1] += piece
    return "\n".join(line.rstrip() for line in lines)


def short(name: str, most: int = 96) -> str:
    """A long name without its end, which is cut where one of its parts ends."""
    if len(name) <= most:
        return name
    ends = [found.end() for found in re.finditer(r"[\s_:./,<>(]+", name[:most])]
    return name[: ends[-1] if ends and ends[-1] > most // 2 else most - 1].rstrip(" _:./,<>(") + "…"


def show(console: Console, made: Table) -> None:
    """Print a table as wide as it is: a line that is too long is the terminal's to wrap."""
    console.print(made, crop=False)


def say(console: Console, *lines: str, wraps: bool = False) -> None:
    """Print lines as they are, without markup. ``wraps``: fold them at the terminal's width."""
    for line in lines:
        console.print(line, markup=False, soft_wrap=not wraps)


def about(env: Mapping[str, Any]) -> Iterator[str]:
    """The data that was used, and notes about the run. Records of earlier versions have neither."""
    if env.get("data"):
        yield f"data: {env['data']}"
    yield from (f"note: {note}" for note in env.get("notes", ()))


def say_paths(console: Console, paths: Iterable[Path | str]) -> None:
    """The files that were written."""
    say(console, *(f"  {path}" for path in paths))
