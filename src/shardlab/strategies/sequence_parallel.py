"""Sequence parallelism: between the layers that are split, each rank has some of the positions.

In tensor parallelism every rank computes all norms, and keeps the whole residual stream. Here the
all-reduce after a layer by rows becomes a reduce-scatter, and before the next layer by columns the
positions are gathered: together as many bytes, while what lies between is on each rank once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardlab import comm
from shardlab.errors import UsageError
from shardlab.numbers import cut_range
from shardlab.strategies.tensor_parallel import Stream


class Positions(Stream):
    """Each rank holds some positions of the stream: (batch, some of the positions, dim).

    Their number need not divide: the first ranks then have one more.
    """

    def __init__(self, group: comm.Group, has_dropout: bool) -> None:
        super().__init__(group)
        self.has_dropout = has_dropout
        self.parts: list[range] = []  # of the sequence that is under way

    def begin(self, x: Tensor, label: str) -> Tensor:
        """Where the stream comes to the first block: keep this rank's positions of it."""
        self.parts = cut_range(x.shape[-2], self.group.size())
        if self.has_dropout and len({len(part) for part in self.parts}) > 1:
            raise UsageError(
                f"sequence parallelism: {x.shape[-2]} positions cannot be divided over "
                f"{self.group.size()} ranks, whose dropout would draw different numbers; pad the "
                "sequences, or leave out dropout"
            )
        out: Tensor = _Keep.apply(x, self, label)  # type: ignore[no-untyped-call]
        return out

    def end(self, x: Tensor, label: str) -> Tensor:
        """Where it leaves the last block: every rank goes on with all positions."""
        out: Tensor = _Join.apply(self.checked(x), self, label)  # type: ignore[no-untyped-call]
        return out

    def enter(self, x: Tensor, label: str) -> Tensor:
        out: Tensor = _Gather.apply(self.checked(x), self, label)  # type: ignore[no-untyped-call]
        return out

    def leave(self, x: Tensor, label: str) -> Tensor:
        out: Tensor = _Scatter.apply(x, self, label)  # type: ignore[no-untyped-call]
        return out

    def checked(self, x: Tensor) -> Tensor:
        own = len(self.parts[self.group.rank()]) if self.parts else 0
        if x.shape[-2] != own:
            raise UsageError(
                f"sequence parallelism: a layer got {x.shape[-2]} positions where this rank has "
                f"{own}; is a block called outside of its order, or computed again after another "
                "micro-batch with sequences of another length?"
            )
        return x

    # ------------------------------------------------------------ collectives

    def gathered(self, x: Tensor, label: str) -> Tensor:
        """All positions (..., seq, dim) of each rank's own (..., part, dim)."""
        own = x.movedim(-2, 0).contiguous()  # (part, ..., dim): what a rank sends lies together
        length = self.parts[-1].stop
        out = own.new_empty(length, *own.shape[1:])
        sizes = self._sizes(out)
        comm.all_gather(out.view(-1), own.view(-1), self.group, sizes=sizes, label=label)
        return out.movedim(0, -2).contiguous()

    def scattered(self, x: Tensor, label: str) -> Tensor:
        """This rank's positions (..., part, dim) of the sum of all ranks' (..., seq, dim)."""
        every = x.movedim(-2, 0).contiguous()  # (seq, ..., dim)
        own = every.new_empty(len(self.parts[self.group.rank()]), *every.shape[1:])
        sizes = self._sizes(every)
        comm.reduce_scatter(own.view(-1), every.view(-1), self.group, sizes=sizes, label=label)
        return own.movedim(0, -2).contiguous()

    def own(self, x: Tensor) -> Tensor:
        part = self.parts[self.group.rank()]
        return x.narrow(-2, part.start, len(part)).contiguous()

    def _sizes(self, every: Tensor) -> list[int] | None:
        """The elements of each rank's part of (seq, ...), where they differ."""
        sizes = [every[0].numel() * len(part) for part in self.parts] if len(every) else [0]
        return sizes if len(set(sizes)) > 1 else None
