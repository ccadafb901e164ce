"""Strategies by what they reach: time, bytes and steps until a held-out loss, over several seeds.

Milliseconds per step rank strategies that compute the same steps. One that rounds what it sends, or
averages only now and then, takes other steps: it may need more of them. So each strategy trains
from the same seeds (initialisation and order of the data) until an evaluation on held-out samples
is at the goal, and is compared with the baseline seed by seed. The upper half of this module runs
in the parent and imports no torch; the functions that take a ``World`` run in the ranks.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shardlab import stats, wire
from shardlab.config import Config
from shardlab.errors import RankFailure, UsageError
from shardlab.launch.rank_set import RankSet, on_its_ranks
from shardlab.measure import compare
from shardlab.measure.cells import Cell

if TYPE_CHECKING:
    from torch import Tensor

    from shardlab.world import World

SCHEMA = 1
MAX_STEPS = 500
EVALUATIONS = 50  # in a run of the most steps, where nobody says how often
SAMPLES = 256  # held-out ones of an evaluation, where nobody says how many


@dataclass(frozen=True)
class Goal:
    """When a run ends: at a held-out loss, or after so many tokens."""

    loss: float | None = None
    tokens: int | None = None
    max_steps: int = MAX_STEPS
    seeds: int = 3
    warmup: int = 2
    time_limit_s: float = 600.0  # for each run

    def __post_init__(self) -> None:
        if (self.loss is None) == (self.tokens is None):
            raise UsageError(
                "--to-loss ends a run at a held-out loss and --tokens after so many tokens: give "
                "one of them"
            )
        if self.loss is not None and not math.isfinite(self.loss):
            raise UsageError(f"--to-loss {self.loss}: not a loss, as in 3.2")
        tokens = 1 if self.tokens is None else self.tokens
        least = {"--tokens": (tokens, 1), "--steps": (self.max_steps, 1),
                 "--seeds": (self.seeds, 1), "--warmup": (self.warmup, 0)}  # fmt: skip
        for flag, (value, low) in least.items():
            if value < low:
                raise UsageError(f"{flag} must be at least {low}, got {value}")
        if not 0 < self.time_limit_s < math.inf:
            raise UsageError(f"--time-limit must be above 0 s, got {self.time_limit_s}")


@dataclass(eq=False)
class Row:
    """One strategy: what is run, and what each seed's run gave."""

    cell: Cell
    runs: list[dict[str, Any]] = field(default_factory=list)


