"""Tensor parallelism: every rank has a part of each layer, and all ranks work on the same batch.

A layer by columns has some of the outputs, the next by rows has the inputs that these are. What a
rank computes between the two is its own: some heads, some channels of the MLP. Two functions are
where ranks meet, each the other's backward: ``enter``, where what all ranks hold goes into their
parts, and ``leave``, where the parts of a sum are added up.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from shardlab import comm

# ------------------------------------------------------------------ where ranks meet


class Stream(ABC):
    """How the residual stream, from which layers take and to which they add, lies on the ranks."""

    def __init__(self, group: comm.Group) -> None:
        self.group = group

    @abstractmethod
    def enter(self, x: Tensor, label: str) -> Tensor:
        """From the stream into the ranks' parts: every rank gets all of it."""

    @abstractmethod
    def leave(self, x: Tensor, label: str) -> Tensor:
        """From the parts back to the stream: the sum over the ranks."""


class Whole(Stream):
    """Every rank holds the whole stream."""

    def enter(self, x: Tensor, label: str) -> Tensor:
        return enter(x, self.group, label)

    def leave(self, x: Tensor, label: str) -> Tensor:
        return leave(x, self.group, label)


class _Enter(torch.autograd.Function):
    """Nothing forward. Each rank's part gives a part of the gradient: backward sums them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: comm.Group, label: str) -> Tensor:
        ctx.group, ctx.label = group, label
        return x.view_as(x)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        # A copy: autograd may have given the same tensor to somebody else.
        total = gradient.clone(memory_format=torch.contiguous_format)
        comm.all_reduce(total, ctx.group, label=f"activation gradients {ctx.label}")
        return total, None, None


class _Leave(torch.autograd.Function):
    """The sum over the ranks. Each of its summands has the sum's gradient: backward does nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: comm.Group, label: str) -> Tensor:
        ctx.mark_dirty(x)
        comm.all_reduce(x, group, label=f"activations {label}")
        return x

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(_ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient, None, None


def enter(x: Tensor, group: comm.Group, label: str) -> Tensor:
    out: Tensor = _Enter.apply(x, group, label)  # type: ignore[no-untyped-call]
    return out


def leave(x: Tensor, group: comm.Group, label: str) -> Tensor:
    """``x`` itself becomes the sum."""
    out: Tensor = _Leave.apply(x, group, label)  # type: ignore[no-untyped-call]
    return out


# ------------------------------------------------------------------ layers


class ColumnLinear(nn.Module):
    """Some of a layer's outputs. ``stream`` is None in a branch whose layers share what entered."""

    def __init__(
        self,
        weight: nn.Parameter,  # (columns, in); transposed: (in, columns)
        bias: nn.Parameter | None,  # (columns,)
        is_transposed: bool,
        stream: Stream | None,
        label: str,
    ) -> None:
        super().__init__()
        self.weight, self.bias, self.is_transposed = weight, bias, is_transposed
        self.stream, self.label = stream, label

    def forward(self, x: Tensor) -> Tensor:  # (..., in) to (..., columns)
        if self.stream is not None:
            x = self.stream.enter(x, self.label)
        return F.linear(x, self.weight.t() if self.is_transposed else self.weight, self.bias)


class RowLinear(nn.Module):
    """A layer with some of the inputs. Its outputs are summands, and the bias is added to their
    sum, once."""

    def __init__(
        self,
        weight: nn.Parameter,  # (out, rows); transposed: (rows, out)
        bias: nn.Parameter | None,  # (out,)
        is_transposed: bool,
        stream: Stream,
        label: str,
    ) -> None:
        super().__init__()
        self.weight, self.bias, self.is_transposed = weight, bias, is_transposed
        self.stream, self.label = stream, label

    def forward(self, x: Tensor) -> Tensor:  # (..., rows) to (..., out)
        y = F.linear(x, self.weight.t() if self.is_transposed else self.weight)
        y = self.stream.leave(y, self.label)
        return y if self.bias is None else y + self.bias
