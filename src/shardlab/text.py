"""Numbers and names as people read and write them. No torch."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from shardlab.errors import UsageError

NOTHING = "–"
BYTES = {"TiB": 2**40, "GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "B": 1}
SECONDS = {"s": 1.0, "ms": 1e-3, "µs": 1e-6}
# As people may write them, in small letters.
WRITTEN = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
WRITTEN |= {unit.lower(): size for unit, size in BYTES.items()}


def number(value: float | None, like: float | None = None) -> str:
    """Three significant digits (as many as ``like`` has, if given), or all the whole ones: 0.273,
    6,295."""
    if value is None:
        return NOTHING
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    rounded = float(f"{like or value:.3g}")  # 9.996 is 10.0, not 10.00
    decimals = max(0, 2 - math.floor(math.log10(abs(rounded))))
    return f"{value:,.{decimals}f}"


def part_of_step(ms: float) -> str:
    """As ``number``, with two decimals at most: more digits would only make the table wider."""
    return number(ms, max(abs(ms), 1.0))


def ms(us: float | None) -> str:
    """Microseconds as milliseconds."""
    return number(None if us is None else us / 1000)


def unit_of(value: float, units: Mapping[str, float] = BYTES) -> tuple[str, float]:
    """The first of some units, the largest first, that a value reaches; else the last."""
    return next((unit for unit in units.items() if abs(value) >= unit[1]), [*units.items()][-1])


def compact(value: float | None) -> str:
    """As ``number``, with M, B and T for what is long: parameters, tokens per second."""
    unit, one = unit_of(value or 0, {"T": 1e12, "B": 1e9, "M": 1e6, "": 1})
    if value is not None and not unit and float(value).is_integer():
        return f"{value:,.0f}"
    return number(value) if value is None else number(value / one) + unit


def in_unit(value: float, units: Mapping[str, float]) -> str:
    """``3.42 ms``: in the first of some units, the largest first, that the value reaches."""
    unit, one = unit_of(value, units)
    return f"{number(value / one)} {unit}"


def size(value: float | None) -> str:
    """Bytes, in powers of 1024."""
    return NOTHING if value is None else in_unit(value, BYTES)


def parse_bytes(text: str, flag: str) -> int:
    """``24GB`` (powers of 1000), ``24GiB`` (of 1024), ``500 MB``, ``1e9``."""
    match = re.fullmatch(r"\s*([0-9.]+(?:e\+?[0-9]+)?)\s*([a-z]*)\s*", text.lower())
    try:
        amount = int(float(match[1]) * WRITTEN[match[2]]) if match else 0
    except (KeyError, ValueError, OverflowError):
        amount = 0
    if amount < 1:
        raise UsageError(f"{flag} {text}: not a size, as in 24GB or 500MiB")
    return amount


def time(seconds: float) -> str:
    """``21.0 µs``, ``5.12 ms``, ``1.20 s``."""
    return in_unit(seconds, SECONDS)


def duration(seconds: float) -> str:
    """``0.4 s``, ``58.3 s``, ``12 min 5 s``, ``3 h 2 min``, ``2 d 4 h``."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    seconds = round(seconds)
    for unit, one, part, smaller in (("d", 86400, "h", 3600), ("h", 3600, "min", 60)):
        if seconds >= one:
            return f"{seconds // one:.0f} {unit} {seconds % one // smaller:.0f} {part}"
    return f"{seconds // 60:.0f} min {seconds % 60:.0f} s"


def p10_p90(step_ms: Mapping[str, float]) -> str:
    return f"{number(step_ms['p10'], like=step_ms['p90'])}–{number(step_ms['p90'])}"


def speed(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2f}×"


def interval(values: Sequence[float] | None) -> str:
    """A speed's interval, as ``1.18–1.25``. It is empty for the baseline itself."""
    if values is None or values[0] == values[1]:
        return ""
    return f"{values[0]:.2f}–{values[1]:.2f}"


def mark(passed: bool | None) -> str:
    """✓ proved, ✗ found wrong, – not proved."""
    return NOTHING if passed is None else "✓" if passed else "✗"


def at_least(amount: float | None, known: float) -> str:
    """A sum of bytes: ``≥`` what is known of it where a part is not, – where nothing is."""
    return size(amount) if amount is not None or not known else f"≥ {size(known)}"


def gbps(value: float | None) -> str:
    """A bandwidth. Below 0.001 its digits mean nothing."""
    return "<0.001" if value is not None and value < 0.001 else number(value)


def percent(value: float | None, decimals: int = 0) -> str:
    return NOTHING if value is None else f"{value:.{decimals}f}%"


def share(part: float | None, whole: float | None = 1.0, decimals: int = 0) -> str:
    """A part of the whole, in percent."""
    return percent(100 * part / whole + 0.0 if part is not None and whole else None, decimals)


def loss(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.4f}"


def difference(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2g}"


def count(amount: int, noun: str, plural: str | None = None) -> str:
    """``1 step``, ``10 steps``."""
    return f"{amount:,} {noun if amount == 1 else plural or noun + 's'}"


def beside(batch: int, parts: int) -> str:
    """The number of other samples in the same part of a batch: ``7``, ``7 or 8``."""
    least, is_more = divmod(batch, parts)
    return f"{least - 1:,} or {least:,}" if is_more else f"{least - 1:,}"


def names(labels: Sequence[str], at_most: int = 3) -> str:
    """``a``, ``a and b``, ``a, b, c and 4 others``."""
    shown = list(labels)
    if len(shown) > at_most + 1:  # "and 1 other" would be no shorter than its name
        shown = [*shown[:at_most], f"{len(shown) - at_most} others"]
    return " and ".join(part for part in (", ".join(shown[:-1]), shown[-1]) if part)


def nodes(of: Sequence[Mapping[str, Any]]) -> str:
    """``2 nodes: alpha with ranks 0, 1; beta with ranks 2, 3``."""
    hosts = (
        f"{node['host']} with rank{'s' * (len(node['ranks']) > 1)} "
        f"{', '.join(map(str, node['ranks']))}"
        for node in of
    )
    return f"{count(len(of), 'node')}: {'; '.join(hosts)}"
