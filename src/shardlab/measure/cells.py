"""What is compared: a cell for each strategy and each point of the axes. No torch is needed.

Every cell takes the same samples in the same global batch. ``single`` is one process, and so one
cell for all worlds.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from msgspec import structs

from shardlab.config import (
    NO_EVALUATION,
    PRECISIONS,
    Config,
    ProfileConfig,
)
from shardlab.errors import UsageError, unknown
from shardlab.specs import BASELINE, parse_list, parse_spec, whole_numbers


@dataclass(frozen=True)
class Plan:
    """How often and how long each strategy is run, and what is done after it was timed."""

    repeats: int = 4
    warmup: int = 1  # the first step alone learns (order of gradients, bucket sizes, plans)
    steps: int = 2  # timed, per repeat: visits differ from each other more than their steps do
    prove: bool = True
    fresh: bool = False  # proofs are made anew, also where one is kept
    time_limit_s: float = 600.0  # for each visit, weighing, estimate, proof and profile
    profile: ProfileConfig | None = None  # traces, after all is timed; None disables them

    def __post_init__(self) -> None:
        for name, least in (("repeats", 1), ("warmup", 0), ("steps", 1)):
            if getattr(self, name) < least:
                raise UsageError(f"--{name} must be at least {least}, got {getattr(self, name)}")
        if not 0 < self.time_limit_s < float("inf"):
            raise UsageError(f"--time-limit must be above 0 s, got {self.time_limit_s}")


@dataclass(frozen=True)
class Axes:
    """The lists that are multiplied. One value each is a plain comparison."""

    worlds: tuple[int, ...]
    precisions: tuple[str, ...]
    micro_batches: tuple[int | None, ...]  # None: a rank's share at once


def axes_of(
    config: Config,
    world: str | None,
    precision: str | None,
    micro_batch: str | None,
    default_world: int,
) -> Axes:
    """The axes from the flags' texts (``1,2,4``); what no flag names is the config's."""
    precisions = parse_list(precision)
    for word in precisions:
        if word not in PRECISIONS:
            raise unknown("value of --precision", word, PRECISIONS)
    return Axes(
        worlds=whole_numbers("--world", world) or (config.launch.world or default_world,),
        precisions=tuple(precisions) or (config.precision.compute,),
        micro_batches=whole_numbers("--micro-batch", micro_batch) or (config.training.micro_batch,),
    )


@dataclass(eq=False)
class Cell:
    """One row of the comparison: what is run; then, as it comes, what was measured."""

    config: Config
    label: str
    times_ms: list[list[float]] = field(default_factory=list)  # (repeats, steps), slowest rank
    skews_ms: list[float] = field(default_factory=list)  # slowest minus fastest rank, per step
    losses: list[float] = field(default_factory=list)
    samples: int = 0
    tokens_per_sample: int | None = None
    peak_bytes: dict[str, int] | None = None
    estimated_bytes: dict[str, Any] | None = None  # the same without running, or why not
    proof: dict[str, Any] | None = None  # the verdict, or why there is none
    traces: dict[str, Any] | None = None  # files and bytes, or why there are none
    profile: dict[str, Any] | None = None  # where a profiled step went, in ms
    sent: dict[str, Any] | None = None  # by each rank in a step
    changes: str | None = None  # how its steps differ from one process's, if they do
    every: int | None = None  # steps of a round, if its ranks are workers with steps of their own
    chosen: dict[str, float] = field(default_factory=dict)  # options that it has set by itself
    status: str = "ok"
    reason: str | None = None

    @property
    def world(self) -> int:
        return self.config.launch.world or 1

    @property
    def parts(self) -> int:
        """Micro-batches of a step over all ranks, which BatchNorm sees one at a time."""
        return self.world * self.config.accumulate

    @property
    def is_reference(self) -> bool:
        return self.config.strategy.name == BASELINE

    @property
    def point(self) -> dict[str, Any]:
        """What makes two cells of two comparisons the same."""
        return {
            "strategy": self.config.strategy.name,
            "options": dict(self.config.strategy.options),
            "world": self.world,
            "accumulate": self.config.accumulate,
            "precision": self.config.precision.compute,
        }


def cells_of(
    config: Config,
    specs: Sequence[str],
    axes: Axes,
    plan: Plan,
) -> list[Cell]:
    """A cell for each ``name`` or ``name:option=value:…`` and point of the axes.

    ``single`` is one process with every rank's micro-batches one after another: the very same
    arithmetic, so that its loss is the others', with BatchNorm too. Of several worlds it takes the
    fewest parts, in which it is fastest: a slowed reference would flatter the others.
    """
    # The first world decides the global batch, where nobody says it, for all of them.
    if not config.training.global_batch:
        config = config.at_world(axes.worlds[0])
    cells = []
    first = axes.worlds[0], axes.micro_batches[0]
    points = product(axes.precisions, axes.worlds, axes.micro_batches, specs)
    for precision, world, micro_batch, spec in points:
        name, options = parse_spec(spec)
        if name == BASELINE and (world, micro_batch) != first:
            continue  # one for all worlds
        cells.append(_cell(config, name, options, axes, (world, precision, micro_batch), plan))
    labels = [cell.label for cell in cells]
    for label in labels:
        if labels.count(label) > 1:
            raise UsageError(f"strategy {label} is named twice")
    return cells


def has_buckets(name: str) -> bool:
    """Whether a strategy has buckets whose size can be chosen. Imports it, and torch."""
    from shardlab import naming

    make = naming.resolve(name, naming.EVERY_STRATEGY, "strategy")
    return "bucket_mb" in inspect.signature(make).parameters


def _cell(
    config: Config,
    name: str,
    options: dict[str, Any],
    axes: Axes,
    point: tuple[int, str, int | None],
    plan: Plan,
) -> Cell:
    world, precision, micro_batch = point
    parts = [f"{key}={value}" for key, value in options.items()]
    if name == BASELINE:
        world, micro_batch = 1, _largest_part(config.training.global_batch, axes)
    elif len(axes.worlds) > 1:
        parts.append(f"world={world}")
    if len(axes.precisions) > 1:
        parts.append(precision)
    if name != BASELINE and len(axes.micro_batches) > 1:
        parts.append(f"micro_batch={micro_batch}")
    values = structs.replace(config, profile=ProfileConfig()).with_overrides(  # never while timing
        {
            "strategy.name": name,
            "strategy.options": options,
            "launch.world": world,
            "precision.compute": precision,
            "training.micro_batch": micro_batch,
            "training.steps": plan.warmup + plan.steps,
            # These settings are for a run with a folder, which a cell has not.
            **NO_EVALUATION,
            "checkpoint.every": None,
            "checkpoint.asynchronous": False,
            "checkpoint.keep_every": None,
            "checkpoint.resume": None,
            "launch.max_restarts": 0,
            "launch.min_world": None,
            "output.dir": None,
        }
    )
    return Cell(values, f"{name} ({', '.join(parts)})" if parts else name)


def _largest_part(global_batch: int, axes: Axes) -> int:
    """The samples of the largest micro-batch that any rank of these axes takes."""
    return max(
        micro_batch or -(-global_batch // world)
        for world, micro_batch in product(axes.worlds, axes.micro_batches)
    )
