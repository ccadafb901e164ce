"""Parameters end to end in flat buffers that n ranks share evenly."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardlab.comm import Group
from shardlab.strategies.buckets import buckets_of
from shardlab.strategies.shards import Shard


class Piece(NamedTuple):
    """The part of one parameter that lies in one rank's shard."""

    name: str
    start: int  # in the flattened parameter
    length: int
    offset: int  # in the shard


@dataclass(frozen=True)
class Layout:
    """Where each parameter lies in a flat buffer, and which shard of the buffer is which rank's.

    Equal shards cut through parameters wherever they must, so any world size divides any model (a
    vocabulary of 50257 too); the padding at the end is less than one element per rank. Where the
    optimizer needs whole parameters (Muon), each lies in its owner's shard, and shards differ.
    """

    shapes: dict[str, torch.Size]
    starts: dict[str, int]
    size: int  # elements, without the padding
    sizes: tuple[int, ...]  # elements of each rank's shard
    is_cut: bool  # equal shards, which cut through parameters

    @classmethod
    def of(
        cls, params: Mapping[str, Tensor], ranks: int, owners: Mapping[str, int] | None = None
    ) -> Layout:
        """Equal shards, or, with ``owners``, every parameter whole in the shard of its owner."""
        names = list(params) if owners is None else sorted(params, key=owners.__getitem__)
        starts, size = {}, 0
        for name in names:
            starts[name] = size
            size += params[name].numel()
        sizes = [-(-size // ranks)] * ranks
        if owners is not None:
            lengths = [(owners[name], p.numel()) for name, p in params.items()]
            sizes = [sum(n for owner, n in lengths if owner == rank) for rank in range(ranks)]
        shapes = {name: params[name].shape for name in names}
        return cls(shapes, starts, size, tuple(sizes), is_cut=owners is None)

    @property
    def padded(self) -> int:
        return sum(self.sizes)

    @property
    def uneven(self) -> tuple[int, ...] | None:
        """What a collective must know about the shards: their sizes, or None if they are equal."""
        return None if self.is_cut else self.sizes

    def bounds(self, rank: int) -> tuple[int, int]:
        """Where a rank's shard begins and ends in the buffer."""
        begin = sum(self.sizes[:rank])
        return begin, begin + self.sizes[rank]

    def view(self, flat: Tensor, name: str) -> Tensor:
        """A parameter inside a full buffer (padded,)."""
        start, shape = self.starts[name], self.shapes[name]
        return flat[start : start + shape.numel()].view(shape)

    def of_rank(self, flat: Tensor, rank: int) -> Tensor:
        """The shard of a rank inside a full buffer: (shard,)."""
        begin, end = self.bounds(rank)
        return flat[begin:end]

    def pieces(self, rank: int) -> list[Piece]:
        """What of which parameter lies in a rank's shard."""
        low, high = self.bounds(rank)
        pieces = []
        for name, start in self.starts.items():
            begin, end = max(start, low), min(start + self.shapes[name].numel(), high)
            if begin < end:
                pieces.append(Piece(name, begin - start, end - begin, begin - low))
        return pieces


def deal(params: Mapping[str, Tensor], loads: list[int]) -> dict[str, int]:
    """An owner for each parameter: the largest first, each to the rank that has the least so far.

    ``loads`` are the elements that each rank has from before; they grow by what is dealt here. No
    rank ends with more than the average and one parameter.
    """
    owners = {}
    for name, p in sorted(params.items(), key=lambda item: -item[1].numel()):
        owners[name] = loads.index(min(loads))
        loads[owners[name]] += p.numel()
    return owners


class Unit:
    """Parameters that are sharded and sent together: a bucket (ZeRO-1, 2) or a block (ZeRO-3)."""

    def __init__(
        self,
        label: str,
        params: Mapping[str, nn.Parameter],
        group: Group,
        layout: Layout | None = None,
        grad_dtype: torch.dtype | None = None,
    ) -> None:
        """``grad_dtype``: what gradients are buffered and sent in; None: their own type."""
        self.label = label
        self.params = dict(params)
        self.layout = layout or Layout.of(params, group.size())
        self.rank = group.rank()
        first = next(iter(params.values()))
        self.like: dict[str, Any] = {"dtype": first.dtype, "device": first.device}
        self.grad_dtype = grad_dtype or first.dtype
        self.shard: Tensor  # (shard,) this rank's parameters, the ones that are updated
        self.full: Tensor  # (padded,) all ranks' parameters, while they are here
        self.pieces: dict[Piece, nn.Parameter] = {}  # that it has of each parameter: views of it
        self.full_grad: Tensor | None = None  # (padded,) this rank's gradient of all of them
        self.missing: set[str] = set()  # whose gradient is not in it yet
        self.grad: Tensor | None = None  # (shard,) this rank's part of the summed gradient

    @property
    def is_whole(self) -> bool:
        """Whether this rank has all of the parameters now. (ZeRO-3 empties their storage.)"""
        return self.full.untyped_storage().size() > 0

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The given tensors, end to end: (padded,)."""
        flat = torch.zeros(self.layout.padded, **self.like)
        for name, tensor in tensors.items():
            self.layout.view(flat, name).copy_(tensor)
        return flat

    def split(self, flat: Tensor) -> dict[str, Tensor]:
        """The parameters' places in a full buffer (padded,), by name."""
        return {name: self.layout.view(flat, name) for name in self.params}

    def cut_shard(self) -> None:
        """Cut the shard into the pieces that the optimizer sees: views, nothing is copied."""
        for piece in self.layout.pieces(self.rank):
            whole = self.params[piece.name]
            part = self.shard[piece.offset : piece.offset + piece.length]
            part = part if self.layout.is_cut else part.view(whole.shape)
            self.pieces[piece] = nn.Parameter(part, whole.requires_grad)

    def held(self, unused: Collection[str]) -> Iterator[Shard]:
        """The pieces with their gradients, and with values where no rank keeps the whole."""
        for piece, p in self.pieces.items():
            grad = None
            if p.requires_grad and self.grad is not None and piece.name not in unused:
                grad = self.grad[piece.offset : piece.offset + piece.length]
            yield Shard(
                piece.name,
                self.layout.shapes[piece.name],
                ((piece.start, piece.length),),
                None if self.is_whole else p,
                grad,
                p if p.requires_grad else None,
            )
        if self.grad is None:
            return
        for name, p in self.params.items():
            if p.requires_grad and not p.numel() and name not in unused:  # it lies in no shard
                yield Shard(name, p.shape, (), grad=self.grad[:0])

    @torch.no_grad()
    def move_in(self) -> None:
        """The parameters move into one flat buffer, which this rank keeps whole, and become views
        of it; the shard is a slice of it, so that collectives work in place."""
        self.full = self.flatten(self.params)  # (padded,)
        for name, view in self.split(self.full).items():
            self.params[name].data = view
        self.shard = self.layout.of_rank(self.full, self.rank)

    def grad_view(self, name: str) -> Tensor:
        """Where a gradient goes, to be written over: of the parameter's shape."""
        full = self._buffer()
        self.missing.discard(name)
        return self.layout.view(full, name)

    def filled(self) -> Tensor:
        """The gradients, ready to be sent; zero where this rank has none: (padded,)."""
        full = self._buffer()
        for name in self.missing:
            self.layout.view(full, name).zero_()
        full[self.layout.size :].zero_()
        return full

    def _buffer(self) -> Tensor:
        """Room for the gradients, made when the first of them comes: (padded,).

        Not zeroed: that would cost a page fault for each 4 KiB, 2% of a step on a CPU.
        """
        if self.full_grad is None:
            self.full_grad = torch.empty(
                self.layout.padded, dtype=self.grad_dtype, device=self.like["device"]
            )
            self.missing = set(self.params)
        return self.full_grad


def bucket_units(
    params: Mapping[str, nn.Parameter],
    group: Group,
    whole: Collection[str],
    sizes: tuple[float | None, float, int],
    grad_dtype: torch.dtype | None = None,
) -> list[Unit]:
    """Buckets of parameters, moved into flat buffers, in the reverse of the parameters' order,
    which is about that in which gradients come. ``sizes``: the last arguments of ``buckets_of``.

    The parameters in ``whole``, which the optimizer needs uncut (Muon's matrices), have buckets of
    their own, in which each lies in one rank's shard.
    """
    order, loads = list(params)[::-1], [0] * group.size()
    cut = buckets_of(params, [name for name in order if name not in whole], *sizes)
    uncut = buckets_of(params, [name for name in order if name in whole], *sizes)
    dealt = [Layout.of(bucket, group.size(), deal(bucket, loads)) for bucket in uncut]
    both = [*((bucket, None) for bucket in cut), *zip(uncut, dealt, strict=True)]
    both.sort(key=lambda pair: order.index(list(pair[0])[-1]))
    units = [
        Unit(f"bucket {i}", bucket, group, layout, grad_dtype)
        for i, (bucket, layout) in enumerate(both)
    ]
    for unit in units:
        unit.move_in()
    return units
