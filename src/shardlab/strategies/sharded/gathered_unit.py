"""A unit of ZeRO-3: some parameters that are sharded, gathering or whole, and change together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardlab import comm
from shardlab.strategies.flat import Unit
from shardlab.strategies.sharded.placeholder_params import (
    become_parameters,
    become_placeholders,
    can_be_placeholder,
)

LOOKS = 4  # times that a unit is compared with what was gathered, before it is freed
SHARDED, GATHERING, WHOLE = "sharded", "gathering", "whole"


class Part(NamedTuple):
    """Parameters of one module alone, of one dtype, which all train or are all frozen."""

    label: str
    module: nn.Module
    params: dict[str, nn.Parameter]
    is_root: bool


class GatheredUnit(Unit):
    """Its parameters are views of ``full``, whose storage is empty while the unit is sharded.

    ``gathers``, ``wait`` and ``free`` alone change its state. Memory that a collective works
    on is neither freed nor used again before that collective has been waited for.
    """

    def __init__(self, part: Part, group: comm.Group, dtype: torch.dtype | None) -> None:
        """``dtype``: what parameters and gradients travel in; None: their own type."""
        super().__init__(part.label, part.params, group, grad_dtype=dtype)
        self.module = part.module
        self.stays = part.is_root  # whole from its first use to the end of the micro-batch
        self.strays = False  # it is read outside of its module: it stays until forward's end
        self.is_written = False  # its parameters are changed by forward itself
        self.looks_left = LOOKS if all(map(can_be_placeholder, part.params.values())) else 0
        self.trained = sum(p.requires_grad for p in part.params.values())
        self.state = SHARDED
        self.gather: comm.Pending | None = None
        self.for_others: list[comm.Pending] = []  # gathers that this rank has no use for
        self.arrived: list[tuple[str, nn.Parameter]] = []  # gradients that were not moved yet
        self.seen: set[str] = set()  # parameters that got a gradient since the last scatter
        self.begin()
        with torch.no_grad():
            flat = self.flatten(part.params)  # (padded,)
            self.shard = self.layout.of_rank(flat, group.rank()).clone()
            is_real = flat.is_floating_point()
            self.full = flat.to(dtype if dtype is not None and is_real else flat.dtype)
        self.mine = self.layout.of_rank(self.full, group.rank())  # (shard,), when it is whole
        self.storage = self.full.untyped_storage()
        self.bytes = self.storage.nbytes()
        self.views = self.split(self.full)
        for name, p in self.params.items():
            p.data = self.views[name]
        self.state = WHOLE
        self.versions = [p._version for p in self.params.values()]
        self.free()

    def watch(self, accessed: Callable[[Any], None]) -> None:
        """``accessed`` is called when a parameter is read while its content is away."""
        for p in self.params.values():
            p.ask = accessed  # type: ignore[attr-defined]

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

    def move_arrived(self) -> set[str]:
        """Move gradients from backward's own tensors, which are freed, into the unit's buffer.
        Returns whose. Re-entrant checkpointing gives one in parts, which are added up."""
        names = {name for name, _ in self.arrived}
        for name, parameter in self.arrived:
            if parameter.grad is None:  # it came twice, and was moved with the first
                continue
            if self.full_grad is not None and name not in self.missing:
                self.layout.view(self.full_grad, name).add_(parameter.grad)
            else:
                self.grad_view(name).copy_(parameter.grad)
            parameter.grad = None
        self.arrived.clear()
        return names

    def room(self) -> tuple[Tensor, Tensor]:
        """Where to gather to, (padded,), and this rank's part, (shard,). If the parameters are
        here already, other ranks still need them: then it is a buffer that no code reads."""
        if self.state is SHARDED:
            self.storage.resize_(self.bytes)
            into = self.full
        else:
            self.wait()
            self._keep_changes()
            into = torch.empty_like(self.full)
        return into, self.shard.to(into.dtype)

    def gathers(self, into: Tensor, pending: comm.Pending) -> None:
        """The parameters are on their way into ``room()``."""
        if into is self.full:
            self.gather, self.state = pending, GATHERING
        else:
            self.for_others.append(pending)

    def wait(self) -> None:
        """Until the parameters are here, if they are on their way."""
        if self.state is GATHERING:
            assert self.gather is not None
            self.gather.wait()
            self.gather = None
            self.state = WHOLE
            become_parameters(self.params.values())
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
            become_placeholders(self.params.values())
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


def units_of(model: nn.Module, blocks: Sequence[str]) -> list[Part]:
    """What ZeRO-3 shards together: the parameters outside of blocks, then those of each block.

    A block inside a block is a unit of its own. A parameter that several of them use (a tied one)
    is the root's. Flat buffers have one dtype, so a block of two is two units. So is a block of
    which a part is frozen (LoRA): only what trains is scattered, and ranks share it evenly.
    """
    modules: dict[nn.Module, str] = {model: ""}
    for block in blocks:
        modules.setdefault(model.get_submodule(block), block)
    owners: dict[nn.Parameter, set[str]] = {}
    for module, label in modules.items():
        for p in _own_parameters(module, modules):
            owners.setdefault(p, set()).add(label)
    units: dict[str, dict[tuple[torch.dtype, bool], dict[str, nn.Parameter]]] = {}
    for name, p in model.named_parameters():
        label = next(iter(owners[p])) if len(owners[p]) == 1 else ""
        units.setdefault(label, {}).setdefault((p.dtype, p.requires_grad), {})[name] = p
    parts = []
    for module, label in modules.items():
        kinds = units.get(label, {})
        for i, ((dtype, trains), params) in enumerate(kinds.items()):
            what = f"{str(dtype).removeprefix('torch.')}, {'trained' if trains else 'frozen'}"
            shown = f"{label or 'root'} ({what})" if i else label
            parts.append(Part(shown, module, params, not label))
    return parts


def _own_parameters(module: nn.Module, others: Mapping[nn.Module, str]) -> Iterator[nn.Parameter]:
    """The module's parameters, without those inside of the other modules."""
    yield from module.parameters(recurse=False)
    for child in module.children():
        if child not in others:
            yield from _own_parameters(child, others)
