"""What cutting a model costs: each rank's own work, and the step beside one without axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shardlab.axes import Axes
from shardlab.plan.predict import Prediction
from shardlab.strategies.pipeline import schedule_analysis, schedules
from shardlab.strategies.pipeline.schedule_analysis import Times

Row = Mapping[str, Any]
# Backward takes twice a forward's time, and its halves take the same.
EVEN = Times(forward=1.0, input=1.0, weight=1.0)


def ranks_of(found: Prediction, axes: Axes | None) -> list[dict[str, Any]]:
    """The parts of a step of each rank that was played back: one of each place in a pipeline."""
    ranks: dict[int, dict[str, Any]] = {}
    for span in found.spans:
        stages = [] if axes is None else schedules.stages_of(axes, span.rank)
        parts = {"work_s": 0.0, "exposed_s": 0.0, "bubble_s": 0.0}
        empty = {"rank": span.rank, "stages": stages, "collectives": 0, **parts}
        own = ranks.setdefault(span.rank, empty)
        own["collectives"] += span.lane == "comm"
        key = {"work": "work_s", "wait": "exposed_s", "bubble": "bubble_s"}.get(span.lane)
        if key is not None:
            own[key] += span.end - span.begin
    return [ranks[rank] for rank in sorted(ranks)]


def even_bubble(axes: Axes | None, micro: int) -> float | None:
    """The bubble as a share of the step, if all stages took the same time and sent in none."""
    if axes is None or axes.pipeline == 1 or axes.schedule not in schedules.SCHEDULES:
        return None
    claim = schedule_analysis.claim(axes.schedule, axes.pipeline, micro, EVEN, axes.chunks or None)
    return None if claim.bubble is None else claim.bubble / (1 + claim.bubble)


def against(rows: Sequence[Row], i: int) -> dict[str, Any] | None:
    """A row that cuts the model, less the fastest one of the same ranks that does not."""
    row = rows[i]
    base = min(
        (
            number
            for number, other in enumerate(rows)
            if other["step_s"]
            and not other["model_ranks"] > 1
            and all(other[key] == row[key] for key in ("place", "world", "global_batch"))
        ),
        key=lambda number: float(rows[number]["step_s"]),
        default=None,
    )
    if base is None or not row["step_s"] or row["model_ranks"] == 1:
        return None
    other = rows[base]
    keys = "step_s", "work_s", "exposed_s", "bubble_s"
    ratios = {
        key: row[key] / other[key] if row[key] and other[key] else None
        for key in ("flops", "pointwise_bytes")
    }
    return {"row": base, **{key: row[key] - other[key] for key in keys}, **ratios}
