"""A strategy's state as parts of named tensors, and back: the one form that all of them share.

A part is a run of the elements of a flattened tensor. ZeRO's flat shards are such runs, FSDP2's
rows are, a replica's whole tensors are. So a checkpoint of any strategy at any world size is read
by any other: each rank reads the runs that it will hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardlab.checkpoint.manifest import MODEL, OPTIMIZER, Manifest
from shardlab.errors import UsageError
from shardlab.strategies import steps
from shardlab.strategies.base import Strategy
from shardlab.strategies.slots import Slot
from shardlab.workloads import huggingface


@dataclass(frozen=True)
class Part:
    """This rank's part of a tensor, to be written or to be filled."""

    shape: torch.Size  # of the whole
    start: int  # in the flattened whole
    values: Tensor  # (length,)


class Span(NamedTuple):
    """Some elements of a tensor."""

    name: str
    start: int
    end: int


Parts = dict[str, Part]
Numbers = dict[str, float]


def share_out(held: Sequence[Mapping[str, tuple[int, int]]]) -> list[list[Span]]:
    """Who writes what: each element goes to exactly one of the ranks that hold it.

    ``held`` is, of each rank, the start and end of its part of each tensor. What several ranks hold
    alike is laid end to end and cut evenly: n replicas write one n-th each, not n copies.
    """
    alike: dict[tuple[int, ...], list[Span]] = {}
    for name in dict.fromkeys(name for of_rank in held for name in of_rank):
        spans = [(rank, *of_rank[name]) for rank, of_rank in enumerate(held) if name in of_rank]
        edges = sorted({edge for _, start, end in spans for edge in (start, end)})
        for low, high in pairwise(edges):
            holders = tuple(rank for rank, start, end in spans if start <= low and high <= end)
            if holders:
                alike.setdefault(holders, []).append(Span(name, low, high))
    shares: list[list[Span]] = [[] for _ in held]
    for holders, runs in alike.items():
        total = sum(run.end - run.start for run in runs)
        share = -(-total // len(holders))
        position = 0
        for name, low, high in runs:
            while low < high:
                place = position // share
                end = min(high, low + (place + 1) * share - position)
                shares[holders[place]].append(Span(name, low, end))
                position += end - low
                low = end
    return shares


# ------------------------------------------------------------------ out of a strategy


def held_by(strategy: Strategy) -> tuple[Parts, Numbers, dict[str, Any]]:
    """This rank's parts of tensors, the optimizer's numbers and the update's. A collective."""
    slots = strategy.slots()
    steps.broadcast_buffers(strategy.model, strategy.group)  # rank 0's are right
    parts = {MODEL + slot.name: _part(slot, slot.tensor) for slot in slots.model}
    numbers: Numbers = {}
    for parameter, slot in slots.trained.items():
        for key, value in slots.optimizer.state.get(parameter, {}).items():
            name = f"{OPTIMIZER}{slot.name}/{key}"
            if value is None:
                continue
            if _is_number(key, value, len(slot.shape)):
                numbers[name] = _number(name, value)
            elif value.shape == parameter.shape:
                parts[name] = _part(slot, value)
            else:  # a factor of it, say: each rank that has the parameter whole has that whole
                _refuse_cut(slot, parameter, name)
                parts[name] = Part(value.shape, 0, _flat(value))
    return parts, numbers, strategy.update.state_dict()


def _part(slot: Slot, tensor: Tensor) -> Part:
    return Part(slot.shape, slot.start, _flat(tensor))


def _flat(tensor: Tensor) -> Tensor:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach().reshape(-1)


def _is_number(key: str, value: Any, dimensions: int) -> bool:
    """Adam's count of steps is one, ASGD's eta; the state of a parameter without dimensions is
    not, though it has none either."""
    return not isinstance(value, Tensor) or key == "step" or (value.dim() == 0 and dimensions > 0)


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise UsageError(
            f"a checkpoint cannot hold '{name}', which is a {type(value).__name__}: the optimizer "
            "must keep tensors and numbers"
        ) from None


def _refuse_cut(slot: Slot, parameter: Tensor, name: str) -> None:
    if parameter.numel() != slot.shape.numel() or isinstance(parameter, DTensor):
        raise UsageError(
            f"a checkpoint cannot hold '{name}': it has not the shape of its parameter, of which "
            "this rank has a part; use a strategy that does not shard"
        )


# ------------------------------------------------------------------ into a strategy


class Places:
    """Where a checkpoint goes in a strategy: ``parts`` are to be filled, then ``settle`` it."""

    def __init__(self, strategy: Strategy, manifest: Manifest) -> None:
        self.strategy = strategy
        self.parts: Parts = {}
        # Name, to, from: where the elements do not lie one after the other.
        self._copies: list[tuple[str, Tensor, Tensor]] = []
        slots = strategy.slots()
        known = manifest.optimizer_keys()
        for slot in slots.model:
            if MODEL + slot.name in manifest.tensors:
                self._add(MODEL + slot.name, slot, slot.tensor)
        slots.optimizer.state.clear()
        for parameter, slot in slots.trained.items():
            for key, number in known.get(slot.name, {}).items():
                state = slots.optimizer.state[parameter]
                name = f"{OPTIMIZER}{slot.name}/{key}"
                if number is not None:
                    state[key] = torch.tensor(number, dtype=torch.float32)
                elif manifest.tensors[name].shape == tuple(slot.shape):
                    state[key] = torch.empty_like(parameter, requires_grad=False)
                    self._add(name, slot, state[key])
                else:
                    _refuse_cut(slot, parameter, name)
                    shape = torch.Size(manifest.tensors[name].shape)
                    state[key] = parameter.detach().new_empty(shape)
                    self._add(name, Slot(slot.name, shape, 0, state[key]), state[key])

    def _add(self, name: str, slot: Slot, tensor: Tensor) -> None:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        local = local.detach()
        flat = local.reshape(-1)
        if flat.numel() and not local.is_contiguous():
            flat = torch.empty_like(flat, memory_format=torch.contiguous_format)
            self._copies.append((name.removeprefix(MODEL), local, flat))
        self.parts[name] = Part(slot.shape, slot.start, flat)

    def settle(self, update: dict[str, Any]) -> None:
        """The parts have been filled."""
        with torch.no_grad():
            for name, place, flat in self._copies:
                _spread(name, place, flat.view(place.shape))
        self.strategy.update.load_state_dict(update)


def _spread(name: str, place: Tensor, values: Tensor) -> None:
    """Copy into a tensor of any layout. Of an expanded one, each element that is there once."""
    thin_place, thin = place, values
    for dim, (size, stride) in enumerate(zip(place.shape, place.stride(), strict=True)):
        if size > 1 and stride == 0:
            thin_place, thin = thin_place.narrow(dim, 0, 1), thin.narrow(dim, 0, 1)
    if huggingface.raw(thin.expand(values.shape)) != huggingface.raw(values):
        raise UsageError(
            f"'{name}' is an expanded tensor here, with one value for many elements, and the "
            "checkpoint has different values for them"
        )
    thin_place.copy_(thin)


def expected_model(strategy: Strategy) -> dict[str, tuple[tuple[int, ...], str]]:
    """The model's tensors: shapes of the wholes, which a shard's parameter has too, and kinds."""
    tensors = (*strategy.model.named_parameters(), *strategy.model.named_buffers())
    return {name: (tuple(t.shape), kind_of(t.dtype)) for name, t in tensors}


def kind_of(dtype: torch.dtype) -> str:
    """Within a kind values are rounded when they are copied; between kinds something is lost."""
    if dtype == torch.bool:
        return "bool"
    if dtype.is_complex:
        return "complex"
    return "floating point" if dtype.is_floating_point else "whole numbers"


def tied_names(strategy: Strategy) -> dict[str, str]:
    """The other names of the model's tensors, each with the first: ``head.weight: wte.weight``."""
    model = strategy.model
    named = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    first: dict[int, str] = {}
    for name, tensor in named:
        first.setdefault(id(tensor), name)
    return {name: first[id(t)] for name, t in named if first[id(t)] != name}


def unsaved_names(strategy: Strategy) -> tuple[str, ...]:
    """Buffers that are no part of the model's state_dict, by their first names."""
    model = strategy.model
    found = {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules(remove_duplicate=False)
        for name in module._non_persistent_buffers_set
    }
    return tuple(name for name, _ in model.named_buffers() if name in found)
