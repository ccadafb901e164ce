"""Parameters end to end in one flat buffer that n ranks share evenly."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shardlab.errors import UsageError


class Piece(NamedTuple):
    """The part of one parameter that lies in one rank's shard."""

    name: str
    start: int  # in the flattened parameter
    length: int
    offset: int  # in the shard


@dataclass(frozen=True)
class Layout:
    """Where each parameter lies in a flat buffer of ``ranks`` equal shards.

    Shards cut through parameters wherever they must, so any world size divides any model (a
    vocabulary of 50257 too); the padding at the end is less than one element per rank.
    """

    shapes: dict[str, torch.Size]
    starts: dict[str, int]
    size: int  # elements, without the padding
    ranks: int

    @classmethod
    def of(cls, params: Mapping[str, Tensor], ranks: int) -> Layout:
        starts, size = {}, 0
        for name, p in params.items():
            starts[name] = size
            size += p.numel()
        return cls({n: p.shape for n, p in params.items()}, starts, size, ranks)

    @property
    def shard(self) -> int:
        """Elements of one rank."""
        return -(-self.size // self.ranks)

    @property
    def padded(self) -> int:
        return self.shard * self.ranks

    def view(self, flat: Tensor, name: str) -> Tensor:
        """A parameter inside a full buffer (padded,)."""
        start, shape = self.starts[name], self.shapes[name]
        return flat[start : start + shape.numel()].view(shape)

    def of_rank(self, flat: Tensor, rank: int) -> Tensor:
        """The shard of a rank inside a full buffer: (shard,)."""
        return flat[rank * self.shard : (rank + 1) * self.shard]

    def pieces(self, rank: int) -> list[Piece]:
        """What of which parameter lies in a rank's shard."""
        low, high = rank * self.shard, (rank + 1) * self.shard
        pieces = []
        for name, start in self.starts.items():
            begin, end = max(start, low), min(start + self.shapes[name].numel(), high)
            if begin < end:
                pieces.append(Piece(name, begin - start, end - begin, begin - low))
        return pieces


LARGEST_BUCKET_MB = 25.0  # beyond, a message's latency no longer matters (DDP's size)


def buckets_of(
    params: Mapping[str, nn.Parameter],
    order: Iterable[str],
    bucket_mb: float | None,
    first_bucket_mb: float,
    parts: int = 2,
) -> list[dict[str, nn.Parameter]]:
    """Parameters in the given order, cut into buckets of about ``bucket_mb``: full when that much
    is in, as in DDP, so that a small parameter is not sent alone because the next is large.

    By default one of ``parts`` of them all, so that a small model too has some to overlap. The
    first is smaller: it is full sooner, so communication starts sooner. Dtypes do not mix.
    """
    if bucket_mb is None:
        total = sum(p.numel() * p.element_size() for p in params.values())
        bucket_mb = min(LARGEST_BUCKET_MB, total / parts / 2**20)
    elif not bucket_mb > 0:
        raise UsageError(f"bucket_mb must be above 0, got {bucket_mb}")
    if not first_bucket_mb > 0:
        raise UsageError(f"first_bucket_mb must be above 0, got {first_bucket_mb}")
    cap_bytes, limit = bucket_mb * 2**20, min(first_bucket_mb, bucket_mb) * 2**20
    buckets: list[dict[str, nn.Parameter]] = []
    held, dtype = 0, None
    for name in order:
        p = params[name]
        if not buckets or held >= limit or p.dtype != dtype:
            if buckets:
                limit = cap_bytes
            buckets.append({})
            held, dtype = 0, p.dtype
        buckets[-1][name] = p
        held += p.numel() * p.element_size()
    return buckets


class Part(NamedTuple):
    """Parameters of one dtype that belong to one module alone."""

    label: str
    module: nn.Module
    params: dict[str, nn.Parameter]
    is_root: bool


def units_of(model: nn.Module, blocks: Sequence[str]) -> list[Part]:
    """What ZeRO-3 shards together: the parameters outside of blocks, then those of each block.

    A block inside a block is a unit of its own. A parameter that several of them use (a tied one)
    is the root's. Flat buffers have one dtype, so a block of two is two units.
    """
    modules: dict[nn.Module, str] = {model: ""}
    for block in blocks:
        modules.setdefault(model.get_submodule(block), block)
    owners: dict[nn.Parameter, set[str]] = {}
    for module, label in modules.items():
        for p in _own_parameters(module, modules):
            owners.setdefault(p, set()).add(label)
    units: dict[tuple[str, torch.dtype], dict[str, nn.Parameter]] = {}
    for name, p in model.named_parameters():
        label = next(iter(owners[p])) if len(owners[p]) == 1 else ""
        units.setdefault((label, p.dtype), {})[name] = p
    parts = []
    for module, label in modules.items():
        dtypes = [dtype for owner, dtype in units if owner == label]
        for i, dtype in enumerate(dtypes):
            shown = f"{label or 'root'} ({str(dtype).removeprefix('torch.')})" if i else label
            parts.append(Part(shown, module, units[label, dtype], not label))
    return parts


def _own_parameters(module: nn.Module, others: Mapping[nn.Module, str]) -> Iterator[nn.Parameter]:
    """The module's parameters, without those inside of the other modules."""
    yield from module.parameters(recurse=False)
    for child in module.children():
        if child not in others:
            yield from _own_parameters(child, others)
