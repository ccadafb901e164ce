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
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from shardlab.checkpoint import files, parts, storage
from shardlab.checkpoint import manifest as manifests
from shardlab.checkpoint.manifest import NAME, OWN, File, Manifest
from shardlab.checkpoint.parts import Part
from shardlab.checkpoint.start import together
from shardlab.config import CheckpointConfig
from shardlab.errors import UsageError
from shardlab.faults import inject
from shardlab.files import write_text
from shardlab.strategies.base import Strategy
from shardlab.world import World

if TYPE_CHECKING:
    from shardlab.guard.guards import Guards

TRIES = 3  # to write a run's last checkpoint, before it counts as failed
SETTLED_S = 0.05  # a file's time is this coarse, or finer: a change within it may not show


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
        self.run = run
        self.settings = settings
        self.world = world
        self.strategy = strategy
        self.about = about
        self.on_done = on_done
        self.guards = guards
        self.last: Outcome | None = None
        self.notes: list[str] = []  # warnings about what was found damaged
        self._read_back: dict[Path, tuple[int, ...]] = {}  # size, time and number of whole files
        self._group = world.group
        self._under_way: Future[Outcome] | None = None
        if settings.asynchronous:
            # Collectives pair by order, so those of a thread need a group that nobody else uses.
            ranks = dist.get_process_group_ranks(world.group)
            self._group = dist.new_group(ranks, backend="gloo")

    def save(self, step: int, own: Mapping[str, Tensor]) -> None:
        """Save after ``step`` steps, with what is this rank's alone. A collective."""
        start = time.perf_counter()
        self.wait()
        if self.guards is not None:
            self.guards.before_checkpoint()
        held, numbers, update = parts.held_by(self.strategy)
        if self.guards is not None:
            self.guards.check_saved(held, numbers, step - 1)
        parts.as_runs(held, self.world)
        held |= {
            f"{OWN}{self.world.rank}/{name}": Part(tensor.shape, 0, tensor.reshape(-1))
            for name, tensor in own.items()
        }
        offered = self.world.gather((parts.offers_of(held), numbers))
        whole = self.strategy.whole()
        tensors, shares = parts.plan([offers for offers, _ in offered])
        make = partial(
            Manifest,
            step=step,
            strategy=self.about.strategy,
            world=self.world.size,
            config=self.about.config,
            samples=self.about.samples,
            update=update,
            numbers={name: n for _, of_rank in offered for name, n in of_rank.items()},
            tensors=tensors,
            tied=whole.tied,
            unsaved=whole.unsaved,
        )
        pieces = [(n, low, held[n].between(low, high)) for n, low, high in shares[self.world.rank]]
        if not self.settings.asynchronous:
            self._finish(self._write(step, pieces, make, start, None))
            return
        pieces = [(name, low, values.to("cpu", copy=True)) for name, low, values in pieces]
        held_up_s = time.perf_counter() - start
        self._under_way = _in_thread(
            partial(self._write, step, pieces, make, start, held_up_s), "shardlab-checkpoint"
        )

    def save_last(self, step: int, own: Mapping[str, Tensor]) -> None:
        """Save what a finished run leaves: it is read back, and written again if damaged.

        Damage would show only on the day when it is needed; now it can still be repaired.
        """
        for attempt in range(1, TRIES + 1):
            self.save(step, own)
            self.wait()
            assert self.last is not None
            if self.last.error is not None:
                return
            damage = self.damage_of(step, trust=False)
            if damage is None:
                return
            if attempt == TRIES:
                self._finish(replace(self.last, error=f"{damage}, {TRIES} times"))
            else:
                self._warn(f"{damage}; it is written again")

    def wait(self) -> None:
        """Wait until what is under way is done."""
        if self._under_way is not None:
            future, self._under_way = self._under_way, None
            self._finish(future.result())

    def _finish(self, outcome: Outcome) -> None:
        self.last = outcome
        for note in self.notes:
            self._warn(note)
        self.notes.clear()
        self.on_done(outcome)

    def _warn(self, warning: str) -> None:
        if self.world.rank == 0:
            self.world.tell({"warning": warning})

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
            self._retain(step)
        seconds = time.perf_counter() - start
        size = sum(file.size for file in written.values()) if error is None else 0
        return Outcome(step, seconds, seconds if held_up_s is None else held_up_s, size, error)

    def _retain(self, newest: int) -> None:
        """Remove old ones when as many newer ones as should stay were read back. A collective.

        Checkpoints of later steps are from before a resume that passed them over: they do not
        count.
        """
        steps = self._gather(sorted(files.steps_in(self.run)))[0]
        going = files.to_remove(
            [step for step in steps if step <= newest],
            self.settings.keep_last, self.settings.keep_every, self._is_whole,
        )  # fmt: skip
        if self.world.rank:
            return
        for step in going:
            path = files.path_of(self.run, step)
            try:
                shutil.rmtree(files.set_aside(path), ignore_errors=True)
            except OSError as error:
                self.notes.append(f"cannot remove {path}: {error.strerror}")

    def _is_whole(self, step: int) -> bool:
        damage = self.damage_of(step)
        if damage is not None and self.world.rank == 0:
            self.notes.append(f"{damage}; it does not count among checkpoint.keep_last")
        return damage is None

    def damage_of(self, step: int, trust: bool = True) -> str | None:
        """What is wrong with a checkpoint of this run. Each rank reads its share. A collective.

        With ``trust`` a file that was read back before, and has not been changed since, is not read
        again: so each is read once.
        """
        folder, world = files.path_of(self.run, step), self.world
        found: dict[str, File] = {}

        def read() -> dict[str, File]:
            return {} if world.rank else manifests.read(folder).files

        def verify() -> None:
            for file in list(found)[world.rank :: world.size]:
                self._verify(folder, file, found[file], trust)

        try:
            found |= together(self._gather, read)[0]
            together(self._gather, verify)
        except UsageError as damage:
            return str(damage)
        return None

    def _verify(self, folder: Path, name: str, expected: File, trust: bool) -> None:
        path, now = folder / name, time.time()
        seen = _look_of(path)
        if trust and seen is not None and self._read_back.get(path) == seen:
            return
        self._read_back.pop(path, None)
        manifests.verify(folder, {name: expected})
        if seen is not None and now - seen[1] / 1e9 > SETTLED_S:
            self._read_back[path] = seen

    def _gather(self, value: Any) -> list[Any]:
        """Every rank's value, over the group that checkpoints have."""
        values: list[Any] = [None] * self.world.size
        dist.all_gather_object(values, value, group=self._group)
        return values


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


def _look_of(path: Path) -> tuple[int, ...] | None:
    """Size, time and number of a file: they show that it changed without reading it."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns, found.st_ino


def write_manifest(folder: Path, manifest: Manifest) -> None:
    path = folder / NAME
    created = datetime.now(UTC).isoformat(timespec="seconds")
    write_text(path, replace(manifest, created=created).to_json())
    with path.open("rb") as file:
        os.fsync(file.fileno())
