"""A run that continues without workers that are late or lost (``min_workers``).

Its ranks call no collective once the loop has begun (``strategies/table.py``). So each records
and guards itself, and worker 0 alone evaluates and writes checkpoints. ``rounds.jsonl`` in the run
folder says who took part in each exchange.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from torch import Tensor

from shardlab import numbers
from shardlab.config import Config
from shardlab.errors import UsageError
from shardlab.files import append_jsonl
from shardlab.strategies.base import Strategy
from shardlab.strategies.table import Table
from shardlab.strategies.workers import Workers
from shardlab.world import World

NAME = "rounds.jsonl"


def table_of(strategy: Strategy) -> Table | None:
    """Where the workers of this strategy meet, if some may be absent."""
    return strategy.table if isinstance(strategy, Workers) else None


def refuse_unfit(config: Config, strategy: Strategy, world: World) -> None:
    """Refuse what needs every worker between two exchanges, or at the end."""
    assert strategy.rounds is not None
    every, training = strategy.rounds.every, config.training
    if world.pulse is None:
        raise UsageError(
            "min_workers is for ranks that shardlab has started (--world N): a launcher ends all "
            "ranks when one is lost"
        )
    for name, value in (
        ("training.steps", training.steps),
        ("training.evaluate_every", training.evaluate_every),
        ("checkpoint.every", config.checkpoint.every),
    ):
        if value is not None and value % every:
            raise UsageError(
                f"with min_workers {name} must be a multiple of every ({every}), got {value}: "
                "only after an exchange does a worker know what all are"
            )
    if config.data.audit:
        raise UsageError("data.audit counts the samples of all workers: not with min_workers")


class Attendance:
    """On worker 0: writes who took part, and warns when a worker is missed or has come back."""

    def __init__(self, table: Table, world: World, folder: Path, every: int, first: int) -> None:
        self.table, self.world, self.path = table, world, folder / NAME
        self.every, self.first = every, first  # steps of a round, and that the run began with
        self.written = 0
        self.before = set(range(table.size))

    def after_step(self, _step: int, _loss: Tensor) -> None:
        for row in self.table.history[self.written :]:
            steps = self.first + (row["round"] + 1) * self.every
            append_jsonl(self.path, {"steps": steps, **row})
            here = set(row["took_part"])
            if missed := self.before - here:
                self._warn(steps, f"was made without {_named(missed)}")
            if back := here - self.before:
                self._warn(steps, f"had {_named(back)} again")
            self.before = here
            self.written += 1

    def _warn(self, steps: int, how: str) -> None:
        self.world.tell({"warning": f"the exchange after {steps} steps {how}"})

    def summary(self) -> dict[str, Any]:
        """How often each worker took part."""
        rows = self.table.history[: self.written]
        took_part = Counter(worker for row in rows for worker in row["took_part"])
        return {
            "rounds": len(rows),
            "took_part": [took_part[worker] for worker in range(self.table.size)],
        }


def _named(workers: set[int]) -> str:
    return numbers.names([f"worker {worker}" for worker in sorted(workers)])
