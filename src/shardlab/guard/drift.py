"""Do replicas still hold the same bits? A checksum of each tensor, compared over the ranks.

Whole parameters on every rank must stay equal bit for bit: all start from rank 0's and get the same
update. Buffers are left out, since each rank's own forward changes them until the next broadcast.
Sharded parameters have no replica to differ from, but those of hybrid sharding have: ranks that
hold the same shard are compared.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardlab.errors import Halt
from shardlab.guard.verdict import names
from shardlab.world import World

STATE = "drifted"
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


def check(strategy: Any, world: World, step: int) -> None:
    """Stop if a parameter differs between ranks that should hold the same. A collective."""
    model = getattr(strategy, "model", None)
    if not isinstance(model, nn.Module) or world.size == 1:
        return
    getattr(strategy, "settle", lambda: None)()
    found = world.gather(checksums(model))
    difference = first_difference(found)
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


def checksums(model: nn.Module) -> list[tuple[str, str, int]]:
    """(name, which part, checksum) of each parameter that another rank may hold too."""
    parts = [(name, *_held(p)) for name, p in model.named_parameters()]
    kept = [(name, part, tensor) for name, part, tensor in parts if tensor is not None]
    if not kept:
        return []
    sums = torch.stack([checksum(tensor) for _, _, tensor in kept]).tolist()  # one wait for a GPU
    return [(name, part, value) for (name, part, _), value in zip(kept, sums, strict=True)]


def _held(parameter: Tensor) -> tuple[str, Tensor | None]:
    """This rank's part of a parameter, and which part that is; nothing if it has no twin."""
    tensor = parameter.detach()
    if not isinstance(tensor, DTensor):
        is_freed = tensor.untyped_storage().size() == 0 and tensor.numel() > 0  # by ZeRO-3
        return "whole", None if is_freed else tensor
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None or not any(p.is_replicate() for p in tensor.placements):
        return "shard", None
    place = [c for c, p in zip(coordinate, tensor.placements, strict=True) if not p.is_replicate()]
    return f"shard {place}", tensor.to_local()


def checksum(tensor: Tensor) -> Tensor:
    """The sum of its bits, read as whole numbers: () int64. Any one change changes it."""
    words = tensor.contiguous().view(-1).view(_WORDS[tensor.element_size()])
    return words.sum(dtype=torch.int64)


def first_difference(
    found: list[list[tuple[str, str, int]]],
) -> tuple[str, list[int], list[int]] | None:
    """The first tensor in the model's order that differs, the ranks that do and the others. Pure.

    Those in the minority are said to differ; of two equally many, those without the lowest rank.
    """
    holders: dict[tuple[str, str], dict[int, int]] = defaultdict(dict)
    for rank, sums in enumerate(found):
        for name, part, value in sums:
            holders[name, part][rank] = value
    for (name, _), values in holders.items():
        if len(set(values.values())) > 1:
            count = Counter(values.values())
            right = max(count, key=lambda v: (count[v], v == values[min(values)]))
            wrong = [rank for rank, value in values.items() if value != right]
            return name, wrong, [rank for rank in values if rank not in wrong]
    return None
