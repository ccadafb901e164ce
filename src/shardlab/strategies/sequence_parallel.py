"""Tensor parallelism that also shares what lies between its layers, along the sequence."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardlab import comm
from shardlab.errors import UsageError
from shardlab.numbers import cut_range
from shardlab.strategies.on_mesh import OnMesh
from shardlab.strategies.tensor_parallel import Stream


class SequenceParallel(OnMesh):
    """Tensor parallelism whose ranks have some positions each of the norms and residuals.

    In ``tensor_parallel`` every rank computes all norms, and keeps the whole residual stream. Here,
    inside the blocks, a rank has some of the positions of both. Its all-reduce after each half
    becomes a reduce-scatter, and the positions are gathered where the next half begins: as many
    bytes. A norm sees some of the positions, so its gradient is a summand, as is that of a bias
    which is added to them.

    Schedule, for n ranks, L blocks, and A bytes of the residual stream (batch x positions x dim):

        at construction     broadcast parameters and buffers from rank 0; each keeps its part
        forward             all_reduce activations after the embedding  A
                            all_gather activations before each half     2LA
                            reduce_scatter activations after each half  2LA
                            all_gather activations after the last block A
                            all_reduce the loss's maxima, then its sums 3 numbers per target
        backward            all_reduce activation gradients of the head A
                            all_gather activation gradients, each half  2LA
                            reduce_scatter activation gradients, too    2LA
                            all_reduce the gradients of norms and biases
                            all_gather activation gradients, first block A
        step                update                                      nothing

    Cost: A gather or a scatter moves half of what an all-reduce does, so blocks cost what they cost
    in ``tensor_parallel``, and the ends of the blocks A more. What a rank keeps for backward of
    norms and residuals is 1/n; the gathered inputs of layers by columns it keeps whole.
    """


class Positions(Stream):
    """Each rank holds some positions of the stream: (batch, some of the positions, dim).

    Their number need not divide: the first ranks then have one more.
    """

    def __init__(self, group: comm.Group, has_dropout: bool) -> None:
        super().__init__(group)
        self.has_dropout = has_dropout
        self.parts: list[range] = []  # of the sequence that is under way

    def divide(self, x: Tensor) -> None:
        """The stream that is under way is as long as this one, (batch, positions, dim)."""
        self.parts = cut_range(x.shape[-2], self.group.size())

    def begin(self, x: Tensor, label: str) -> Tensor:
        """Where the stream comes to the first block: keep this rank's positions of it."""
        self.divide(x)
        if self.has_dropout and x.shape[-2] % self.group.size():
            raise UsageError(
                f"sequence parallelism: {x.shape[-2]} positions cannot be divided over "
                f"{self.group.size()} ranks, and their dropouts would draw different numbers; pad "
                "the sequences, or set the model's dropout to 0"
            )
        out: Tensor = _Begin.apply(x, Exchange(self), label)  # type: ignore[no-untyped-call]
        return out

    def end(self, x: Tensor, label: str) -> Tensor:
        """Where it leaves the last block: every rank goes on with all positions."""
        ranks = Exchange(self, x)
        out: Tensor = _End.apply(x, ranks, label)  # type: ignore[no-untyped-call]
        return out

    def enter(self, x: Tensor, label: str) -> Tensor:
        ranks = Exchange(self, x)
        out: Tensor = _Enter.apply(x, ranks, label)  # type: ignore[no-untyped-call]
        return out

    def leave(self, x: Tensor, label: str) -> Tensor:
        out: Tensor = _Leave.apply(x, Exchange(self), label)  # type: ignore[no-untyped-call]
        return out


class Exchange:
    """The positions of one sequence, from and to the ranks. Backward needs them later, when another
    sequence may be under way."""

    def __init__(self, stream: Positions, own: Tensor | None = None) -> None:
        """``own``: what this rank should have its positions of."""
        self.group, self.parts = stream.group, stream.parts
        self.part = self.parts[self.group.rank()] if self.parts else range(0)
        if own is not None and own.shape[-2] != len(self.part):
            raise UsageError(
                f"sequence parallelism: a layer got {own.shape[-2]} positions, where this rank has "
                f"{len(self.part)}; is it computed again after sequences of another length?"
            )

    def gather(self, x: Tensor, label: str) -> Tensor:
        """All positions (..., seq, dim) of each rank's own (..., part, dim)."""
        own = x.movedim(-2, 0).contiguous()  # (part, ..., dim): what a rank sends lies together
        every = own.new_empty(self.parts[-1].stop, *own.shape[1:])
        sizes = self._sizes(every)
        comm.all_gather(every.view(-1), own.view(-1), self.group, sizes=sizes, label=label)
        return every.movedim(0, -2).contiguous()

    def scatter(self, x: Tensor, label: str) -> Tensor:
        """This rank's positions (..., part, dim) of the sum of all ranks' (..., seq, dim)."""
        every = x.movedim(-2, 0).contiguous()  # (seq, ..., dim)
        own = every.new_empty(len(self.part), *every.shape[1:])
        sizes = self._sizes(every)
        comm.reduce_scatter(own.view(-1), every.view(-1), self.group, sizes=sizes, label=label)
        return own.movedim(0, -2).contiguous()

    def keep(self, x: Tensor) -> Tensor:
        """This rank's positions (..., part, dim) of (..., seq, dim)."""
        return x.narrow(-2, self.part.start, len(self.part)).contiguous()

    def _sizes(self, every: Tensor) -> list[int] | None:
        """The elements of each rank's part of (seq, ...), where they differ."""
        each = every.shape[1:].numel()
        sizes = [each * len(part) for part in self.parts]
        return sizes if len(set(sizes)) > 1 else None


Returned = tuple[Tensor, None, None]


class _Enter(torch.autograd.Function):
    """Gather the positions. Each rank's part gives a part of the gradient of all of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Exchange, label: str) -> Tensor:
        ctx.ranks, ctx.label = ranks, label
        return ranks.gather(x, f"activations {label}")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Returned:
        return ctx.ranks.scatter(gradient, f"activation gradients {ctx.label}"), None, None


class _Leave(torch.autograd.Function):
    """The sum over the ranks, each position to its rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Exchange, label: str) -> Tensor:
        ctx.ranks, ctx.label = ranks, label
        return ranks.scatter(x, f"activations {label}")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Returned:
        return ctx.ranks.gather(gradient, f"activation gradients {ctx.label}"), None, None


class _Begin(torch.autograd.Function):
    """Keep this rank's positions of a stream that every rank has. Before it ranks compute all
    positions, so backward gathers their gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Exchange, label: str) -> Tensor:
        ctx.ranks, ctx.label = ranks, label
        return ranks.keep(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Returned:
        return ctx.ranks.gather(gradient, f"activation gradients {ctx.label}"), None, None


class _End(torch.autograd.Function):
    """Gather the positions. After it every rank computes the same from all of them, and has the
    gradient of all: backward keeps this rank's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Exchange, label: str) -> Tensor:
        ctx.ranks = ranks
        return ranks.gather(x, f"activations {label}")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Returned:
        return ctx.ranks.keep(gradient), None, None
