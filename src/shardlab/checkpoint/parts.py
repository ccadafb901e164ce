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
from shardlab.strategies import base
from shardlab.strategies.base import Strategy
from shardlab.strategies.slots import Slot, Slots


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
    """What this rank holds: parts of tensors, the optimizer's numbers, the update's. A collective.

    A strategy without ``slots()`` gathers its whole state on every rank, by the contract.
    """
    slots = slots_of(strategy)
    if slots is None:
        return _of_state(strategy.state_dict())
    model: Any = strategy.model  # type: ignore[attr-defined]
    base.broadcast_buffers(model, strategy.group)  # type: ignore[attr-defined] # rank 0's are right
    parts = {MODEL + slot.name: _part(slot, slot.tensor) for slot in slots.model}
    numbers: Numbers = {}
    for parameter, slot in slots.trained.items():
        for key, value in slots.optimizer.state.get(parameter, {}).items():
            name = f"{OPTIMIZER}{slot.name}/{key}"
            if value is None:
                continue
            if _is_number(key, value, len(slot.shape)):
                numbers[name] = float(value)
            else:
                parts[name] = _part(slot, value)
    return parts, numbers, strategy.update.state_dict()  # type: ignore[attr-defined]


def slots_of(strategy: Strategy) -> Slots | None:
    give = getattr(strategy, "slots", None)
    return give() if callable(give) else None


def _part(slot: Slot, tensor: Tensor) -> Part:
    return Part(slot.shape, slot.start, _flat(tensor))


def _flat(tensor: Tensor) -> Tensor:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach().reshape(-1)


def _is_number(key: str, value: Any, dimensions: int) -> bool:
    """Adam's count of steps is one, ASGD's eta; the state of a parameter without dimensions is
    not, though it has none either."""
    return not isinstance(value, Tensor) or key == "step" or (value.dim() == 0 and dimensions > 0)


def _of_state(state: dict[str, Any]) -> tuple[Parts, Numbers, dict[str, Any]]:
    try:
        model, optimizer, update = state["model"], state["optimizer"], state["update"]
    except (KeyError, TypeError):
        raise UsageError(
            "the strategy's state_dict() has no 'model', 'optimizer' and 'update'; give it those, "
            "or slots(): see docs/checkpoints.md"
        ) from None
    parts = {MODEL + name: Part(t.shape, 0, _flat(t)) for name, t in model.items()}
    numbers: Numbers = {}
    for parameter, of_parameter in optimizer.items():
        whole = model[parameter]
        for key, value in of_parameter.items():
            name = f"{OPTIMIZER}{parameter}/{key}"
            if value is None:
                continue
            if _is_number(key, value, whole.dim()):
                numbers[name] = float(value)
            else:
                parts[name] = Part(whole.shape, 0, _flat(value))
    return parts, numbers, update


# ------------------------------------------------------------------ into a strategy


class Places:
    """Where a checkpoint goes in a strategy: ``parts`` are to be filled, then ``settle`` it."""

    def __init__(self, strategy: Strategy, manifest: Manifest) -> None:
        self.strategy = strategy
        self.parts: Parts = {}
        self._copies: list[tuple[Tensor, Tensor]] = []  # to, from: where no flat view was possible
        self._state: dict[str, Any] | None = None
        slots = slots_of(strategy)
        known = manifest.optimizer_keys()
        if slots is None:
            self._make_state(manifest, known)
            return
        for slot in slots.model:
            self._add(MODEL + slot.name, slot, slot.tensor)
        slots.optimizer.state.clear()
        for parameter, slot in slots.trained.items():
            for key, number in known.get(slot.name, {}).items():
                state = slots.optimizer.state[parameter]
                if number is not None:
                    state[key] = torch.tensor(number, dtype=torch.float32)
                else:
                    state[key] = torch.empty_like(parameter, requires_grad=False)
                    self._add(f"{OPTIMIZER}{slot.name}/{key}", slot, state[key])

    def _add(self, name: str, slot: Slot, tensor: Tensor) -> None:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        local = local.detach()
        flat = local.reshape(-1)
        if flat.numel() and flat.data_ptr() != local.data_ptr():  # not contiguous: it is a copy
            self._copies.append((local, flat))
        self.parts[name] = Part(slot.shape, slot.start, flat)

    def _make_state(self, manifest: Manifest, known: dict[str, dict[str, float | None]]) -> None:
        """For a strategy that takes its state whole."""
        model = {
            n: torch.empty(t.shape, dtype=_dtype(t.dtype)) for n, t in manifest.model().items()
        }
        optimizer: dict[str, dict[str, Tensor]] = {}
        for parameter, keys in known.items():
            for key, number in keys.items():
                if number is not None:
                    value = torch.tensor(number, dtype=torch.float32)
                else:
                    name = f"{OPTIMIZER}{parameter}/{key}"
                    tensor = manifest.tensors[name]
                    value = torch.empty(tensor.shape, dtype=_dtype(tensor.dtype))
                    self.parts[name] = Part(value.shape, 0, value.view(-1))
                optimizer.setdefault(parameter, {})[key] = value
        for name, value in model.items():
            self.parts[MODEL + name] = Part(value.shape, 0, value.view(-1))
        self._state = {"model": model, "optimizer": optimizer}

    def settle(self, update: dict[str, Any]) -> None:
        """The parts have been filled."""
        with torch.no_grad():
            for place, flat in self._copies:
                place.copy_(flat.view(place.shape))
        if self._state is not None:
            self.strategy.load_state_dict({**self._state, "update": update})
        else:
            self.strategy.update.load_state_dict(update)  # type: ignore[attr-defined]


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def expected_model(strategy: Strategy) -> dict[str, tuple[int, ...]]:
    """The model's tensors, with the shapes of the wholes: a shard's parameter has that too."""
    model = getattr(strategy, "model", None)
    if slots_of(strategy) is None or model is None:
        return {name: tuple(t.shape) for name, t in strategy.full_params().items()}
    tensors = (*model.named_parameters(), *model.named_buffers())
    return {name: tuple(t.shape) for name, t in tensors}