def run(
    cells: Sequence[Cell],
    goal: Goal,
    base: Config,
    command: str,
    on_progress: compare.OnProgress = lambda _what, _done, _total: None,
) -> dict[str, Any]:
    """The content of ``to_loss.json``. A strategy that fails is a row that says why.

    ``base``: the config as it was given, which says how often and on what to evaluate.
    """
    size = max(cell.world for cell in cells)
    with RankSet(cells[0].config.launch, size, goal.time_limit_s) as ranks:
        rows = []
        for cell in cells:
            compare.look(ranks, "shardlab.training.preflight:check", cell)
            found = compare.look(ranks, f"{__name__}:describe", cell, goal.loss)
            rows.append(Row(cell))
        env = compare.look(ranks, "shardlab.training.preflight:describe", cells[0], command)
        per_step = cells[0].config.training.global_batch * (found["tokens_per_sample"] or 1)
        steps = goal.max_steps
        if goal.tokens is not None:
            if found["tokens_per_sample"] is None:
                raise UsageError(
                    f"--tokens: the samples of {env['workload']} are no tokens; use --to-loss"
                )
            steps = -(-goal.tokens // per_step)
        overrides = {
            "training.steps": steps,
            "training.evaluate_every": base.training.evaluate_every or max(1, steps // EVALUATIONS),
            "training.evaluate_samples": base.training.evaluate_samples or SAMPLES,
        }
        total = len(rows) * goal.seeds
        for number, order in enumerate(compare.schedule(len(rows), goal.seeds)):
            seed = base.training.seed + number
            if number and env["device"] == "cpu":  # as in compare: processes differ for life
                ranks.renew()
            for place, index in enumerate(order):
                row, done = rows[index], number * len(rows) + place
                what = f"{row.cell.label} · seed {number + 1} of {goal.seeds}"
                on_progress(what, done, total)
                config = row.cell.config.with_overrides({**overrides, "training.seed": seed})
                if row.cell.status == "ok":
                    _run(ranks, row, config, goal)
    on_progress("done", total, total)
    return summarize(rows, goal, overrides, base, per_step, found, env, command)


def _run(ranks: RankSet, row: Row, config: Config, goal: Goal) -> None:
    function = f"{__name__}:train_cell"
    try:
        row.runs.append(ranks.run(function, config, goal.loss, goal.warmup)[0])
    except (RankFailure, UsageError) as error:
        if isinstance(error, UsageError) and not row.runs and "--to-loss" in str(error):
            raise  # the goal itself is wrong, for every strategy
        row.cell.status = "failed" if isinstance(error, RankFailure) else "skipped"
        row.cell.reason = compare.reason_of(error, "a run")


# ------------------------------------------------------------------ numbers


def summarize(
    rows: Sequence[Row],
    goal: Goal,
    overrides: Mapping[str, Any],
    base: Config,
    per_step: int,
    found: Mapping[str, Any],
    env: Mapping[str, Any],
    command: str,
) -> dict[str, Any]:
    """The numbers of ``to_loss.json``, from what the runs gave. Pure."""
    baseline = next((row for row in rows if row.cell.is_reference), rows[0])
    return {
        "schema": SCHEMA,
        "command": command,
        "env": {k: v for k, v in env.items() if k not in compare.OF_LOSSES},
        "workload": env["workload"],
        "parameters": env["parameters"],
        "global_batch": base.training.global_batch,
        "goal": {"loss": goal.loss, "tokens": goal.tokens},
        "max_steps": overrides["training.steps"],
        "evaluate_every": overrides["training.evaluate_every"],
        "evaluate_samples": min(overrides["training.evaluate_samples"], found["held_out"]),
        "seeds": [base.training.seed + i for i in range(goal.seeds)],
        "unit": "samples" if found["tokens_per_sample"] is None else "tokens",
        "units_per_step": per_step,
        "baseline": baseline.cell.label,
        "config": rows[0].cell.config.to_dict(),
        "cells": [_row(row, baseline, goal) for row in rows],
    }


def _row(row: Row, baseline: Row, goal: Goal) -> dict[str, Any]:
    runs, losses = row.runs, [point["loss"] for run in row.runs for point in run["points"]]
    ended = [r for r in runs if r["reached"] or (goal.loss is None and math.isfinite(r["loss"]))]
    is_ranked = row.cell.status == "ok" and len(ended) == goal.seeds
    result: dict[str, Any] = {
        "label": row.cell.label,
        **row.cell.point,
        "status": row.cell.status,
        "reason": row.cell.reason,
        "changes": _changes(row, baseline),
        "reached": len(ended),
        "ranked": is_ranked,
        "lowest_loss": min(filter(math.isfinite, losses), default=None),
        "runs": runs,
    }
    for name in ("steps", "seconds", "bytes", "loss", "step_ms"):
        values = [r[name] for r in runs]
        result[name] = _middle(values) if is_ranked else None
    for name in ("seconds", "bytes"):
        result[f"{name}_ratio"] = _paired(row, baseline, name, goal) if is_ranked else None
    result["loss_difference"] = _paired(row, baseline, "loss", goal) if is_ranked else None
    return result


def _changes(row: Row, baseline: Row) -> str | None:
    """How its steps differ from those that one process would take; None: they do not."""
    own, usual = (r.cell.config.precision.compute for r in (row, baseline))
    rounds = None if own == usual else f"it computes in {own}"
    found: str | None = row.runs[0]["changes"] if row.runs else None
    return found or rounds


def _middle(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def _paired(row: Row, baseline: Row, name: str, goal: Goal) -> dict[str, Any] | None:
    """Against the baseline, seed by seed, with the 95% interval of the mean over seeds: a ratio of
    times or bytes (its mean is the geometric one), a difference of losses."""
    pairs = [(a[name], b[name]) for a, b in zip(row.runs, baseline.runs, strict=False)]
    usable = all(b["reached"] or goal.loss is None for b in baseline.runs)
    if not usable or len(pairs) < goal.seeds or any(b == 0 and name != "loss" for _, b in pairs):
        return None
    if name == "loss":
        each = [a - b for a, b in pairs]
        return {"mean": statistics.mean(each), "interval": stats.mean_interval(each)}
    if any(a == 0 for a, _ in pairs):
        return {"mean": 0.0, "interval": None}
    logs = [math.log(a / b) for a, b in pairs]
    interval = stats.mean_interval(logs)
    return {
        "mean": math.exp(statistics.mean(logs)),
        "interval": None if interval is None else [math.exp(end) for end in interval],
    }


# ------------------------------------------------------------------ in the ranks


@on_its_ranks
def describe(world: World, config: Config, loss: float | None) -> dict[str, Any]:  # noqa: ARG001
    """What the goal needs of the workload, or why it cannot be had."""
    from shardlab.training import builders

    workload = builders.build_workload(config)
    if workload.held_out is None or not len(workload.held_out):
        raise UsageError(
            f"the workload {workload.name} holds no samples out, and --to-loss and --tokens look "
            "at the held-out loss; give it a held_out data set"
        )
    if loss is not None and loss <= 0 and ":" not in config.model.workload:
        raise UsageError(f"--to-loss {loss:g} is never reached: {workload.name}'s loss is above 0")
    return {
        "tokens_per_sample": workload.tokens_per_sample,
        "held_out": len(workload.held_out),
    }


@on_its_ranks
def train_cell(world: World, config: Config, goal: float | None, warmup: int) -> dict[str, Any]:
    """Train from the config's seed until the goal, or for its steps.

    The clock counts steps alone, and between two evaluations those of the slowest rank. What a
    strategy has under way is waited for before an evaluation, on the clock: nothing travels in time
    that is not counted. What a process does only once is done before, by another copy.
    """
    from shardlab.guard import watchdog
    from shardlab.ledger import LEDGER
    from shardlab.training import builders, equivalence_check, loop
    from shardlab.training.recorder import Recorder

    workload = builders.build_workload(config)
    steps = config.training.steps
    with watchdog.watching(world, config.guard.hang_s, config.launch.timeout_s):
        if warmup:
            equivalence_check.check(config, workload, world)
            rehearsed = builders.build_strategy(config, workload, world)
            with (
                closing(loop.Batches(workload, config, world)) as feed,
                Recorder(None, world, LEDGER, warmup) as recorder,
            ):
                loop.train(rehearsed, feed, recorder, range(min(warmup, steps)))
            rehearsed.settle()
            del rehearsed
        LEDGER.reset()
        strategy = builders.build_strategy(config, workload, world)
        with (
            closing(loop.Batches(workload, config, world)) as feed,
            Recorder(None, world, LEDGER, steps) as recorder,
        ):
            course = _Course(world, config, workload, strategy, recorder, goal)
            loop.train(
                strategy, feed, recorder, range(steps), between=[course.after_step],
                may_begin=lambda: not course.is_over,
            )  # fmt: skip
        return course.result(next(loop.Batches(workload, config, world)))


class _Course:
    """The way of one run: after so many steps, so much time and so many bytes, which loss."""

    def __init__(
        self, world: World, config: Config, workload: Any, strategy: Any, recorder: Any,
        goal: float | None,
    ) -> None:  # fmt: skip
        from shardlab.training import run as running

        self.world, self.config, self.workload = world, config, workload
        self.strategy, self.recorder, self.goal = strategy, recorder, goal
        self.evaluate = running.make_evaluation(config, workload, world, strategy)
        self.points: list[dict[str, Any]] = []
        self.bytes = 0.0
        self.is_over = self.reached = False
        self._look(0, 0.0)
        if self.reached:
            raise UsageError(
                f"--to-loss {goal:g} is nothing to train for: the untrained model's held-out loss "
                f"is {self.points[0]['loss']:.4g}"
            )

    def after_step(self, step: int, _loss: Tensor) -> None:
        from shardlab.ledger import LEDGER
        from shardlab.training import evaluate

        training = self.config.training
        is_due = evaluate.is_due(step + 1, training.evaluate_every or 0, training.steps)
        if is_due:
            self.recorder.flush()  # on a GPU the last steps are timed only then
            begin = time.perf_counter()
            self.strategy.settle()
            waited = time.perf_counter() - begin
            made = self.recorder.rows[self.points[-1]["steps"] :]
            stretch = sum(row["step_ms"] for row in made) / 1e3 + waited
        for entry in LEDGER.take():
            if entry["step"] is not None:
                op = "reduce_scatter" if entry["op"] == "all_to_all" else entry["op"]
                self.bytes += wire.wire_bytes(op, entry["bytes"], entry["ranks"])
        if is_due:
            self._look(step + 1, max(self.world.gather(stretch)))

    def _look(self, steps: int, seconds: float) -> None:
        loss = self.evaluate().get("loss", math.nan)
        seconds += self.points[-1]["seconds"] if self.points else 0.0
        self.points.append({"steps": steps, "seconds": seconds, "bytes": self.bytes, "loss": loss})
        self.reached = self.goal is not None and loss <= self.goal
        self.is_over = self.reached or not math.isfinite(loss)

    def result(self, share: Any) -> dict[str, Any]:
        """The run in numbers. Where PyTorch sends what is not in the ledger, one more step is
        watched, and each is taken to send as much."""
        from shardlab.proof import evidence, prove
        from shardlab.proof.subjects import Subject
        from shardlab.training import builders

        world, last = self.world, self.points[-1]
        shares = builders.data_share(self.config, world)[1]
        subject = Subject(self.workload, self.config.training.seed, [[share] * shares])
        subject.ranks_per_node = world.ranks_per_node
        sent = evidence.sent_per_step(self.strategy, subject, self.config, world)
        if sent["source"] == "profiler":
            for point in self.points:
                point["bytes"] = sent["bytes"] * point["steps"]
        return {
            "seed": self.config.training.seed,
            "reached": self.reached,
            "changes": prove.changes(self.config.strategy.options, self.strategy),
            **last,
            "step_ms": 1e3 * last["seconds"] / max(1, last["steps"]),
            "points": self.points,
        }
