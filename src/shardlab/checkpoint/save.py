"""Writing checkpoints while a run goes on: all ranks together, whole or not at all."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from shardlab.checkpoint import files, parts, planning, storage
from shardlab.checkpoint import manifest as manifests
from shardlab.checkpoint.manifest import NAME, OWN, File, Manifest
from shardlab.checkpoint.manifest import Tensor as Entry
from shardlab.checkpoint.parts import Numbers, Part, Parts
from shardlab.config import CheckpointConfig
from shardlab.errors import UsageError
from shardlab.faults import inject
from shardlab.files import write_text
from shardlab.strategies.base import Strategy
from shardlab.world import World

if TYPE_CHECKING:
    from shardlab.guard.guards import Guards


@dataclass(frozen=True)
class About:
    """What a checkpoint says of its run."""

    config: dict[str, Any]
    strategy: str
    samples: int | None  # of the data set


@dataclass(frozen=True)
class Outcome:
    """How a checkpoint went, as the run folder records it."""

    step: int
    seconds: float  # until it had its name
    held_up_s: float  # of these, what the run waited
    bytes: int
    error: str | None = None

    def row(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "seconds": self.seconds,
            "held_up_s": self.held_up_s,
            "bytes": self.bytes,
            "error": self.error,
        }


TRIES = 3  # to write a run's last checkpoint, before it is called failed
SETTLED_S = 0.05  # a file's time is this coarse, or finer: a change within it may not show


class _Thread:
    """A checkpoint being written. A daemon: a rank that crashes does not wait for its peers."""

    def __init__(self, write: Callable[[], Outcome]) -> None:
        self._write = write
        self._outcome: Outcome | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="shardlab-checkpoint", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._outcome = self._write()
        except BaseException as error:
            self._error = error

    def result(self) -> Outcome:
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._outcome is not None
        return self._outcome


class Checkpoints:
    """A run's checkpoints. ``save`` is called by all ranks after the same step.

    Asynchronously, the run waits only while its part of the state is copied; a thread writes it,
    and agrees with the other ranks' over a group of its own. At most one is under way: the next
    waits.

    A checkpoint that cannot be written (a full disk) leaves nothing behind and does not end the
    run: to go on loses nothing, to stop would lose every step since the last one. It is said.
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
        self.notes: list[str] = []  # to be told: what was found damaged
        self._read_back: dict[Path, tuple[int, ...]] = {}  # size, time and number of whole files
        self._group = world.group
        self._under_way: _Thread | None = None
        if settings.asynchronous:
            # Collectives pair by order, so those of a thread need a group that nobody else uses.
            ranks = dist.get_process_group_ranks(world.group)
            self._group = dist.new_group(ranks, backend="gloo")

    def save(self, step: int, own: Mapping[str, Tensor]) -> None:
        """After ``step`` steps, with what is this rank's alone. A collective."""
        start = time.perf_counter()
        self.wait()
        if self.guards is not None:
            self.guards.before_checkpoint()
        held, numbers, update = parts.held_by(self.strategy)
        if self.guards is not None:
            self.guards.check_saved(held, numbers, step - 1)
        held |= {
            f"{OWN}{self.world.rank}/{name}": Part(tensor.shape, 0, tensor.reshape(-1))
            for name, tensor in own.items()
        }
        if not self.settings.asynchronous:
            self._finish(self._write(step, held, numbers, update, start, None))
            return
        held = self._copied_share(held)
        held_up = time.perf_counter() - start
        write = partial(self._write, step, held, numbers, update, start, held_up)
        self._under_way = _Thread(write)

    def save_last(self, step: int, own: Mapping[str, Tensor]) -> None:
        """The checkpoint that a finished run leaves: read back, and written again if damaged.

        Nobody would notice before the day when it is needed, and until now it can be made again.
        """
        for attempt in range(1, TRIES + 1):
            self.save(step, own)
            self.wait()
            assert self.last is not None
            if self.last.error is not None:
                return
            damage = self.damage_of(files.name_of(step), trust=False)
            if damage is None:
                return
            if attempt == TRIES:
                self._finish(replace(self.last, error=f"{damage}, {TRIES} times"))
            else:
                self._tell(f"{damage}; it is written again")

    def wait(self) -> None:
        """Until what is under way is done."""
        if self._under_way is not None:
            thread, self._under_way = self._under_way, None
            self._finish(thread.result())

    def _finish(self, outcome: Outcome) -> None:
        self.last = outcome
        for note in self.notes:
            self._tell(note)
        self.notes.clear()
        self.on_done(outcome)

    def _tell(self, warning: str) -> None:
        if self.world.rank == 0:
            self.world.tell({"warning": warning})

    def _copied_share(self, held: Parts) -> Parts:
        """Copies on the host of what this rank will write: of a replica, one n-th."""
        spans = {n: (p.start, p.start + len(p.values)) for n, p in held.items()}
        share: dict[str, tuple[int, int]] = {}
        for name, start, end in parts.share_out(self.world.gather(spans))[self.world.rank]:
            low, high = share.get(name, (start, end))
            share[name] = min(low, start), max(high, end)
        copies = {name: part for name, part in held.items() if not len(part.values)}
        for name, (low, high) in share.items():
            part = held[name]
            values = part.values[low - part.start : high - part.start]
            copies[name] = Part(part.shape, low, values.to("cpu", copy=True))
        return copies

    def _write(
        self,
        step: int,
        held: Parts,
        numbers: Numbers,
        update: Mapping[str, Any],
        start: float,
        held_up: float | None,
    ) -> Outcome:
        part, final = files.part_of(self.run, step), self.run / files.FOLDER / files.name_of(step)
        size = 0

        def commit(tensors: dict[str, Entry], numbers: Numbers, written: dict[str, File]) -> None:
            nonlocal size
            manifest = Manifest(
                step=step,
                strategy=self.about.strategy,
                world=self.world.size,
                config=self.about.config,
                samples=self.about.samples,
                update=dict(update),
                numbers=numbers,
                tensors=tensors,
                files=written,
                created=datetime.now(UTC).isoformat(timespec="seconds"),
                tied=parts.tied_names(self.strategy),
                unsaved=parts.unsaved_names(self.strategy),
            )
            write_manifest(part, manifest)
            if inject.ACTIVE is not None:
                inject.ACTIVE.at("checkpoint", step - 1)
            files.put_in_place(part, final)
            size = manifest.bytes

        if inject.ACTIVE is not None and self.world.rank:  # rank 0's turn is when it gives the name
            inject.ACTIVE.at("checkpoint", step - 1)
        error = None
        try:
            dcp.save(
                held,
                storage_writer=storage.Writer(part, commit),
                planner=planning.Saving(numbers),
                process_group=self._group,
            )
            self._retain(step)
        except dcp.CheckpointException as failed:
            reason = cause(failed)
            if isinstance(reason, UsageError):
                raise reason from None
            if not isinstance(reason, OSError):
                raise RuntimeError(f"the checkpoint of step {step} failed: {reason!r}") from failed
            error = f"{reason.strerror or reason}: {reason.filename or part}"
            if self.world.rank == 0:
                shutil.rmtree(part, ignore_errors=True)
        seconds = time.perf_counter() - start
        return Outcome(step, seconds, seconds if held_up is None else held_up, size, error)

    def _retain(self, newest: int) -> None:
        """Remove old ones when as many newer ones as should stay were read back. A collective.

        Later ones are of before a resume that passed them over: they do not count.
        """
        steps = self._gather(sorted(files.steps_in(self.run)))[0]
        going = files.to_remove(
            [step for step in steps if step <= newest],
            self.settings.keep_last, self.settings.keep_every, self._is_whole,
        )  # fmt: skip
        if self.world.rank:
            return
        for step in going:
            # Under another name first: half removed, it must not be taken for a checkpoint.
            path = self.run / files.FOLDER / files.name_of(step)
            old = path.with_name(f".{path.name}.old")
            try:
                path.rename(old)
            except OSError as error:
                self.notes.append(f"cannot remove {path}: {error.strerror}")
            shutil.rmtree(old, ignore_errors=True)

    def _is_whole(self, step: int) -> bool:
        damage = self.damage_of(files.name_of(step))
        if damage is not None and self.world.rank == 0:
            self.notes.append(f"{damage}; it does not count among checkpoint.keep_last")
        return damage is None

    def damage_of(self, name: str, trust: bool = True) -> str | None:
        """What is wrong with a checkpoint of this run. Each rank reads its share. A collective.

        With ``trust`` a file that was read back before, and has not been changed since, is not read
        again: so each is read once.
        """
        folder = self.run / files.FOLDER / name
        found: Any = None
        if self.world.rank == 0:
            try:
                found = manifests.read(folder).files
            except UsageError as error:
                found = str(error)
        found = self._gather(found)[0]
        if isinstance(found, str):
            return found
        damage = None
        try:
            for file in list(found)[self.world.rank :: self.world.size]:
                self._verify(folder, file, found[file], trust)
        except manifests.Damaged as error:
            damage = str(error)
        return next((said for said in self._gather(damage) if said is not None), None)

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
        """Every rank's, over the group that checkpoints have."""
        values: list[Any] = [None] * self.world.size
        dist.all_gather_object(values, value, group=self._group)
        return values


def _look_of(path: Path) -> tuple[int, ...] | None:
    """By what a change of a file is noticed without reading it."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns, found.st_ino


def write_manifest(folder: Path, manifest: Manifest) -> None:
    path = folder / NAME
    write_text(path, manifest.to_json())
    with path.open("rb") as file:
        os.fsync(file.fileno())


def cause(failed: dcp.CheckpointException) -> BaseException:
    """The first rank's failure: DCP tells them all, each with its traceback."""
    return failed.failures[min(failed.failures)][0]
