"""A run's checkpoints, as the loop meets them: to begin where another run stopped, and to save."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from shardlab import pulse
from shardlab import world as worlds
from shardlab.checkpoint import files, rng
from shardlab.checkpoint.load import fits, load
from shardlab.checkpoint.manifest import RANDOM, inside
from shardlab.checkpoint.save import About, Checkpoints, Outcome
from shardlab.checkpoint.start import Start
from shardlab.config import Config
from shardlab.faults import inject
from shardlab.files import read_jsonl
from shardlab.guard.guards import Guards
from shardlab.strategies import steps
from shardlab.strategies.base import Strategy
from shardlab.workloads.base import Batch, Workload
from shardlab.world import World

if TYPE_CHECKING:
    from shardlab.run.recorder import Recorder


def kept_rows(folder: Path, world: World) -> list[dict[str, Any]]:
    """This rank's rows from before the resume; empty if any rank's are incomplete."""
    rows = read_jsonl(folder / f"rank{world.rank}.jsonl")
    return rows if len(set(world.gather(len(rows)))) == 1 else []


def restore(
    start: Start,
    strategy: Strategy,
    world: World,
    config: Config,
    rehearse: Callable[[], Sequence[Batch]],
) -> None:
    """Model, optimizer, schedule, scaler and random states as they were. A collective."""
    assert start.manifest is not None
    is_over = start.step >= config.training.steps
    if strategy.LEARNS_LAYOUT and world.size > 2 and not is_over:
        # DDP lays its buckets out anew after its first step, and the order in which more than two
        # ranks' gradients are added depends on that: so it makes its first step before the load.
        strategy.gradients(rehearse())
        steps.drop_gradients(strategy.params)
    put_back(start, strategy, world, config)


def put_back(start: Start, strategy: Strategy, world: World, config: Config) -> None:
    """Model, optimizer, schedule and scaler as they were; random states, and what belongs to one
    rank alone, as far as there are the same ranks. A collective."""
    assert start.manifest is not None
    own = load(start, strategy, world, config)
    if world.rank < start.manifest.world:
        with fits(start, "the random states", RuntimeError):
            rng.put(inside(own, RANDOM), world.device)
    else:  # this rank is new: it must not draw again what it drew before the first checkpoint
        worlds.seed_rank(config.training.seed, world.rank, start.step)


class Saving:
    """What the loop calls after each step. Without ``config.checkpoint.every`` it saves nothing."""

    def __init__(
        self,
        config: Config,
        workload: Workload,
        world: World,
        strategy: Strategy,
        recorder: Recorder,
        guards: Guards,
    ) -> None:
        self.every = config.checkpoint.every
        self.total = config.training.steps
        self.recorder = recorder
        self.finished = self.saved = recorder.first  # steps
        self.checkpoints: Checkpoints | None = None
        if self.every is not None:
            assert recorder.folder is not None
            again = config.with_overrides({"output.dir": None, "checkpoint.resume": None})
            about = About(again.to_dict(), config.strategy.name, len(workload.dataset))
            self.checkpoints = Checkpoints(
                recorder.folder, config.checkpoint, world, strategy, about, self._done, guards
            )

    def after_step(self, step: int, _loss: Tensor) -> None:
        """Save if a checkpoint is due."""
        self.finished = step + 1
        is_last = self.finished == self.total
        if self.every is not None and (is_last or self.finished % self.every == 0):
            self._save()

    def finish(self) -> None:
        """After the loop: a last checkpoint if the run was asked to stop between two; then wait
        until all are written. It is not called after a crash, when other ranks may be gone."""
        if self.checkpoints is None:
            return
        if self.saved < self.finished:
            self._save()
        with pulse.PULSE.at(pulse.CHECKPOINT):
            self.checkpoints.wait()

    def _save(self) -> None:
        """The rows of its steps are in their files before the checkpoint."""
        checkpoints = self.checkpoints
        assert checkpoints is not None
        self.recorder.flush()
        with pulse.PULSE.at(pulse.CHECKPOINT):
            checkpoints.save(self.finished, rng.get(checkpoints.world.device))
        self.saved = self.finished

    def _done(self, outcome: Outcome) -> None:
        self.recorder.checkpointed(outcome.row())
        if inject.ACTIVE is not None and outcome.error is None:
            assert self.recorder.folder is not None
            written = files.path_of(self.recorder.folder, outcome.step)
            inject.ACTIVE.checkpoint_written(written, outcome.step)

    def last(self) -> dict[str, Any] | None:
        """How the last checkpoint went."""
        outcome = None if self.checkpoints is None else self.checkpoints.last
        return None if outcome is None else outcome.row()
