"""What is compared: a cell for each strategy and each point of the axes. No torch is needed.

Every cell takes the same samples in the same global batch. An axis that does not concern a strategy
is not multiplied: ``single`` is one process in every world, and only strategies with buckets take
``--bucket-mb``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from shardlab.config import (
    NO_EVALUATION,
    PRECISIONS,
    Config,
    ProfileConfig,
    data_ranks,
    parse_value,
    share_batch,
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
    accumulates: tuple[int, ...]
    bucket_mbs: tuple[float, ...] = ()  # empty: each strategy's default


def axes_of(
    config: Config,
    world: str | None,
    precision: str | None,
    accumulate: str | None,
    bucket_mb: str | None,
    default_world: int,
) -> Axes:
    """The axes from the flags' texts (``1,2,4``); what no flag names is the config's."""
    precisions = parse_list(precision)
    for word in precisions:
        if word not in PRECISIONS:
            raise unknown("value of --precision", word, PRECISIONS)
    sizes = [parse_value(part) for part in parse_list(bucket_mb)]
    for size in sizes:
        if type(size) not in (int, float) or not 0 < size < float("inf"):
            raise UsageError(
                f"--bucket-mb {bucket_mb}: not sizes in MB above 0, as in 25 or 1,4,25"
            )
    # 0: what follows from the micro-batch and each world.
    times = 0 if config.training.micro_batch is not None else config.training.accumulate
    return Axes(
        worlds=whole_numbers("--world", world) or (config.launch.world or default_world,),
        precisions=tuple(precisions) or (config.precision.compute,),
        accumulates=whole_numbers("--accumulate", accumulate) or (times,),
        bucket_mbs=tuple(sizes),
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
        return self.world * self.config.training.accumulate

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
            "accumulate": self.config.training.accumulate,
            "precision": self.config.precision.compute,
        }


def cells_of(
    config: Config,
    specs: Sequence[str],
    axes: Axes,
    plan: Plan,
    takes_buckets: Callable[[str], bool] | None = None,
) -> list[Cell]:
    """A cell for each ``name`` or ``name:option=value:…`` and point of the axes.

    ``single`` is one process with every rank's micro-batches one after another: the very same
    arithmetic, so that its loss is the others', with BatchNorm too. Of several worlds it takes the
    fewest parts, in which it is fastest: a slowed reference would flatter the others.
    """
    if config.training.micro_batch is not None:
        # The first world decides the global batch, where nobody says it, for all of them.
        config = config.with_overrides({"launch.world": axes.worlds[0]})
    for world, accumulate in product(axes.worlds, axes.accumulates):
        shares = data_ranks(config.strategy, world)
        share_batch(replace(config.training, accumulate=accumulate), shares)
    takes = takes_buckets or has_buckets
    cells = []
    first = axes.worlds[0], axes.accumulates[0]
    points = product(axes.precisions, axes.worlds, axes.accumulates, specs)
    for precision, world, accumulate, spec in points:
        name, options = parse_spec(spec)
        if name == BASELINE and (world, accumulate) != first:
            continue  # one for all worlds
        sizes: list[dict[str, Any]] = [{}]
        if axes.bucket_mbs and "bucket_mb" not in options and takes(name):
            sizes = [{"bucket_mb": size} for size in axes.bucket_mbs]
        for more in sizes:
            point = world, precision, accumulate
            cells.append(_cell(config, name, options | more, axes, point, plan))
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
    point: tuple[int, str, int],
    plan: Plan,
) -> Cell:
    world, precision, accumulate = point
    parts = [f"{key}={value}" for key, value in options.items()]
    if name == BASELINE:
        world, accumulate = 1, min(axes.worlds) * min(axes.accumulates)
    elif len(axes.worlds) > 1:
        parts.append(f"world={world}")
    if len(axes.precisions) > 1:
        parts.append(precision)
    if name != BASELINE and len(axes.accumulates) > 1:
        parts.append(f"accumulate={accumulate}")
    values = replace(config, profile=ProfileConfig()).with_overrides(  # never while timing
        {
            "strategy.name": name,
            "strategy.options": options,
            "launch.world": world,
            "precision.compute": precision,
            "training.accumulate": accumulate,
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
