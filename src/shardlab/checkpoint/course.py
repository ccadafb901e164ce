"""The steps of a run, with checkpoints between them where they are asked for.

Apart from ``during``, which imports DCP: a run without checkpoints need not wait for that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardlab.config import Config
from shardlab.data.audit import Audit
from shardlab.guard.guards import Guards
from shardlab.record import Recorder, read_jsonl
from shardlab.strategies.base import Strategy
from shardlab.workloads.base import Batch, Workload
from shardlab.world import World

if TYPE_CHECKING:
    from shardlab.checkpoint.save import Checkpoints


def kept_rows(folder: Path, world: World) -> list[dict[str, Any]]:
    """This rank's rows of before; none, if a rank was not there all the time."""
    rows = read_jsonl(folder / f"rank{world.rank}.jsonl")
    return rows if len(set(world.gather(len(rows)))) == 1 else []


@dataclass(frozen=True)
class Saved:
    """The steps of a run, with the checkpoints between them, if there are any."""

    steps: Iterator[Sequence[Batch]]
    checkpoints: Checkpoints | None = None

    def last(self) -> dict[str, Any] | None:
        """How the last checkpoint went."""
        outcome = None if self.checkpoints is None else self.checkpoints.last
        return None if outcome is None else outcome.row()


@contextmanager
def with_checkpoints(
    steps: Iterator[Sequence[Batch]],
    config: Config,
    workload: Workload,
    world: World,
    strategy: Strategy,
    recorder: Recorder,
    audit: Audit | None,
    guards: Guards,
) -> Iterator[Saved]:
    """The steps, and between them the checkpoints that the config asks for, if it asks."""
    if config.checkpoint.every is None:
        yield Saved(steps)
        return
    from shardlab.checkpoint import during

    assert recorder.folder is not None
    folder = recorder.folder
    with during.saving(folder, config, workload, world, strategy, recorder, guards) as checkpoints:
        total = config.training.steps
        course = during.between_steps(steps, checkpoints, recorder, total, audit)
        yield Saved(course, checkpoints)
