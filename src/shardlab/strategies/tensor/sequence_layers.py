"""A residual stream of which each rank has some of the positions."""

from __future__ import annotations

from torch import Tensor

from shardlab import comm
from shardlab.axes import cut_range
from shardlab.errors import UsageError
from shardlab.strategies.tensor.tensor_layers import Stream, exchanged


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
        """Where the stream comes to the first block: keep this rank's positions of it. Before it
        ranks compute all positions, so backward gathers their gradients."""
        self.divide(x)
        if self.has_dropout and x.shape[-2] % self.group.size():
            raise UsageError(
                f"sequence parallelism: {x.shape[-2]} positions cannot be divided over "
                f"{self.group.size()} ranks, and their dropouts would draw different numbers; pad "
                "the sequences, or set the model's dropout to 0"
            )
        ranks = Exchange(self)
        return exchanged(x, ranks.keep, ranks.gather, label)

    def end(self, x: Tensor, label: str) -> Tensor:
        """Where it leaves the last block: gather the positions. After it every rank computes the
        same from all of them, and has the gradient of all: backward keeps this rank's."""
        ranks = Exchange(self, x)
        return exchanged(x, ranks.gather, ranks.keep, label)

    def enter(self, x: Tensor, label: str) -> Tensor:
        """Gather the positions. Each rank's part gives a part of the gradient of all of them."""
        ranks = Exchange(self, x)
        return exchanged(x, ranks.gather, ranks.scatter, label)

    def leave(self, x: Tensor, label: str) -> Tensor:
        """The sum over the ranks, each position to its rank."""
        ranks = Exchange(self)
        return exchanged(x, ranks.scatter, ranks.gather, label)


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

    def keep(self, x: Tensor, _label: str) -> Tensor:
        """This rank's positions (..., part, dim) of (..., seq, dim)."""
        return x.narrow(-2, self.part.start, len(self.part)).contiguous()

    def _sizes(self, every: Tensor) -> list[int] | None:
        """The elements of each rank's part of (seq, ...), where they differ."""
        each = every.shape[1:].numel()
        sizes = [each * len(part) for part in self.parts]
        return sizes if len(set(sizes)) > 1 else None
