"""A strategy's state as parts of named tensors, and back: the one form that all of them share.

A part is a run of the elements of a flattened tensor, or several. ZeRO's flat shards are such runs,
FSDP2's rows are, a replica's whole tensors are. So a checkpoint of any strategy at any world size
is read by any other: each rank reads the runs that it will hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardlab import comm
from shardlab.checkpoint.manifest import MODEL, OPTIMIZER, SHARED, Chunk, Manifest
from shardlab.checkpoint.manifest import Tensor as Entry
from shardlab.errors import UsageError
from shardlab.strategies import layout
from shardlab.strategies.base import Strategy
from shardlab.strategies.slots import Slot
from shardlab.workloads import huggingface
from shardlab.world import World


@dataclass(frozen=True)
class Part:
    """This rank's part of a tensor, to be written or to be filled."""

    shape: torch.Size  # of the whole
    start: int  # in the flattened whole
    values: Tensor  # (length,)
    # Where the elements lie, if not one after the other. Such a part can be filled, not written:
    # see ``as_runs``.
    runs: layout.Runs | None = None

    @property
    def end(self) -> int:
        return self.start + len(self.values)

    @property
    def where(self) -> str:
        """Which elements these are: the same words for the same elements."""
        places = ((self.start, len(self.values)),) if self.runs is None else self.runs
        return f"{len(self.values)} from {self.start} ({hash(places)})"

    def between(self, start: int, end: int) -> Tensor:
        """Some of its elements, by their places in the flattened whole: (end - start,)."""
        return self.values[start - self.start : end - self.start]


class Span(NamedTuple):
    """Some elements of a tensor."""

    name: str
    start: int
    end: int


class Offer(NamedTuple):
    """What a rank could write of a tensor."""

    start: int
    end: int
    shape: tuple[int, ...]  # of the whole
    dtype: Any  # its name, as in a manifest


Parts = dict[str, Part]
Numbers = dict[str, float]


# ------------------------------------------------------------------ who writes what


def offers_of(held: Parts) -> dict[str, Offer]:
    return {
        name: Offer(p.start, p.end, tuple(p.shape), str(p.values.dtype).removeprefix("torch."))
        for name, p in held.items()
    }


def plan(offers: Sequence[Mapping[str, Offer]]) -> tuple[dict[str, Entry], list[list[Span]]]:
    """The checkpoint's tensors, and what each rank writes, given what each rank offers."""
    shares = share_out([{name: offer[:2] for name, offer in rank.items()} for rank in offers])
    tensors: dict[str, Entry] = {}
    for rank, (held, share) in enumerate(zip(offers, shares, strict=True)):
        for name, offer in held.items():
            tensors.setdefault(name, Entry(offer.shape, offer.dtype, ()))
        for name, start, end in share:
            chunks = (*tensors[name].chunks, Chunk(start, end - start, file_of(rank)))
            tensors[name] = replace(tensors[name], chunks=chunks)
    for name, tensor in tensors.items():
        if sum(chunk.length for chunk in tensor.chunks) != tensor.size:
            raise RuntimeError(f"no rank holds all of '{name}': the strategy's slots() are wrong")
    return tensors, shares


def file_of(rank: int) -> str:
    return f"rank{rank}.safetensors"


def share_out(held: Sequence[Mapping[str, tuple[int, int]]]) -> list[list[Span]]:
    """Each element goes to exactly one of the ranks that hold it.

    ``held`` has, for each rank, start and end of its part of each tensor. What several ranks hold
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
    slots = strategy.saved()
    parts = {MODEL + s.name: Part(s.shape, s.start, _flat(s.tensor), s.runs) for s in slots.model}
    numbers: Numbers = {}
    for parameter, slot in slots.trained.items():
        for key, value in slots.optimizer.state.get(parameter, {}).items():
            name = f"{OPTIMIZER}{slot.name}/{key}"
            if value is None:
                continue
            if _is_number(key, value, len(slot.shape)):
                numbers[name] = _number(name, value)
            elif value.shape == parameter.shape:
                parts[name] = Part(slot.shape, slot.start, _flat(value), slot.runs)
            else:  # a factor of it, for example, which is whole where the parameter is
                _refuse_cut(slot, parameter, name)
                parts[name] = Part(value.shape, 0, _flat(value))
    for name, tensor in strategy.shared_state().items():
        parts[SHARED + name] = Part(tensor.shape, 0, _flat(tensor))
    return parts, numbers, strategy.update.state_dict()


def as_runs(held: Parts, world: World) -> None:
    """Put together each tensor whose parts lie in many places (a matrix that is cut along its
    columns), one tensor at a time, and give each rank one run of it to write. A collective."""
    scattered = {name for name, part in held.items() if part.runs is not None}
    for name in sorted(set().union(*world.gather(scattered))):
        part = held.pop(name, None)
        mine = None
        if part is not None:
            runs = ((part.start, len(part.values)),) if part.runs is None else part.runs
            mine = (part.shape, part.values.dtype, runs)
        everyone = world.gather(mine)
        shape, dtype, _ = next(about for about in everyone if about is not None)
        whole = torch.zeros(shape.numel(), dtype=dtype, device=world.device)
        if mine is not None and part is not None and mine not in everyone[: world.rank]:
            layout.put(whole, mine[2], part.values)
        comm.all_reduce(whole, world.group, label=f"checkpoint {name}")
        low, high = (shape.numel() * (world.rank + i) // world.size for i in (0, 1))
        if low < high:
            held[name] = Part(shape, low, whole[low:high].clone())


def _local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _flat(tensor: Tensor) -> Tensor:
    return _local(tensor).reshape(-1)


def _is_number(key: str, value: Any, dimensions: int) -> bool:
    """Adam's count of steps is a number, and ASGD's eta. The state of a parameter without
    dimensions is not, though it has no dimensions either."""
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
    """Where a checkpoint goes in a strategy: fill ``parts``, then ``settle``."""

    def __init__(self, strategy: Strategy, manifest: Manifest) -> None:
        self.strategy = strategy
        self.parts: Parts = {}
        # Name, target and filled copy of tensors whose elements do not lie one after the other.
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
        local = _local(tensor)
        flat = local.reshape(-1)
        if flat.numel() and not local.is_contiguous():
            flat = torch.empty_like(flat, memory_format=torch.contiguous_format)
            self._copies.append((name.removeprefix(MODEL), local, flat))
        self.parts[name] = Part(slot.shape, slot.start, flat, slot.runs)

    def settle(self, update: dict[str, Any]) -> None:
        """Finish when the parts have been filled."""
        with torch.no_grad():
            for name, place, flat in self._copies:
                _spread(name, place, flat.view(place.shape))
        self.strategy.update.load_state_dict(update)


def _spread(name: str, place: Tensor, values: Tensor) -> None:
    """Copy into a tensor of any layout. An expanded one takes each element that it stores once."""
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


def kind_of(dtype: torch.dtype) -> str:
    """The kind of number. Copying within a kind rounds values; between kinds it loses something."""
    if dtype == torch.bool:
        return "bool"
    if dtype.is_complex:
        return "complex"
    return "floating point" if dtype.is_floating_point else "whole numbers"
