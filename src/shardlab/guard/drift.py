"""Whether replicas still hold the same bits, by a checksum of each tensor.

Whole parameters on every rank must stay equal bit for bit: all start from rank 0's and get the same
update. Buffers are left out, since each rank's own forward changes them until the next broadcast.
Workers that take steps of their own differ until they exchange; their anchor and outer momentum
must not.
Sharded parameters have no replica to differ from, but those of hybrid sharding have: ranks that
hold the same elements are compared.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardlab.errors import Halt
from shardlab.guard.nodes import names
from shardlab.guard.verdict import odd_ones
from shardlab.strategies.base import Strategy
from shardlab.strategies.shards import Shard, flat
from shardlab.world import World

if TYPE_CHECKING:
    from shardlab.checkpoint.parts import Numbers, Parts

STATE = "drifted"
_WORDS = {1: torch.int8, 2: torch.int16}  # by size; all others are read as int32
BLOCK = 1 << 18  # words that are weighted at a time: 2 MB beside the tensor
Held = tuple[str, str, Any]  # a tensor's name, which part of it, its checksum or number


def check(strategy: Strategy, world: World, step: int) -> None:
    """Stop if a parameter differs between ranks that should hold the same. A collective."""
    if world.size > 1:
        strategy.settle()
        shared, _ = strategy.extra_state()
        found = sums_of((name, "whole", t) for name, t in shared.items())
        if strategy.in_step():
            named = dict(strategy.model.named_parameters())
            held = [s for s in strategy.shards() if s.name in named]
            found += sums_of((s.name, _where(s), s.value) for s in held)
        _compare(found, world, step)


def check_saved(parts: Parts, numbers: Numbers, world: World, step: int) -> None:
    """Stop if ranks hold the same elements of a tensor, of the model or the optimizer, and differ.

    A checkpoint is put together from all ranks' parts, so it would mix them. A collective.
    """
    tensors = [(_short(name), f"{name} {_where(s)}", s.value) for name, s in parts.items()]
    # As text, in which NaN equals NaN: that the numbers are no numbers is another guard's finding.
    as_text = ((_short(name), name, repr(value)) for name, value in numbers.items())
    found = [*sums_of(tensors), *as_text]
    _compare(found, world, step)


def _where(part: Shard) -> str:
    """Which elements these are: the same words for the same elements."""
    return str(hash(part.runs))  # of numbers: the same in every process


def _short(name: str) -> str:
    """A name without the prefix that it has in a checkpoint."""
    return name.partition("/")[2]


def _compare(found: Sequence[Held], world: World, step: int) -> None:
    difference = first_difference(world.gather(found))
    if difference is None:
        return
    name, ranks, others = difference
    differ = "differs" if len(ranks) == 1 else "differ"
    raise Halt(
        STATE,
        f"replicas have drifted apart: '{name}' of {names(ranks)} {differ} from that of "
        f"{names(others)} after step {step}",
        rank=ranks[0],
        details={"tensor": name, "step": step, "ranks": ranks, "others": others},
    )


def sums_of(tensors: Iterable[tuple[str, str, Tensor | None]]) -> list[Held]:
    """The checksums of tensors that are given as (name, which part, tensor)."""
    kept = [(name, part, checksum(flat(t))) for name, part, t in tensors if t is not None]
    if not kept:
        return []
    sums = iter(torch.cat([found for _, _, found in kept]).tolist())  # one wait for a GPU
    return [(name, part, tuple(next(sums) for _ in found)) for name, part, found in kept]


def checksum(tensor: Tensor) -> Tensor:
    """The weighted sum of its bits, read as whole numbers: (words,) int64, words of 32 bits.

    Each place has a weight of its own. One change, or one swap of two elements that are not equal,
    always changes the sum: a difference of weights is below 2³¹ and a difference of words below
    2³², so their product is not 0 even in 64 bits (for up to 2³¹ elements). Weights in order would
    miss +1, -2, +1 in a row; so they are shuffled within each block.
    """
    flat = tensor.detach().contiguous().view(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat)
    words = flat.view(-1).view(_WORDS.get(tensor.element_size(), torch.int32))
    columns = max(1, tensor.element_size() // 4)
    total = torch.zeros(columns, dtype=torch.int64, device=tensor.device)
    weights = _weights(tensor.device)  # (BLOCK,)
    # An element of 8 bytes is two words, and each has its own sum: together they could cancel.
    for column in range(columns):
        total[column] = _weighted(words[column::columns], weights)
    return total


def _weighted(words: Tensor, weights: Tensor) -> Tensor:
    """Σ words · places: (). The places of a block are the weights plus the words before it."""
    at_once = BLOCK if words.device.type == "cpu" else 16 * BLOCK  # each launch on a GPU costs
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for first in range(0, len(words), at_once):
        part = words[first : first + at_once].to(torch.int64)
        rest = part[len(part) // BLOCK * BLOCK :]  # of the last block
        blocks = part[: len(part) - len(rest)].view(-1, BLOCK)
        for rows, number in ((blocks, first // BLOCK), (rest[None], (first + len(part)) // BLOCK)):
            if rows.numel():
                before = torch.arange(number, number + len(rows), device=words.device) * BLOCK
                total += _dot(rows, weights[: rows.shape[1]]) + (rows.sum(1) * before).sum()
    return total


def _dot(rows: Tensor, weights: Tensor) -> Tensor:
    """Σ rows · weights: (). On a GPU torch has no dot product of whole numbers."""
    if rows.device.type == "cpu" and len(rows) == 1:
        return rows[0].dot(weights)
    return (rows * weights).sum()


@lru_cache(maxsize=8)
def _weights(device: torch.device) -> Tensor:
    """1 … BLOCK in an order that is the same everywhere: (BLOCK,)."""
    order = torch.randperm(BLOCK, generator=torch.Generator().manual_seed(0)) + 1
    return order.to(device)


def first_difference(
    found: Sequence[Sequence[Held]],
) -> tuple[str, list[int], list[int]] | None:
    """The first tensor in the model's order that differs, the ranks that do, and the others."""
    holders: dict[tuple[str, str], dict[int, Any]] = defaultdict(dict)
    for rank, sums in enumerate(found):
        for name, part, value in sums:
            holders[name, part][rank] = value
    for (name, _), values in holders.items():
        odd, others = odd_ones(values)
        if odd:
            return name, odd, others
    return None
