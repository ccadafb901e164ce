"""A strategy's state as parts of named tensors, and back: the one form that all of them share.

A part is a run of the elements of a flattened tensor, or several. ZeRO's flat shards are such runs,
FSDP2's rows are, a replica's whole tensors are. So a checkpoint of any strategy at any world size
is read by any other: each rank reads the runs that it will hold.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardlab.checkpoint.manifest import MODEL, OPTIMIZER, Chunk, Manifest
from shardlab.checkpoint.manifest import Tensor as Entry
from shardlab.errors import UsageError
from shardlab.strategies.base import Strategy
from shardlab.strategies.shards import Shard, every, flat, local, whole
from shardlab.strategies.update_state import put_back, state_of
from shardlab.workloads import huggingface
from shardlab.world import World


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


# This rank's parts of tensors, to be written or to be filled, by their names in a checkpoint; the
# values are (length,). A part of several runs can be filled, not written: see ``as_runs``.
Parts = dict[str, Shard]
Numbers = dict[str, float]


def part(name: str, tensor: Tensor) -> Shard:
    """A tensor that this rank has in full."""
    return Shard(name, tensor.shape, every(tensor.shape), flat(tensor))


def parts_of(prefix: str, tensors: Mapping[str, Tensor]) -> Parts:
    """Tensors that this rank has in full."""
    return {prefix + name: part(prefix + name, tensor) for name, tensor in tensors.items()}


def bounds(part: Shard) -> tuple[int, int]:
    """Where a part of one run begins and ends in the flattened whole."""
    start, length = part.runs[0] if part.runs else (0, 0)
    return start, start + length


def between(part: Shard, low: int, high: int) -> Tensor:
    """Some elements of a part of one run, by their places in the whole: (high - low,)."""
    assert part.value is not None
    start, _ = bounds(part)
    return part.value[low - start : high - start]


# ------------------------------------------------------------------ who writes what


def offers_of(held: Parts) -> dict[str, Offer]:
    return {
        name: Offer(*bounds(p), tuple(p.shape), str(p.value.dtype).removeprefix("torch."))
        for name, p in held.items()
        if p.value is not None
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
            raise RuntimeError(f"no rank holds all of '{name}': the strategy's shards() are wrong")
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
    """This rank's parts of tensors, the optimizer's numbers and the update's. Called by all ranks,
    inside ``as_one()``."""
    strategy.settle()
    state = strategy.update.inner.state
    is_first = strategy.rounds is None or strategy.group.rank() == 0  # each worker has an optimizer
    parts: Parts = {}
    numbers: Numbers = {}
    for shard in strategy.shards():
        if shard.value is not None:
            name = MODEL + shard.name
            parts[name] = shard._replace(name=name, value=flat(shard.value))
        if shard.key is None or not is_first:
            continue
        for key, value in state.get(shard.key, {}).items():
            name = f"{OPTIMIZER}{shard.name}/{key}"
            if value is None:
                continue
            if _is_number(key, value, len(shard.shape)):
                numbers[name] = _number(name, value)
            elif value.shape == shard.key.shape:
                parts[name] = shard._replace(name=name, value=flat(value))
            else:  # a factor of it, for example, which is whole where the parameter is
                _refuse_cut(shard, name)
                parts[name] = part(name, value)
    return parts, numbers, state_of(strategy.update)


def as_runs(held: Parts, world: World) -> None:
    """Put together each tensor whose parts lie in many places (a matrix that is cut along its
    columns), one tensor at a time, and give each rank one run of it to write. A collective."""
    mine = {name for name, p in held.items() if len(p.runs) > 1}
    scattered = sorted(set().union(*world.gather(mine)))
    parts = [held.pop(name) for name in scattered if name in held]
    for name, tensor in whole(parts, lambda s: s.value, world.group, world.device):
        low, high = (tensor.numel() * (world.rank + i) // world.size for i in (0, 1))
        if low < high:
            values = tensor.view(-1)[low:high].clone()
            held[name] = Shard(name, tensor.shape, ((low, high - low),), values)


def _is_number(key: str, value: Any, dimensions: int) -> bool:
    """Adam's count of steps is a number, and ASGD's eta. The state of a parameter without
    dimensions is not, though it has no dimensions either."""
    return not isinstance(value, Tensor) or key == "step" or (value.dim() == 0 and dimensions > 0)


def _number(name: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise UsageError(
            f"a checkpoint cannot hold '{name}', which is a {type(value).__name__}: the optimizer "
            "must keep tensors and numbers"
        ) from None
    if not math.isfinite(number):
        raise UsageError(f"a checkpoint cannot hold '{name}', which is {number}")
    return number


def _refuse_cut(shard: Shard, name: str) -> None:
    if isinstance(shard.key, DTensor) or shard.runs != every(shard.shape):
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
        strategy.settle()
        optimizer = strategy.update.inner
        known = manifest.optimizer_keys()
        optimizer.state.clear()
        for shard in strategy.shards():
            if shard.value is not None and MODEL + shard.name in manifest.tensors:
                self._add(MODEL + shard.name, shard, shard.value)
            if shard.key is None:
                continue
            for key, number in known.get(shard.name, {}).items():
                state = optimizer.state[shard.key]
                name = f"{OPTIMIZER}{shard.name}/{key}"
                if number is not None:
                    state[key] = torch.tensor(number, dtype=torch.float32)
                elif manifest.tensors[name].shape == tuple(shard.shape):
                    state[key] = torch.empty_like(shard.key, requires_grad=False)
                    self._add(name, shard, state[key])
                else:
                    _refuse_cut(shard, name)
                    size = torch.Size(manifest.tensors[name].shape)
                    state[key] = shard.key.detach().new_empty(size)
                    self._add(name, part(name, state[key]), state[key])

    def _add(self, name: str, shard: Shard, tensor: Tensor) -> None:
        held = local(tensor).detach()
        values = held.reshape(-1)
        if values.numel() and not held.is_contiguous():
            values = torch.empty_like(values, memory_format=torch.contiguous_format)
            self._copies.append((name.removeprefix(MODEL), held, values))
        self.parts[name] = shard._replace(name=name, value=values)

    def settle(self, update: dict[str, Any]) -> None:
        """Finish when the parts have been filled."""
        with torch.no_grad():
            for name, place, flat in self._copies:
                _spread(name, place, flat.view(place.shape))
        put_back(self.strategy.update, update)


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
