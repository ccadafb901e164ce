"""Parameters end to end in one flat buffer that n ranks share evenly."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn


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


def buckets_of(
    params: Mapping[str, nn.Parameter], order: Iterable[str], cap_bytes: int, first_bytes: int
) -> list[dict[str, nn.Parameter]]:
    """Parameters in the given order, cut into buckets of about ``cap_bytes``.

    The first is smaller: it is full sooner, so communication starts sooner. Dtypes do not mix.
    """
    buckets: list[dict[str, nn.Parameter]] = []
    held, limit, dtype = 0, first_bytes, None
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
