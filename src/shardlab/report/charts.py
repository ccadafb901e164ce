"""What the charts of all pages have in common: axes, bars made of parts, and where they lie.

Charts use percentages across and pixels down, so that they stretch with the window while their text
and dots keep their size. The templates draw them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple


class Tick(NamedTuple):
    at: float  # percent of the axis
    text: str


def ticks(low: float, high: float, about: int = 7, whole: bool = False) -> list[Tick]:
    """Round numbers (1, 2 or 5 times a power of ten apart) between ``low`` and ``high``."""
    span = high - low
    if span <= 0:
        return []
    power = 10.0 ** math.floor(math.log10(span / about))
    step = next(power * factor for factor in (1, 2, 5, 10) if span <= power * factor * about)
    step = max(step, 1) if whole else step
    decimals = max(0, -math.floor(math.log10(step)))
    last = math.floor(high / step * (1 + 1e-9))  # 0.3 / 0.1 is a little less than 3
    return [
        Tick(100 * (i * step - low) / span, f"{i * step:,.{decimals}f}")
        for i in range(math.ceil(low / step), last + 1)
    ]


def line(points: Iterable[tuple[float, float]]) -> str:
    """The path of an SVG through points in a square of 100 by 100."""
    return "M" + " L".join(f"{x:.2f} {y:.2f}" for x, y in points)


class Log:
    """A logarithmic axis of 0 to 100 percent."""

    def __init__(self, low: float, high: float) -> None:
        self.low, self.high = low, max(high, low * 1.01)

    def at(self, value: float) -> float:
        part = math.log(value / self.low) / math.log(self.high / self.low)
        return min(max(100 * part, 0.0), 100.0)

    def ticks(self, text: Callable[[float], str], one: float, base: float) -> list[Tick]:
        """Ticks at powers of a base, times ``one``; at most twelve."""
        first = math.ceil(math.log(self.low / one, base) - 1e-9)
        last = math.floor(math.log(self.high / one, base) + 1e-9)
        every = max(1, -(-(last - first + 1) // 12))
        values = [one * base**i for i in range(first, last + 1, every)]
        return [Tick(self.at(value), text(value)) for value in values]

    def round_ticks(self, text: Callable[[float], str]) -> list[Tick]:
        """Ticks at 1, 2 and 5 times powers of ten; at the powers alone if those are enough, and at
        other round numbers if there are too few."""
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        powers = [10.0**power for power in range(first, last + 1)]
        values = [factor * power for power in powers for factor in (1, 2, 5)]
        inside = [value for value in values if self.low <= value <= self.high]
        if len(inside) > 7:
            inside = [value for value in powers if self.low <= value <= self.high]
        elif len(inside) < 3:
            span = self.high - self.low
            inside = [self.low + tick.at / 100 * span for tick in ticks(self.low, self.high, 4)]
        return [Tick(self.at(value), text(value)) for value in inside]


class Segment(NamedTuple):
    kind: str  # a class of the style sheet
    name: str
    x: float  # percent, as is the width
    width: float
    text: str


class StackRow(NamedTuple):
    of: Any  # what the bar shows: a cell of a comparison, or a row of a breakdown
    segments: list[Segment]
    hidden: tuple[float, float]  # communication behind compute: x and width, at compute's end
    total: str
    text: str  # all of it in words
    note: str = ""  # below the total


class StackChart(NamedTuple):
    rows: list[StackRow]
    kinds: list[tuple[str, str]]  # those that appear, for the legend
    ticks: list[Tick]
    unit: str  # what the axis counts in
    has_hidden: bool


class Amounts(NamedTuple):
    """What one bar is made of: parts that add up, and communication hidden behind compute."""

    of: Any
    parts: Mapping[str, float]
    hidden: float = 0.0
    note: str = ""


def stacked(
    bars: Sequence[Amounts],
    names: Mapping[str, str],
    show: Callable[[float], str],
    unit: tuple[str, float],
) -> StackChart:
    """Bars of parts on one axis from zero. ``unit``: what it counts in, and how much that is."""
    most = max((sum(bar.parts.values()) for bar in bars), default=0) or 1.0
    rows = []
    for bar in bars:
        x, segments = 0.0, []
        for kind, name in names.items():
            width = 100 * bar.parts[kind] / most
            if width > 0:
                segments.append(Segment(kind, name, x, width, show(bar.parts[kind])))
            x += width
        words = ", ".join(f"{segment.name} {segment.text}" for segment in segments)
        if bar.hidden:
            words += f"; {show(bar.hidden)} of communication behind compute"
        width = 100 * bar.hidden / most
        end = segments[0].width if segments and bar.hidden else width  # compute is the first part
        total = show(sum(bar.parts.values()))
        rows.append(StackRow(bar.of, segments, (end - width, width), total, words, bar.note))
    seen = {segment.kind for row in rows for segment in row.segments}
    return StackChart(
        rows,
        [(kind, name) for kind, name in names.items() if kind in seen],
        ticks(0, most / unit[1]),
        unit[0],
        any(bar.hidden for bar in bars),
    )
