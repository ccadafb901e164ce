"""A unit of ZeRO-3: some parameters that are sharded, gathering or whole, and change together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardlab import comm
from shardlab.strategies import watched
from shardlab.strategies.unit import Unit

LOOKS = 4  # times that a unit is compared with what was gathered, before it is freed
SHARDED, GATHERING, WHOLE = "sharded", "gathering", "whole"


class Block(Unit):
    """Its parameters are views of ``full``, whose storage is empty while the unit is sharded.

    ``start_gather``, ``wait`` and ``free`` alone change its state. Memory that a collective works
    on is neither freed nor used again before that collective has been waited for.
    """

    def __init__(
        self,
        label: str,
        module: nn.Module,
        params: Mapping[str, nn.Parameter],
        is_root: bool,
        group: comm.Group,
        dtype: torch.dtype | None,
        on_access: Callable[[Block, Any], None],
    ) -> None:
        super().__init__(label, params, group)
        self.module = module
        self.stays = is_root  # whole from its first use to the end of the micro-batch
        self.strays = False  # it is read outside of its module: it stays until forward's end
        self.is_written = False  # its parameters are changed by forward itself
        self.looks_left = LOOKS if all(map(watched.can_be_watched, params.values())) else 0
        self.trained = sum(p.requires_grad for p in params.values())
        self.state = SHARDED
        self.gather: comm.Pending | None = None
        self.for_others: list[comm.Pending] = []  # gathers that this rank has no use for
        self.arrived: list[tuple[str, nn.Parameter]] = []  # gradients that were not moved yet
        self.seen: set[str] = set()  # parameters that got a gradient since the last scatter
        self.begin()
        with torch.no_grad():
            flat = self.flatten(params)  # (padded,)
            self.shard = self.layout.of_rank(flat, group.rank()).clone()
            is_real = flat.is_floating_point()
            self.whole = flat.to(dtype if dtype is not None and is_real else flat.dtype)
        self.full = self.whole
        self.mine = self.layout.of_rank(self.whole, group.rank())  # (shard,), when it is whole
        self.storage = self.whole.untyped_storage()
        self.bytes = self.storage.nbytes()
        self.views = self.split(self.whole)
        for name, p in self.params.items():
            p.data = self.views[name]
            p.ask = partial(on_access, self)  # type: ignore[attr-defined]
        self.state = WHOLE
        self.versions = [p._version for p in self.params.values()]
        self.free()

    def begin(self) -> None:
        """A micro-batch begins."""
        self.depth = 0  # calls of its module that have not returned
        self.open_calls = 0  # calls of which an input has no gradient yet
        self.untouched_calls = 0  # calls of which no input has one
        self.is_recomputed = False  # by activation checkpointing, in this backward
        self.arrived.clear()
        self.seen.clear()

    @property
    def is_complete(self) -> bool:
        return self.trained > 0 and len(self.seen) == self.trained

    @property
    def has_gradients(self) -> bool:
        return bool(self.arrived) or self.full_grad is not None

    def start_gather(self, group: comm.Group) -> None:
        """Start to put the parameters together. If they are here, other ranks need them still."""
        label = f"params {self.label or 'root'}"
        if self.state is not SHARDED:
            self.wait()
            self._keep_changes()
            scratch = torch.empty_like(self.whole)
            shard = self.shard.to(scratch.dtype)
            self.for_others.append(
                comm.all_gather(scratch, shard, group, label=label, async_op=True)
            )
            return
        self.storage.resize_(self.bytes)
        shard = self.shard.to(self.whole.dtype)
        self.gather = comm.all_gather(self.whole, shard, group, label=label, async_op=True)
        self.state = GATHERING

    def wait(self) -> None:
        """Until the parameters are here, if they are on their way."""
        if self.state is GATHERING:
            assert self.gather is not None
            self.gather.wait()
            self.gather = None
            self.state = WHOLE
            watched.come_back(self.params.values())
            self.versions = [p._version for p in self.params.values()]

    def free(self) -> None:
        """Shrink the storage of the whole parameters to nothing."""
        self.wait()
        for pending in self.for_others:
            pending.wait()
        self.for_others.clear()
        if self.state is WHOLE:
            self._keep_changes()
            self.storage.resize_(0)
            watched.leave(self.params.values())
            self.state = SHARDED

    @torch.no_grad()
    def _keep_changes(self) -> None:
        """A forward may change its parameters (a teacher that follows its student): this rank's
        part of the change must not be lost with the whole."""
        for (name, p), version in zip(self.params.items(), self.versions, strict=True):
            if p.untyped_storage()._cdata != self.storage._cdata:  # p.data = something new
                self.views[name].copy_(p.data)
                p.data = self.views[name]
            elif p._version == version and not self.is_written:
                continue
            self.is_written = True
        if self.looks_left and not self.is_written:  # p.data.mul_() leaves no other trace
            self.looks_left -= 1
            self.is_written = not torch.equal(self.mine, self.shard.to(self.mine.dtype))
        if self.is_written:
            self.shard.copy_(self.mine)


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in what a module was called with or has returned, however they are wrapped."""
    found: list[Tensor] = []
    _collect(value, found, depth=0)
    return found


def _collect(value: Any, found: list[Tensor], depth: int) -> None:
    if isinstance(value, Tensor):
        # Inside vmap a tensor stands for a batch of them: it has no storage and takes no hooks.
        if not torch._C._functorch.is_functorch_wrapped_tensor(value):
            found.append(value)
    elif depth > 8:
        return
    elif isinstance(value, Mapping):
        for part in value.values():
            _collect(part, found, depth + 1)
    elif isinstance(value, list | tuple | set):
        for part in value:
            _collect(part, found, depth + 1)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            _collect(getattr(value, field.name, None), found, depth + 1)
