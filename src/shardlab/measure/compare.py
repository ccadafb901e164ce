"""Strategies side by side: the same model, data, seed and global batch, in one set of ranks.

Timing is unprofiled, after a warm-up, in interleaved repeats: each repeat visits every
strategy once, starting with another one each time, so that a machine that slows down slows
all of them. A step counts as long as its slowest rank took. Memory is weighed in a pass of
its own. This module's upper half runs in the parent and imports no torch; the lower half
(the functions that take a ``World``) runs in the ranks.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from shardlab.config import Config, OutputConfig, ProfileConfig, check_batch, parse_value
from shardlab.errors import RankFailure, UsageError
from shardlab.measure import stats
from shardlab.measure.rankset import RankSet

if TYPE_CHECKING:
    from shardlab.world import World

SCHEMA = 1
BASELINE = "single"


@dataclass(frozen=True)
class Plan:
    """How often and how long each strategy is run."""

    repeats: int = 3
    warmup: int = 2
    steps: int = 8  # timed, per repeat
    profile: ProfileConfig | None = None  # traces, after all is timed; none: none

    def __post_init__(self) -> None:
        for name, least in (("repeats", 1), ("warmup", 0), ("steps", 1)):
            if getattr(self, name) < least:
                raise UsageError(f"--{name} must be at least {least}, got {getattr(self, name)}")


@dataclass
class Cell:
    """One row of the comparison: a strategy, its options, its world; then what was measured."""

    config: Config
    times_ms: list[list[float]] = field(default_factory=list)  # (repeats, steps): slowest rank
    skews_ms: list[float] = field(default_factory=list)  # slowest minus fastest rank, per step
    losses: list[float] = field(default_factory=list)
    peak_bytes: dict[str, int] | None = None
    traces: dict[str, Any] | None = None  # files and bytes, or why there are none
    samples: int = 0
    tokens_per_sample: int | None = None
    status: str = "ok"
    reason: str | None = None

    @property
    def label(self) -> str:
        return self.config.strategy.label


def cells_of(config: Config, specs: list[str], world: int, plan: Plan) -> list[Cell]:
    """A cell for each ``name`` or ``name:option=value:…``, all with the same global batch.

    ``single`` is one process with every rank's micro-batches one after another: the very
    same arithmetic, so that its loss is the others', with BatchNorm too.
    """
    check_batch(config.training, world)
    cells = []
    for spec in specs:
        name, options = parse_spec(spec)
        alone = name == BASELINE
        accumulate = config.training.accumulate * (world if alone else 1)
        cells.append(
            Cell(
                replace(config, profile=ProfileConfig()).with_overrides(  # never while timing
                    {
                        "strategy.name": name,
                        "strategy.options": options,
                        "launch.world": 1 if alone else world,
                        "training.accumulate": accumulate,
                        "training.steps": plan.warmup + plan.steps,
                    }
                )
            )
        )
    labels = [cell.label for cell in cells]
    for label in labels:
        if labels.count(label) > 1:
            raise UsageError(f"strategy {label} is named twice")
    return cells


def parse_spec(spec: str) -> tuple[str, dict[str, Any]]:
    """``pytorch_ddp:bucket_mb=4`` as a name and options. Import paths keep their own colon."""
    name, *parts = spec.split(":")
    while parts and "=" not in parts[0]:
        name += ":" + parts.pop(0)
    options = {}
    for part in parts:
        key, equals, value = part.partition("=")
        if not equals:
            raise UsageError(f"'{part}' in '{spec}' is not option=value")
        options[key] = parse_value(value)
    return name, options


def compare(
    cells: list[Cell],
    plan: Plan,
    command: str,
    on_progress: Callable[[str, int, int], None] = lambda _what, _done, _total: None,
    folder: Callable[[], Path] | None = None,
) -> dict[str, Any]:
    """Run the plan and return the content of ``compare.json``. A cell that fails is a row.

    Traces, if the plan asks for them, are taken last, below ``folder()``.
    """
    visits = list(_schedule(len(cells), plan.repeats))
    total = len(visits) + len(cells) * (2 if plan.profile else 1)
    size = max(cell.config.launch.world or 1 for cell in cells)
    with RankSet(cells[0].config.launch, size) as ranks:
        # What is wrong with any cell is wrong input: said before anything is measured.
        for cell in cells:
            _run_on_ranks(ranks, "check_cell", cell)
        env = _run_on_ranks(ranks, "describe", cells[0], command)
        for done, (repeat, index) in enumerate(visits):
            cell = cells[index]
            on_progress(f"{cell.label} · repeat {repeat + 1} of {plan.repeats}", done, total)
            result = _try_on_ranks(ranks, "time_cell", cell)
            if result is not None:
                cell.times_ms.append(result["slowest_ms"][plan.warmup :])
                cell.skews_ms += result["skew_ms"][plan.warmup :]
                cell.losses = cell.losses or result["losses"]
                cell.samples, cell.tokens_per_sample = (
                    result["samples"],
                    result["tokens_per_sample"],
                )
        for done, cell in enumerate(cells, start=len(visits)):
            on_progress(f"{cell.label} · memory", done, total)
            cell.peak_bytes = _try_on_ranks(ranks, "weigh_cell", cell)
        if plan.profile is not None and folder is not None:
            for done, cell in enumerate(cells, start=len(visits) + len(cells)):
                on_progress(f"{cell.label} · traces", done, total)
                cell.traces = _profile(ranks, cell, plan.profile, folder())
    on_progress("done", total, total)
    return summarize(cells, plan, command, env)


def _schedule(cells: int, repeats: int) -> Iterator[tuple[int, int]]:
    """(repeat, cell): each repeat visits all, and starts one further."""
    for repeat in range(repeats):
        yield from ((repeat, (repeat + i) % cells) for i in range(cells))


def _run_on_ranks(ranks: RankSet, function: str, cell: Cell, *args: Any) -> Any:
    """Rank 0's result of one of this module's functions."""
    return ranks.run(f"{__name__}:{function}", cell.config.to_dict(), *args)[0]


def _try_on_ranks(ranks: RankSet, function: str, cell: Cell) -> Any:
    """The same, but a failure is noted in the cell, which is then left alone."""
    if cell.status != "ok":
        return None
    try:
        return _run_on_ranks(ranks, function, cell)
    except (RankFailure, UsageError) as error:
        cell.status = "failed" if isinstance(error, RankFailure) else "skipped"
        cell.reason = str(error)
        return None


def _profile(
    ranks: RankSet, cell: Cell, profile: ProfileConfig, folder: Path
) -> dict[str, Any] | None:
    """The cell's traces. What was measured stays measured if this fails."""
    if cell.status != "ok":
        return None
    config = replace(
        cell.config,
        profile=profile,
        training=replace(
            cell.config.training, steps=profile.repeat * profile.window, warmup_steps=0
        ),
        output=OutputConfig(),  # the folder is no longer empty, and that is right here
    )
    try:
        return cast(
            "dict[str, Any]",
            ranks.run(f"{__name__}:profile_cell", config.to_dict(), str(folder))[0],
        )
    except (RankFailure, UsageError) as error:
        return {"reason": str(error)}


