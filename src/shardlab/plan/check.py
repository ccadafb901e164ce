"""Is the plan right? What was predicted for this machine beside what its ranks then took."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from typing import Any

from shardlab.config import Config
from shardlab.errors import RankFailure, UsageError
from shardlab.launch.rank_set import RankSet
from shardlab.plan.plan import SCHEMA, Cell, OnProgress, Predicts, Question, cells_of, place_of

MOST_RANKS_PER_CORE = 4
REPEATS, WARMUP, STEPS = 4, 2, 4  # visits to each, and steps of a visit
LIMIT_S = 300.0  # of one visit
TIME = "shardlab.measure.compare:time_cell"


def check(
    question: Question, predictor: Predicts, command: str, on_progress: OnProgress
) -> dict[str, Any]:
    """Predict every row first, then measure them in turns: no measurement can help a prediction."""
    cells, cores = cells_of(question), os.cpu_count() or 1
    most = max(cell.world for cell in cells)
    if question.config.launch.device != "cuda" and most > MOST_RANKS_PER_CORE * cores:
        raise UsageError(f"--check runs the ranks here, and {most} are too many for {cores} cores")
    total = len(cells) * (1 + REPEATS)
    for done, cell in enumerate(cells):
        on_progress(f"{cell.spec} · prediction", done, total)
        try:
            if cell.config is not None:
                cell.found = predictor.predict(cell.config, cell.device, cell.link)
        except (UsageError, RankFailure) as error:
            cell.error = error
    able = [cell for cell in cells if cell.found is not None]
    if not able and cells[0].error is not None:
        raise cells[0].error
    measured = measure(
        [cell.config for cell in able if cell.config], on_progress, len(cells), total
    )
    times = dict(zip(map(id, able), measured, strict=True))
    rows = [_row(cell, times.get(id(cell))) for cell in cells]
    return {"schema": SCHEMA, "command": command, "config": question.config.to_dict(),
            "rows": rows, **summary(rows)}  # fmt: skip


def measure(
    configs: Sequence[Config], on_progress: OnProgress, done: int, total: int
) -> list[list[float] | str]:
    """Seconds of each timed step of its slowest rank; or why there are none. In turns, so that a
    machine that slows down slows all of them."""
    found: list[list[float] | str] = [[] for _ in configs]
    most = max(config.launch.world or 1 for config in configs)
    with RankSet(configs[0].launch, most, LIMIT_S) as ranks:
        for repeat in range(REPEATS):
            if repeat:  # a process may be slower than another for all its life
                ranks.renew()
            for i in range(len(configs)):
                place = (i + repeat) % len(configs)
                config, times = configs[place], found[place]
                on_progress(f"{config.strategy.label} · measured", done, total)
                done += 1
                if isinstance(times, str):
                    continue
                run = config.with_overrides({"training.steps": WARMUP + STEPS})
                try:
                    took = ranks.run(TIME, run, WARMUP)[0]["slowest_ms"][WARMUP:]
                    times += [ms / 1e3 for ms in took]
                except (RankFailure, UsageError) as error:
                    found[place] = str(error)
    return found


def _row(cell: Cell, times: list[float] | str | None) -> dict[str, Any]:
    found = cell.found
    row: dict[str, Any] = {
        "label": cell.spec,
        "world": cell.world,
        "place": place_of(cell),
        "global_batch": None if cell.config is None else cell.config.training.global_batch,
        "predicted_s": None if found is None else found.step_s,
        "low_s": None if found is None else found.low_s,
        "high_s": None if found is None else found.high_s,
        "naive_s": None if found is None else found.naive_s,
        "measured_s": None,
        "error": None,
        "naive_error": None,
        "inside": None,
        "reason": times if isinstance(times, str) else cell.error and str(cell.error),
    }
    if found is not None and isinstance(times, list) and times:
        took = statistics.median(times)
        row |= {
            "measured_s": took,
            "error": found.step_s / took - 1,
            "naive_error": None if found.naive_s is None else found.naive_s / took - 1,
            "inside": found.low_s <= took <= found.high_s,
        }
    return row


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The mean error, and how often the interval held what was measured."""
    known = [row for row in rows if row["error"] is not None]
    naive = [abs(row["naive_error"]) for row in known if row["naive_error"] is not None]
    return {
        "points": len(known),
        "mean_error": statistics.fmean(abs(row["error"]) for row in known) if known else None,
        "worst_error": max((abs(row["error"]) for row in known), default=None),
        "naive_mean_error": statistics.fmean(naive) if naive else None,
        "coverage": statistics.fmean(row["inside"] for row in known) if known else None,
    }
