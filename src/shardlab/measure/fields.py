"""What the choice, the gate and every view read in ``compare.json``. Pure, no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from shardlab import stats
from shardlab import text as fmt

Cell = Mapping[str, Any]  # one row of compare.json
Result = Mapping[str, Any]  # the content of compare.json

# How far a loss may be off, as a share of it, by the precision it was computed in: above what
# another order of summation does.
LOSS_TOLERANCE = {"fp64": 1e-9, "fp32": 1e-4, "bf16": 1e-2, "fp16": 1e-2}


# What memory is held for, and how charts say it. An allocation with several causes has the first.
CAUSES = {
    "parameters": "parameters",
    "optimizer": "optimizer state",
    "gradients": "gradients",
    "buckets": "buckets and gathered blocks",
    "activations": "activations",
    "other": "other",
}


def measured(result: Result) -> list[Cell]:
    """The cells that have numbers; the others were skipped or failed."""
    return [cell for cell in result["cells"] if cell["step_ms"] is not None]


def baseline(result: Result, cell: Cell | None = None) -> Cell:
    """What a cell is compared with: each precision has its own. Without a cell: the first."""
    label = result["baseline"] if cell is None else cell.get("baseline", result["baseline"])
    found: Cell = next(c for c in result["cells"] if c["label"] == label)
    return found


def is_baseline(result: Result, cell: Cell) -> bool:
    return bool(cell["label"] == baseline(result, cell)["label"])


def baselines(result: Result) -> str:
    """Their names."""
    labels = {baseline(result, cell)["label"]: None for cell in result["cells"]}
    return fmt.names(list(labels)) if len(labels) < 3 else f"{result['baseline'].split()[0]}"


def shortest(cells: Sequence[Cell]) -> Cell | None:
    """The cell with the least median step."""
    return min(cells, key=lambda cell: cell["step_ms"]["median"], default=None)


def ties(cells: Sequence[Cell], first: Cell) -> list[Cell]:
    """Those whose times cannot be told from ``first``'s; none, if each was visited once."""
    if not stats.can_tell(*(cell["step_ms_repeats"] for cell in cells)):
        return []
    times = first["step_ms_repeats"]
    return [
        cell for cell in cells
        if cell is not first
        and stats.ratio_interval(cell["step_ms_repeats"], times, paired=True)[0] <= 1.0
    ]  # fmt: skip


def fastest(result: Result) -> Cell | None:
    """The cell with the least median step; None if another ties with it."""
    cells = measured(result)
    first = shortest(cells)
    return None if first is None or ties(cells, first) else first


def peak(cell: Cell) -> int | None:
    """Bytes on the fullest rank."""
    value: int | None = (cell["peak_bytes"] or {}).get("total")
    return value


def leanest(result: Result) -> list[Cell]:
    """Those that need the least memory, to the digits that are shown: a few bytes do not matter."""
    peaks = [(cell, value) for cell in measured(result) if (value := peak(cell)) is not None]
    least = min((value for _, value in peaks), default=None)
    return [cell for cell, value in peaks if fmt.size(value) == fmt.size(least)]


def agrees(cell: Cell, result: Result) -> bool | None:
    """Whether the final loss is that of ``single``; None if there is nothing to compare with."""
    reference = baseline(result, cell)["loss"]
    if cell["loss_difference"] is None or not math.isfinite(reference):
        return None
    return bool(cell["loss_difference"] <= tolerance(result, cell) * abs(reference))


def tolerance(result: Result, cell: Cell | None = None) -> float:
    """How far a loss may be from that of ``single``, as a share of it."""
    usual = result["config"]["precision"]["compute"]
    return LOSS_TOLERANCE[usual if cell is None else cell.get("precision", usual)]


def proved(cell: Cell) -> bool | None:
    """Whether its proof passed; None if there is none."""
    passed: bool | None = (cell.get("proof") or {}).get("pass")
    return passed


def kept_proofs(result: Result) -> str | None:
    """Says which proofs were not made in this comparison, and when they were; None: all were."""
    proofs = [proof for cell in result["cells"] if (proof := cell.get("proof"))]
    times = sorted(when for proof in proofs if (when := proof.get("kept")))
    if not times:
        return None
    first, last = (times[i][:16].replace("T", " ") for i in (0, -1))
    when = f"{first} UTC" if first == last else f"{first} to {last} UTC"
    which = fmt.count(len(times), "proof is", "proofs are")
    return (
        f"{which} kept from an earlier comparison ({when}) by the same source, versions and "
        "options; --fresh proves anew."
    )


def percent_of_peak(cell: Cell) -> float | None:
    """MFU: how much of the rate that its device reaches with matrices alone."""
    return None if cell.get("mfu") is None else 100 * cell["mfu"]


def sent(cell: Cell) -> float | None:
    """Bytes that a rank sends in a step; None if that was not looked at."""
    value: float | None = (cell.get("sent") or {}).get("bytes")
    return value


def between_nodes(cell: Cell) -> float | None:
    """Bytes that a node sends to the others in a step; None with one node."""
    value: float | None = (cell.get("sent") or {}).get("between_nodes")
    return value


def bubble_ms(profile: Mapping[str, float]) -> float:
    """What a pipeline's stages wait for each other. An older comparison does not have it."""
    return profile.get("bubble_ms", 0.0)


def has_bubble(result: Result) -> bool:
    """Whether any of the profiled steps is a pipeline's: else nobody needs a column for it."""
    return any(bubble_ms(cell.get("profile") or {}) for cell in measured(result))


def idle_ms(profile: Mapping[str, float]) -> float:
    """What is neither computing nor communicating: with it, the columns add up to the step."""
    return profile["memory_ms"] + profile["idle_host_ms"] + profile["idle_ms"]


def rate_key(rows: Result) -> str:
    """Tokens where the workload has them, else samples; for any result with cells or rows."""
    several = rows["cells"] if "cells" in rows else rows["rows"]
    has_tokens = any(row["tokens_per_s"] is not None for row in several)
    return "tokens_per_s" if has_tokens else "samples_per_s"


def rate_name(result: Result) -> str:
    return rate_key(result).replace("_per_", "/")