def summarize(
    cells: list[Cell], plan: Plan, command: str, env: Mapping[str, Any]
) -> dict[str, Any]:
    """The numbers of ``compare.json``, from what was measured. Pure."""
    baseline = next((c for c in cells if c.config.strategy.name == BASELINE), cells[0])
    config = cells[0].config
    return {
        "schema": SCHEMA,
        "command": command,
        "env": dict(env),
        "baseline": baseline.label,
        "workload": env["workload"],
        "parameters": env["parameters"],
        "global_batch": config.training.global_batch,
        "repeats": plan.repeats,
        "warmup_steps": plan.warmup,
        "timed_steps": plan.steps,
        "config": config.to_dict(),
        "cells": [_row(cell, baseline) for cell in cells],
    }


def _row(cell: Cell, baseline: Cell) -> dict[str, Any]:
    config = cell.config
    row: dict[str, Any] = {
        "strategy": config.strategy.name,
        "label": cell.label,
        "world": config.launch.world,
        "options": dict(config.strategy.options),
        "accumulate": config.training.accumulate,
        "status": cell.status,
        "reason": cell.reason,
        "step_ms": None,
        "step_ms_repeats": cell.times_ms,
        "speed_to_baseline": None,
        "skew_ms": None,
        "samples_per_s": None,
        "tokens_per_s": None,
        "peak_bytes": None,
        "loss": None,
        "loss_difference": None,
        "loss_difference_max": None,
        "losses": cell.losses,
        "traces": cell.traces,
    }
    if cell.status != "ok" or not cell.times_ms:
        return row
    times = [ms for repeat in cell.times_ms for ms in repeat]
    row["step_ms"] = stats.spread(times)
    row["skew_ms"] = statistics.median(cell.skews_ms)
    row |= stats.throughput(times, cell.samples, cell.tokens_per_sample)
    row["peak_bytes"] = cell.peak_bytes or {"total": None}
    row["loss"] = cell.losses[-1]
    if baseline.status == "ok":
        base_times = [ms for repeat in baseline.times_ms for ms in repeat]
        row["speed_to_baseline"] = statistics.median(base_times) / row["step_ms"]["median"]
        if baseline.config.strategy.name == BASELINE:  # else there is no reference to differ from
            pairs = zip(cell.losses, baseline.losses, strict=True)
            differences = [abs(a - b) for a, b in pairs]
            row["loss_difference"] = differences[-1]
            row["loss_difference_max"] = max(differences)
    return row


