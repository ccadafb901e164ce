"""Where the time of a cell's profiled steps went: from its traces, per rank and step. No torch."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardlab.trace import TraceSet
    from shardlab.trace.model import Breakdown

PARTS = ("compute", "exposed_comm", "wait", "memory", "idle_host", "idle")  # they add up to a step


@functools.lru_cache(maxsize=64)
def traces(folder: Path) -> TraceSet:
    """The traces of one strategy. Read once, though both numbers and timeline are made of them."""
    from shardlab import trace

    return trace.load(folder, jobs=1)


def breakdown(folder: Path) -> dict[str, Any]:
    """The mean step over ranks and steps, in ms."""
    return mean_step(traces(folder).breakdown(per="rank"))


def mean_step(ranks: Sequence[Breakdown]) -> dict[str, Any]:
    """Pure: the parts of a step in ms, and which part of communication was hidden, in percent."""
    steps = sum(row.steps for row in ranks) or 1
    total = {
        name: sum(getattr(row, f"{name}_us") for row in ranks)
        for name in ("wall", *PARTS, "hidden_comm", "comm")
    }
    overlap = 100 * total["hidden_comm"] / total["comm"] if total["comm"] else None
    return {
        "steps": max((row.steps for row in ranks), default=0),
        **{f"{name}_ms": us / steps / 1000 for name, us in total.items()},
        "overlap_pct": overlap,
    }
