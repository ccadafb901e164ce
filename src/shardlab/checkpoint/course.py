"""A run's checkpoints, as the loop meets them.

Apart from ``during``, which imports DCP: a run without checkpoints need not wait for that.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from shardlab import pulse
from shardlab.config import Config
from shardlab.data.audit import Audit
from shardlab.files import read_jsonl
from shardlab.guard.guards import Guards
from shardlab.strategies.base import Strategy
from shardlab.workloads.base import Workload
from shardlab.world import World

if TYPE_CHECKING:
    from shardlab.checkpoint.save import Checkpoints
    from shardlab.run.recorder import Recorder


def kept_rows(folder: Path, world: World) -> list[dict[str, Any]]:
    """This rank's rows from before the resume; empty if any rank's are incomplete."""
    rows = read_jsonl(folder / f"rank{world.rank}.jsonl")
    return rows if len(set(world.gather(len(rows)))) == 1 else []


class Saving:
    """The run's checkpoints: what the loop calls after each step. ``config.checkpoint.every`` None:
    there are none."""

    def __init__(
        self,
        config: Config,
        workload: Workload,
        world: World,
        strategy: Strategy,
        recorder: Recorder,
        audit: Audit | None,
        guards: Guards,
    ) -> None:
        self.every = config.checkpoint.every
        self.total = config.training.steps
        self.recorder, self.audit = recorder, audit
        self.finished = self.saved = recorder.first  # steps
        self.checkpoints: Checkpoints | None = None
        if self.every is not None:
            from shardlab.checkpoint import during

            assert recorder.folder is not None
            self.checkpoints = during.checkpoints_of(
                recorder.folder, config, workload, world, strategy, recorder, guards
            )

    def after_step(self, step: int, _loss: Tensor) -> None:
        """A checkpoint, if one is due."""
        self.finished = step + 1
        is_last = self.finished == self.total
        if self.every is not None and (is_last or self.finished % self.every == 0):
            self._save(is_last)

    def finish(self) -> None:
        """After the loop: a last checkpoint if the run was asked to stop between two; then wait
        until all are written. It is not called after a crash, when other ranks may be gone."""
        if self.checkpoints is None:
            return
        if self.saved < self.finished:
            self._save(is_last=True)
        with pulse.PULSE.at(pulse.CHECKPOINT):
            self.checkpoints.wait()

    def _save(self, is_last: bool) -> None:
        from shardlab.checkpoint import during

        assert self.checkpoints is not None
        during.save(self.checkpoints, self.recorder, self.audit, self.finished, is_last)
        self.saved = self.finished

    def last(self) -> dict[str, Any] | None:
        """How the last checkpoint went."""
        outcome = None if self.checkpoints is None else self.checkpoints.last
        return None if outcome is None else outcome.row()