# ------------------------------------------------------------------ in the ranks


def describe(world: World, values: dict[str, Any], command: str) -> dict[str, Any]:
    """Where this runs, and what."""
    from shardlab import environment, train

    workload = train.build_workload(_config(values))
    parameters = sum(p.numel() for p in workload.make_model().parameters())
    return {
        **environment.describe(world.device, command),
        "backend": world.backend,
        "workload": workload.name,
        "parameters": parameters,
    }


def check_cell(world: World, values: dict[str, Any]) -> None:
    """Refuse unknown options, sizes and data before anything is measured."""
    from shardlab import train

    config = _config(values)
    train.resolve_strategy(config)
    workload = train.build_workload(config)
    if workload.couples_ranks and config.strategy.name == BASELINE and world.size > 1:
        raise UsageError(
            f"{BASELINE} would run each rank's samples by themselves, but {workload.name} looks at "
            f"all ranks' together ({workload.couples_ranks}): its loss would be another. Leave out "
            f"{BASELINE} or {workload.couples_ranks}"
        )


def time_cell(world: World, values: dict[str, Any]) -> dict[str, Any] | None:
    """Build the cell's strategy from the seed and run warm-up and timed steps."""
    member = world.first(_config(values).launch.world or 1)
    return None if member is None else _run(member, _config(values))


def weigh_cell(world: World, values: dict[str, Any]) -> dict[str, int] | None:
    """The peak over building and three steps: optimizer state exists from the second on."""
    from shardlab import train
    from shardlab.measure import memory

    config = _config(values).with_overrides(
        # Nothing is prepared ahead: whether a thread is done with it at the peak is chance.
        {"training.steps": 3, "training.warmup_steps": 0, "data.prefetch": 0}
    )
    member = world.first(config.launch.world or 1)
    if member is None:
        return None
    causes = memory.Causes()

    def work() -> None:
        workload = train.build_workload(config)
        strategy = train.build_strategy(config, workload, member)
        for microbatches in train.batches(workload, config, member):
            with causes.step():
                strategy.gradients(microbatches)
            causes.look(with_gradients=True)
            strategy.step()
            causes.look(with_gradients=False)
        # A collective that ends after the profiler has crashes the process (torch 2.13).
        getattr(strategy, "settle", lambda: None)()

    _, allocations = memory.trace(member.device, work)
    return memory.by_cause(member.gather(causes.of(memory.at_peak(allocations))))


def profile_cell(world: World, values: dict[str, Any], folder: str) -> dict[str, Any] | None:
    """A short run under the profiler, its traces in ``<folder>/<strategy>/traces``."""
    from shardlab import train
    from shardlab.comm import LEDGER
    from shardlab.record import Recorder
    from shardlab.trace import capture

    config = _config(values)
    member = world.first(config.launch.world or 1)
    if member is None:
        return None
    LEDGER.reset()
    workload = train.build_workload(config)
    strategy = train.build_strategy(config, workload, member)
    own = Path(folder) / capture.folder_name(config.strategy.label)
    own.mkdir(exist_ok=True)
    traces = train.make_capture(config, member, strategy, own)
    assert traces is not None
    with Recorder(own, member, LEDGER, config.training.steps, traces) as recorder:
        train.train(strategy, train.batches(workload, config, member), recorder)
    return {"folder": str(own), **traces.summary()}


def _config(values: dict[str, Any]) -> Config:
    from shardlab.config import from_dict

    return from_dict(values)


def _run(world: World, config: Config) -> dict[str, Any]:
    from shardlab import train
    from shardlab.comm import LEDGER
    from shardlab.record import Recorder

    LEDGER.reset(full_steps=0)
    workload = train.build_workload(config)
    strategy = train.build_strategy(config, workload, world)
    with Recorder(None, world, LEDGER, config.training.steps) as recorder:
        train.train(strategy, train.batches(workload, config, world), recorder)
    steps = list(zip(*world.gather([row["step_ms"] for row in recorder.rows]), strict=True))
    return {
        "slowest_ms": [max(ranks) for ranks in steps],
        "skew_ms": [max(ranks) - min(ranks) for ranks in steps],
        "losses": [row["loss"] for row in recorder.rows],
        "samples": config.training.global_batch,
        "tokens_per_sample": workload.tokens_per_sample,
    }
