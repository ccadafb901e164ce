"""Faults strike here, inside a rank. Without faults nothing of this is called.

A run with faults says so in its output, in its config and in ``faults.rank<r>.jsonl`` of its
folder. Because of that file a fault strikes once: a killed run that is restarted, or resumed in its
folder, continues.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from shardlab.errors import unknown
from shardlab.faults.spec import Fault, check_world, parse
from shardlab.files import append_to, read_jsonl
from shardlab.ledger import LEDGER
from shardlab.world import World

if TYPE_CHECKING:
    from torch import Tensor

    from shardlab.workloads.base import Batch, LossFn


class Injector:
    """The faults of this rank that have not struck yet."""

    def __init__(self, faults: Sequence[Fault], rank: int, folder: Path | None) -> None:
        self.rank = rank
        self.folder = folder
        self.waiting = [fault for fault in faults if fault.rank == rank]
        self._spoilt: tuple[Fault, int] | None = None
        self._late: dict[Fault, int | None] = {}  # the step in which it was late last

    def _due(self, kinds: Sequence[str], step: int | None, where: str | None = None) -> list[Fault]:
        if step is None:
            return []
        is_later = where == "checkpoint"  # a checkpoint's fault waits for the first after its step
        return [
            fault
            for fault in self.waiting
            if fault.kind in kinds
            and where in (None, fault.where)
            and (fault.step in (None, step) or (is_later and (fault.step or 0) <= step))
        ]

    def _strike(self, fault: Fault, step: int | None) -> None:
        """Say that it happens, and see that it does not happen again, before it happens."""
        print(f"injected fault: {fault.told()}", file=sys.stderr, flush=True)
        if not fault.is_once:
            return
        self.waiting.remove(fault)
        if self.folder is not None:
            row = {"fault": fault.text, "rank": self.rank, "step": step, "time": time.time()}
            path = self.folder / f"faults.rank{self.rank}.jsonl"
            with append_to(path) as file:
                file.write(json.dumps(row) + "\n")
                file.flush()
                os.fsync(file.fileno())

    def at(self, where: str, step: int | None) -> None:
        """A rank is at a place of its step: kill, hang or delay it there if that is due."""
        for fault in self._due(("slow", "hang", "kill"), step, where):
            if fault not in self._late:
                self._strike(fault, step)
            if fault.kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            while fault.kind == "hang":
                time.sleep(3600)
            if self._late.get(fault) != step:  # once a step, not in each micro-batch
                self._late[fault] = step
                time.sleep(fault.ms / 1000)

    def begin_step(self, step: int) -> None:
        """The batches of a step are there, and nothing has been computed yet."""
        self.at("data", step)
        for fault in self._due(("disk-full",), step):
            self._strike(fault, step)
            resource.setrlimit(
                resource.RLIMIT_FSIZE, (fault.bytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
            )

    def drops(self, step: int | None) -> bool:
        """Whether this rank skips the collective that it is about to call."""
        self.at("collective", step)
        due = self._due(("drop-collective",), step)
        for fault in due[:1]:
            self._strike(fault, step)
        return bool(due)

    def spoils(self, step: int | None) -> Fault | None:
        """The fault whose NaN belongs into this forward, also when the forward is repeated."""
        for fault in self._due(("nan",), step):
            assert step is not None
            self._strike(fault, step)
            self._spoilt = (fault, step)
        return self._spoilt[0] if self._spoilt is not None and self._spoilt[1] == step else None

    def drifts(self, model: nn.Module, step: int | None) -> None:
        """Change a weight of this rank's copy, for good, if that is due."""
        for fault in self._due(("drift",), step):
            self._strike(fault, step)
            weight = next(p for p in model.parameters() if p.requires_grad and p.numel())
            with torch.no_grad():
                weight[(0,) * weight.dim()] += 0.01

    def checkpoint_written(self, folder: Path, steps: int) -> None:
        """A checkpoint after ``steps`` steps is complete: damage it if that is due."""
        for fault in list(self.waiting):
            if fault.kind == "corrupt-checkpoint" and (fault.step is None or steps > fault.step):
                self._strike(fault, steps)
                damage(folder, fault.how)


ACTIVE: Injector | None = None  # a rank is a process


def at(where: str, step: int) -> None:
    """A place where faults may strike, if there are any."""
    if ACTIVE is not None:
        ACTIVE.at(where, step)


def fired(folder: Path) -> set[str]:
    """The faults that have struck in a run folder, by any rank."""
    paths = [path for path in folder.glob("faults.rank*.jsonl") if path.is_file()]
    return {str(row.get("fault")) for path in paths for row in read_jsonl(path)}


def arm(texts: Sequence[str], world: World, strategy: str, folder: Path | None = None) -> None:
    """Make this rank's faults ready to strike, and disarm those of an earlier run."""
    global ACTIVE
    ACTIVE, LEDGER.skips = None, None
    if not texts:
        return
    struck = fired(folder) if folder is not None else set()
    waiting = [parse(text) for text in texts if text not in struck]
    # Only these: the rank of one that has struck may be gone, in a smaller world after a restart.
    check_world(waiting, world.size, strategy)
    if folder is not None and world.rank == 0:
        for fault in waiting:
            print(f"FAULT INJECTION IS ON: {fault.told()}", file=sys.stderr, flush=True)
    ACTIVE = Injector(waiting, world.rank, folder)
    LEDGER.skips = lambda: ACTIVE is not None and ACTIVE.drops(LEDGER.step)


def in_forward(loss: LossFn, strategy: str) -> LossFn:
    """The loss function of a run that has faults: they strike in it.

    PyTorch's own strategies call their collectives where we cannot see them; the first one comes
    after backward has begun, so that is where a fault "in a collective" strikes.
    """

    def with_faults(model: nn.Module, batch: Batch) -> Tensor:
        injector, step = ACTIVE, LEDGER.step
        if injector is None:
            return loss(model, batch)
        injector.at("forward", step)
        injector.drifts(model, step)
        fault = injector.spoils(step)
        value = loss(model, batch) if fault is None else _spoilt(loss, model, batch, fault)
        if strategy.startswith("pytorch_") and value.requires_grad:
            value.register_hook(lambda _grad: injector.at("collective", step))
        return value

    return with_faults


def _spoilt(loss: LossFn, model: nn.Module, batch: Batch, fault: Fault) -> Tensor:
    if fault.layer is None:
        return loss(model, batch) * float("nan")
    try:
        layer = model.get_submodule(fault.layer)
    except AttributeError:
        names = [name for name, _ in model.named_modules() if name]
        raise unknown("layer of the model", fault.layer, names) from None
    hook = layer.register_forward_hook(lambda _module, _inputs, out: out * float("nan"))
    try:
        return loss(model, batch)
    finally:
        hook.remove()


def damage(folder: Path, how: str) -> None:
    """Spoil the largest file below a folder: a bit in its middle, its second half, or all of it."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    path = max(files, key=lambda p: (p.stat().st_size, p.name))
    size = path.stat().st_size
    if how == "delete":
        path.unlink()
    elif how == "truncate":
        os.truncate(path, size // 2)
    else:
        with path.open("r+b") as file:
            file.seek(size // 2)
            (byte,) = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1]))
