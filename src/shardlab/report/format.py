"""Numbers as people read them, and the few readings of a comparison that every view shares."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

Cell = Mapping[str, Any]  # one row of compare.json
Result = Mapping[str, Any]  # the content of compare.json

NOTHING = "–"
# Of the loss, by the precision it was computed in: above what another order of summation does.
LOSS_TOLERANCE = {"fp64": 1e-9, "fp32": 1e-4, "bf16": 1e-2, "fp16": 1e-2}


def number(value: float | None, like: float | None = None) -> str:
    """Three significant digits (of ``like``, if given), or all the whole ones: 0.273, 6,295."""
    if value is None:
        return NOTHING
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    rounded = float(f"{like or value:.3g}")  # 9.996 is 10.0, not 10.00
    decimals = max(0, 2 - math.floor(math.log10(abs(rounded))))
    return f"{value:,.{decimals}f}"


def compact(value: float | None) -> str:
    """As ``number``, with M and B for what is long: parameters, tokens per second."""
    for unit, size in (("B", 1e9), ("M", 1e6)):
        if value is not None and abs(value) >= size:
            return number(value / size) + unit
    return number(value)


def size(value: float | None) -> str:
    """Bytes, in powers of 1024."""
    if value is None:
        return NOTHING
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = min(int(math.log2(value) // 10), len(units) - 1) if value >= 1 else 0
    return f"{number(value / 1024**power)} {units[power]}"


def spread(step_ms: Mapping[str, float]) -> str:
    return f"{number(step_ms['p10'], like=step_ms['p90'])}–{number(step_ms['p90'])}"


def speed(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2f}×"


def interval(values: Sequence[float] | None) -> str:
    """Of a speed: ``1.18–1.25``. Nothing for that of a baseline to itself."""
    if values is None or values[0] == values[1]:
        return ""
    return f"{values[0]:.2f}–{values[1]:.2f}"


def proof_mark(cell: Cell) -> str:
    """✓ proved, ✗ found wrong, – not proved."""
    passed = (cell.get("proof") or {}).get("pass")
    return NOTHING if passed is None else "✓" if passed else "✗"


def mfu(cell: Cell) -> str:
    """Of the device's own measured rate, in percent."""
    value = cell.get("mfu")
    return percent(None if value is None else 100 * value)


def percent(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.0f}%"


def loss(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.4f}"


def difference(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2g}"


def count(amount: int, noun: str, plural: str | None = None) -> str:
    """``1 step``, ``10 steps``."""
    return f"{amount:,} {noun if amount == 1 else plural or noun + 's'}"


def names(labels: Sequence[str], at_most: int = 3) -> str:
    """``a``, ``a and b``, ``a, b, c and 4 others``."""
    shown = list(labels)
    if len(shown) > at_most + 1:  # "and 1 other" would be no shorter than its name
        shown = [*shown[:at_most], f"{len(shown) - at_most} others"]
    return " and ".join(part for part in (", ".join(shown[:-1]), shown[-1]) if part)


# ------------------------------------------------------------------ readings of compare.json


def measured(result: Result) -> list[Cell]:
    """The cells that have numbers; the others were skipped or failed."""
    return [cell for cell in result["cells"] if cell["step_ms"] is not None]


def baseline(result: Result, cell: Cell | None = None) -> Cell:
    """What a cell is compared with: each precision has its own. Of no cell: the first."""
    label = result["baseline"] if cell is None else cell.get("baseline", result["baseline"])
    found: Cell = next(c for c in result["cells"] if c["label"] == label)
    return found


def is_baseline(result: Result, cell: Cell) -> bool:
    return bool(cell["label"] == baseline(result, cell)["label"])


def baselines(result: Result) -> str:
    """Their names."""
    labels = {baseline(result, cell)["label"]: None for cell in result["cells"]}
    return names(list(labels)) if len(labels) < 3 else f"{result['baseline'].split()[0]}"


def fastest(result: Result) -> Cell | None:
    return min(measured(result), key=lambda cell: cell["step_ms"]["median"], default=None)


def peak(cell: Cell) -> int | None:
    """Bytes on the fullest rank."""
    value: int | None = (cell["peak_bytes"] or {}).get("total")
    return value


def leanest(result: Result) -> list[Cell]:
    """Those that need the least memory. A few bytes are no difference: as read, not to the byte."""
    peaks = [(cell, value) for cell in measured(result) if (value := peak(cell)) is not None]
    least = min((value for _, value in peaks), default=None)
    return [cell for cell, value in peaks if size(value) == size(least)]


def agrees(cell: Cell, result: Result) -> bool | None:
    """Whether the final loss is that of ``single``; none if there is nothing to compare with."""
    reference = baseline(result, cell)["loss"]
    if cell["loss_difference"] is None or not math.isfinite(reference):
        return None
    return bool(cell["loss_difference"] <= tolerance(result, cell) * abs(reference))


def tolerance(result: Result, cell: Cell | None = None) -> float:
    """How far a loss may be from that of ``single``, as a share of it."""
    usual = result["config"]["precision"]["compute"]
    return LOSS_TOLERANCE[usual if cell is None else cell.get("precision", usual)]


def rate_key(result: Result) -> str:
    """Tokens where the workload has them, else samples."""
    has_tokens = any(cell["tokens_per_s"] is not None for cell in result["cells"])
    return "tokens_per_s" if has_tokens else "samples_per_s"


def rate_name(result: Result) -> str:
    return rate_key(result).replace("_per_", "/")
