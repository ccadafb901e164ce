"""Parameters end to end in flat buffers that n ranks share evenly."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardlab.comm import Group
from shardlab.strategies.overlap import buckets_of

HUGE = 2 * 2**20  # bytes of Linux's large pages
MADV_HUGEPAGE = 14  # of <sys/mman.h>


def new_flat(elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A buffer whose content is not set yet: (elements,). In the host's memory it asks Linux for
    large pages: with 4 KiB pages a pass over 40 MB has ten thousand addresses to look up, and takes
    longer. Many small tensors could not have them."""
    flat = torch.empty(elements, dtype=dtype, device=device)
    is_real = type(flat) is Tensor and flat.device.type == "cpu"  # a simulation's has no address
    if is_real and flat.nbytes >= 2 * HUGE and sys.platform == "linux":
        begin = -(-flat.data_ptr() // HUGE) * HUGE
        size = (flat.data_ptr() + flat.nbytes) // HUGE * HUGE - begin
        # It may say no; then pages are small.
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), MADV_HUGEPAGE)
    return flat


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
    is_cut: bool = True  # equal shards, which cut through parameters

    @classmethod
    def of(cls, params: Mapping[str, Tensor], ranks: int) -> Layout:
        starts, size = _end_to_end(params)
        shard = -(-size // ranks)
        return cls({n: p.shape for n, p in params.items()}, starts, size, (shard,) * ranks)

    @classmethod
    def dealt(cls, params: Mapping[str, Tensor], owners: Mapping[str, int], ranks: int) -> Layout:
        """Every parameter lies whole in the shard of its owner."""
        ordered = {name: params[name] for name in sorted(params, key=owners.__getitem__)}
        starts, size = _end_to_end(ordered)
        sizes = [0] * ranks
        for name, p in params.items():
            sizes[owners[name]] += p.numel()
        shapes = {n: p.shape for n, p in ordered.items()}
        return cls(shapes, starts, size, tuple(sizes), is_cut=False)

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


def _end_to_end(params: Mapping[str, Tensor]) -> tuple[dict[str, int], int]:
    """Where each of them begins if they lie one behind the other, and where the last ends."""
    starts, size = {}, 0
    for name, p in params.items():
        starts[name] = size
        size += p.numel()
    return starts, size


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
    ) -> None:
        self.label = label
        self.params = dict(params)
        self.layout = layout or Layout.of(params, group.size())
        self.rank = group.rank()
        first = next(iter(params.values()))
        self.like: dict[str, Any] = {"dtype": first.dtype, "device": first.device}
        self.shard: Tensor  # (shard,) this rank's parameters, the ones that are updated
        self.full: Tensor | None = None  # (padded,) all ranks' parameters, while they are here
        self.full_grad: Tensor | None = None  # (padded,) this rank's gradient of all of them
        self.missing: set[str] = set()  # whose gradient is not in it yet
        self.grad: Tensor | None = None  # (shard,) this rank's part of the summed gradient

    @property
    def is_whole(self) -> bool:
        """Whether this rank has all of the parameters now. (ZeRO-3 empties their storage.)"""
        return self.full is not None and self.full.untyped_storage().size() > 0

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The given tensors, end to end: (padded,)."""
        flat = new_flat(self.layout.padded, **self.like).zero_()
        for name, tensor in tensors.items():
            self.layout.view(flat, name).copy_(tensor)
        return flat

    def split(self, flat: Tensor) -> dict[str, Tensor]:
        """The parameters' places in a full buffer (padded,), by name."""
        return {name: self.layout.view(flat, name) for name in self.params}

    @torch.no_grad()
    def move_in(self) -> None:
        """The parameters move into one flat buffer, which this rank keeps whole, and become views
        of it; the shard is a slice of it, so that collectives work in place."""
        self.full = self.flatten(self.params)  # (padded,)
        for name, view in self.split(self.full).items():
            self.params[name].data = view
        self.shard = self.layout.of_rank(self.full, self.rank)


def bucket_units(
    params: Mapping[str, nn.Parameter], group: Group, whole: Collection[str], *sizes: Any
) -> list[Unit]:
    """Buckets of parameters, moved into flat buffers, in the reverse of the parameters' order,
    which is about that in which gradients come. ``sizes``: the last arguments of ``buckets_of``.

    The parameters in ``whole``, which the optimizer needs uncut (Muon's matrices), have buckets of
    their own, in which each lies in one rank's shard.
    """
    order, loads = list(params)[::-1], [0] * group.size()
    cut = buckets_of(params, [name for name in order if name not in whole], *sizes)
    uncut = buckets_of(params, [name for name in order if name in whole], *sizes)
    dealt = [Layout.dealt(bucket, deal(bucket, loads), group.size()) for bucket in uncut]
    both = [*((bucket, None) for bucket in cut), *zip(uncut, dealt, strict=True)]
    both.sort(key=lambda pair: order.index(list(pair[0])[-1]))
    units = [Unit(f"bucket {i}", bucket, group, at) for i, (bucket, at) in enumerate(both)]
    for unit in units:
        unit.move_in()
    return units
