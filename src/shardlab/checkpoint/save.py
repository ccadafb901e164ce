"""Writing checkpoints during a run: all ranks together, whole or not at all."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch.distributed as dist
from torch import Tensor

from shardlab import pulse
from shardlab.checkpoint import files, parts, rng, storage
from shardlab.checkpoint.manifest import EXTRA, NAME, OWN, RANDOM, SHARED, File, Manifest, Update
from shardlab.checkpoint.resume import together
from shardlab.config import CheckpointConfig, Config
from shardlab.faults import inject
from shardlab.files import write_text
from shardlab.optim import optimizers
from shardlab.strategies.base import Strategy
from shardlab.workloads.base import Workload
from shardlab.world import World

if TYPE_CHECKING:
    from shardlab.guard.guards import Guards
    from shardlab.training.recorder import Recorder


@dataclass(frozen=True)
class About:
    """What a checkpoint says about its run."""

    config: dict[str, Any]
    strategy: str
    samples: int | None  # of the data set


@dataclass(frozen=True)
class Outcome:
    """How a checkpoint went, as the run folder records it."""

    step: int
    seconds: float  # until it had its name
    held_up_s: float  # the part of these seconds that the run waited
    bytes: int
    error: str | None = None

    def row(self) -> dict[str, Any]:
        return asdict(self)


class Checkpoints:
    """A run's checkpoints. ``save`` is called by all ranks after the same step.

    Asynchronously, the run waits only while each rank copies what it will write; a thread writes
    it, and agrees with the other ranks' threads over a group of its own. At most one is under way:
    the next waits.

    A checkpoint that cannot be written (a full disk) leaves nothing behind and does not end the
    run: to continue loses nothing, to stop would lose every step since the last one. It is
    reported.
    """

    def __init__(
        self,
        run: Path,
        settings: CheckpointConfig,
        world: World,
        strategy: Strategy,
        about: About,
        on_done: Callable[[Outcome], None] = lambda _outcome: None,
        guards: Guards | None = None,
    ) -> None:
        optimizers.refuse_lost(strategy.update.inner)
        self.run = run
        self.settings = settings
        self.world = world
        self.strategy = strategy
        self.about = about
        self.on_done = on_done
        self.guards = guards
        self.last: Outcome | None = None
        self.notes: list[str] = []  # warnings about old ones that cannot be removed
        self._group = world.group
        self._under_way: Future[Outcome] | None = None
        if settings.asynchronous:
            # Collectives pair by order, so those of a thread need a group that nobody else uses.
            ranks = dist.get_process_group_ranks(world.group)
            self._group = dist.new_group(ranks, backend="gloo")

    def save(self, step: int, random: Mapping[str, Tensor]) -> None:
        """Save after ``step`` steps, with this rank's random states. A collective."""
        start = time.perf_counter()
        self.wait()
        if self.guards is not None:
            self.guards.before_checkpoint()
        shared, own = self.strategy.extra_state()
        rank = f"{OWN}{self.world.rank}/"
        alone = parts.parts_of(rank + RANDOM, random) | parts.parts_of(rank + EXTRA, own)
        with self.strategy.as_one():
            outcome = self._save(step, parts.parts_of(SHARED, shared), alone, start)
        if outcome is not None:
            self._finish(outcome)

    def _save(
        self, step: int, shared: parts.Parts, alone: parts.Parts, start: float
    ) -> Outcome | None:
        """Write it, or copy what a thread will write: then the outcome is not known yet."""
        held, numbers, update = parts.held_by(self.strategy)
        held |= shared
        if self.guards is not None:
            self.guards.check_saved(held, numbers, step - 1)
        parts.as_runs(held, self.world)
        held |= alone
        offered = self.world.gather((parts.offers_of(held), numbers))
        whole = self.strategy.model_spec()
        tensors, shares = parts.plan([offers for offers, _ in offered])
        make = partial(
            Manifest,
            step=step,
            strategy=self.about.strategy,
            world=self.world.size,
            config=self.about.config,
            samples=self.about.samples,
            update=cast(Update, update),
            numbers={name: n for _, of_rank in offered for name, n in of_rank.items()},
            tensors=tensors,
            tied=whole.tied,
            unsaved=whole.unsaved,
        )
        mine = shares[self.world.rank]
        pieces = [(n, low, parts.between(held[n], low, high)) for n, low, high in mine]
        if not self.settings.asynchronous:
            return self._write(step, pieces, make, start, None)
        pieces = [(name, low, values.to("cpu", copy=True)) for name, low, values in pieces]
        held_up_s = time.perf_counter() - start
        self._under_way = _in_thread(
            partial(self._write, step, pieces, make, start, held_up_s), "shardlab-checkpoint"
        )
        return None

    def wait(self) -> None:
        """Wait until what is under way is done."""
        if self._under_way is not None:
            future, self._under_way = self._under_way, None
            self._finish(future.result())

    def _finish(self, outcome: Outcome) -> None:
        self.last = outcome
        for note in self.notes:
            self.world.tell({"warning": note})
        self.notes.clear()
        self.on_done(outcome)

    def _write(
        self,
        step: int,
        pieces: list[storage.Piece],
        make: Callable[..., Manifest],
        start: float,
        held_up_s: float | None,  # None: the run waits for all of it
    ) -> Outcome:
        rank, part = self.world.rank, files.part_of(self.run, step)
        written: dict[str, File] = {}

        def write() -> File | None:
            part.mkdir(parents=True, exist_ok=True)
            return storage.write(part / parts.file_of(rank), pieces) if pieces else None

        def commit() -> None:
            if rank == 0:
                write_manifest(part, make(files=written))
                inject.at("checkpoint", step - 1)
                files.put_in_place(part, files.path_of(self.run, step))

        if rank:  # rank 0's turn is when it gives the name
            inject.at("checkpoint", step - 1)
        error = None
        try:
            found = enumerate(together(self._gather, write))
            written |= {parts.file_of(r): file for r, file in found if file is not None}
            together(self._gather, commit)
        except OSError as reason:
            error = f"{reason.strerror or reason}: {reason.filename or part}"
            if rank == 0:
                shutil.rmtree(part, ignore_errors=True)
        else:
            if rank == 0:
                self._retain(step)
        seconds = time.perf_counter() - start
        size = sum(file.size for file in written.values()) if error is None else 0
        return Outcome(step, seconds, seconds if held_up_s is None else held_up_s, size, error)

    def _retain(self, newest: int) -> None:
        """Remove old ones. Checkpoints of later steps are from before a resume that passed them
        over: they do not count."""
        steps = [step for step in files.steps_in(self.run) if step <= newest]
        for step in files.to_remove(steps, self.settings.keep_last, self.settings.keep_every):
            path = files.path_of(self.run, step)
            try:
                shutil.rmtree(files.set_aside(path), ignore_errors=True)
            except OSError as error:
                self.notes.append(f"cannot remove {path}: {error.strerror}")

    def _gather(self, value: Any) -> list[Any]:
        """Every rank's value, over the group that checkpoints have."""
        values: list[Any] = [None] * self.world.size
        dist.all_gather_object(values, value, group=self._group)
        return values


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
            about = About(
                config.started_anew().to_dict(), config.strategy.name, len(workload.dataset)
            )
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


def _in_thread(act: Callable[[], Outcome], name: str) -> Future[Outcome]:
    """The result of an act in a daemon thread: a rank that crashes does not wait for its peers."""
    future: Future[Outcome] = Future()

    def run() -> None:
        try:
            future.set_result(act())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def write_manifest(folder: Path, manifest: Manifest) -> None:
    path = folder / NAME
    created = datetime.now(UTC).isoformat(timespec="seconds")
    write_text(path, replace(manifest, created=created).to_json())
    with path.open("rb") as file:
        os.fsync(file.fileno())
