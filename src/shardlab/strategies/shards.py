"""Which elements of the model's tensors a rank holds, and how ranks put them together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardlab import comm

Runs = tuple[tuple[int, int], ...]  # (start, length) in a flattened tensor, in the part's order


class Shard(NamedTuple):
    """This rank's elements of one of the model's tensors: all of them, some rows, or other runs.

    Shards of several ranks may be the same (replicas) or disjoint; together they are everything.
    A rank that keeps a tensor whole and updates a piece of it has two shards: the whole with its
    value, and the piece with gradient and key.
    """

    name: str  # the tensor's first name
    shape: torch.Size  # of the whole
    runs: Runs  # where the elements lie in the flattened whole
    value: Tensor | None = None  # the elements: flat, or some rows, or the whole
    grad: Tensor | None = None  # their gradient, times the loss scale
    key: nn.Parameter | None = None  # by which the optimizer knows them: its state is laid out so


def of(
    name: str, tensor: Tensor, grad: Tensor | None = None, key: nn.Parameter | None = None
) -> Shard:
    """A tensor that this rank has in full, or its rows of one that fully_shard has dealt out:
    ceil(rows / n) each, the last ranks fewer or none."""
    if not isinstance(tensor, DTensor):
        return Shard(name, tensor.shape, every(tensor.shape), tensor, grad, key)
    group, local = tensor.device_mesh.get_group(-1), tensor.to_local()
    rows = -(-len(tensor) // group.size())
    start = min(group.rank() * rows, len(tensor)) * (tensor.numel() // max(1, len(tensor)))
    runs = ((start, local.numel()),) if local.numel() else ()
    return Shard(name, tensor.shape, runs, tensor, grad, key)


def of_model(model: nn.Module, updated: Mapping[str, nn.Parameter] | None = None) -> list[Shard]:
    """Parameters and buffers, as they are in this rank's model; its optimizer updates some."""
    keys = updated or {}
    params = [
        of(name, p, p.grad if name in keys else None, keys.get(name))
        for name, p in model.named_parameters()
    ]
    return params + [of(name, buffer) for name, buffer in model.named_buffers()]


def flat(tensor: Tensor) -> Tensor:
    """This rank's elements of it: (length,)."""
    return local(tensor).detach().reshape(-1)


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# ------------------------------------------------------------------ of all ranks together


def whole(
    shards: Iterable[Shard],
    pick: Callable[[Shard], Tensor | None],
    group: comm.Group,
    device: torch.device,
) -> Iterator[tuple[str, Tensor]]:
    """What ``pick`` takes of the ranks' shards, by name: whole copies, one after the other.

    A rank's own elements are its own; the others are those of the first rank that has them. Where
    every rank has all of a tensor, nothing is sent; else the tensor is summed over the ranks, with
    zeros for what another one gives. The sum is of bytes, so no bit changes, of a NaN either. A
    collective: it takes twice the traffic of a gather, but elements may lie anywhere.
    """
    mine = {s.name: (s.runs, flat(t)) for s in shards if (t := pick(s)) is not None}
    shapes = {s.name: s.shape for s in shards}
    about = {name: (shapes[name], t.dtype, runs) for name, (runs, t) in mine.items()}
    everyone = [about] * group.size()
    dist.all_gather_object(everyone, about, group=comm.host_group(group))
    for name in dict.fromkeys(name for of_rank in everyone for name in of_rank):
        found = [of_rank.get(name) for of_rank in everyone]
        shape, dtype, _ = next(held for held in found if held is not None)
        full = torch.zeros(shape.numel(), dtype=dtype, device=device)
        if name in mine:
            put(full, *mine[name])
        is_whole = all(held is not None and _count(held[2]) == len(full) for held in found)
        if len(full) and not is_whole:
            for runs in {held[2] for held in found[: group.rank()] if held is not None}:
                for start, length in runs:
                    full[start : start + length] = 0
            comm.all_reduce(full.view(torch.uint8), group, label=f"whole {name}")
            if name in mine:
                put(full, *mine[name])
        yield name, full.view(shape)


def _count(runs: Runs) -> int:
    return sum(length for _, length in runs)


# ------------------------------------------------------------------ runs of elements


def every(shape: torch.Size) -> Runs:
    """All elements of a tensor."""
    return ((0, shape.numel()),) if shape.numel() else ()


def take(values: Tensor, runs: Runs) -> Tensor:
    """The elements of these runs of a flattened tensor: (length,)."""
    return torch.cat([values[start : start + length] for start, length in runs] or [values[:0]])


def put(values: Tensor, runs: Runs, part: Tensor) -> None:
    """Write a part to its places in a flattened tensor."""
    at = 0
    for start, length in runs:
        values[start : start + length] = part[at : at + length]
        at += length


# ------------------------------------------------------------------ the whole model


@dataclass(frozen=True)
class ModelSpec:
    """The tensors of a model as one process has it."""

    tensors: dict[str, Tensor]  # parameters and buffers, on the meta device
    # Other names in the model's state_dict, each with the first: ``head.weight: wte.weight``
    tied: dict[str, str]
    unsaved: tuple[str, ...]  # buffers that are no part of the model's state_dict

    @classmethod
    def of(cls, model: nn.Module) -> ModelSpec:
        skipped = {
            f"{path}.{name}" if path else name
            for path, module in model.named_modules(remove_duplicate=False)
            for name in module._non_persistent_buffers_set
        }
        first: dict[int, str] = {}
        tied = {}
        for named in (model.named_parameters, model.named_buffers):
            for name, tensor in named(remove_duplicate=False):
                if first.setdefault(id(tensor), name) != name and name not in skipped:
                    tied[name] = first[id(tensor)]
        tensors = dict((*model.named_parameters(), *model.named_buffers()))
        return cls(
            {n: torch.empty(t.shape, dtype=t.dtype, device="meta") for n, t in tensors.items()},
            # A buffer that is a parameter as well has a tensor of its own here.
            {name: first for name, first in tied.items() if name not in tensors},
            tuple(name for name, _ in model.named_buffers() if name in skipped),
        )


def as_state_dict(
    tensors: Mapping[str, Tensor], tied: Mapping[str, str], unsaved: Sequence[str]
) -> dict[str, Tensor]:
    """A whole model's tensors, each by its first name, under the names of its state_dict."""
    named = {**tensors, **{name: tensors[first] for name, first in tied.items()}}
    return {name: tensor for name, tensor in named.items() if name not in unsaved}
