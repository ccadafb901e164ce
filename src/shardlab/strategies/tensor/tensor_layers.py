"""Layers of which each rank has a part, and where their ranks meet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from shardlab import comm

# ------------------------------------------------------------------ where ranks meet


class Stream:
    """The residual stream, from which layers take and to which they add: every rank has all of it.
    (In ``sequence_layers.py``, a rank has some of the positions.)"""

    def __init__(self, group: comm.Group) -> None:
        self.group = group

    def enter(self, x: Tensor, label: str) -> Tensor:
        """From the stream into the ranks' parts: every rank gets all of it."""
        return enter(x, self.group, label)

    def leave(self, x: Tensor, label: str) -> Tensor:
        """From the parts back to the stream: the sum over the ranks."""
        return leave(x, self.group, label)


class _Enter(torch.autograd.Function):
    """Nothing forward. Each rank's part gives a part of the gradient: backward sums them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: comm.Group, label: str) -> Tensor:
        ctx.group, ctx.label = group, label
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        # A copy: autograd may have given the same tensor to somebody else.
        total = gradient.clone(memory_format=torch.contiguous_format)
        comm.all_reduce(total, ctx.group, label=f"activation gradients {ctx.label}")
        return total, None, None


class _Leave(torch.autograd.Function):
    """The sum over the ranks. Each summand's gradient is the sum's: backward does nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: comm.Group, label: str) -> Tensor:
        ctx.mark_dirty(x)
        comm.all_reduce(x, group, label=f"activations {label}")
        return x

    @staticmethod
    @once_differentiable
    def backward(_ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient, None, None


def enter(x: Tensor, group: comm.Group, label: str) -> Tensor:
    out: Tensor = _Enter.apply(x, group, label)  # type: ignore[no-untyped-call]
    return out


def leave(x: Tensor, group: comm.Group, label: str) -> Tensor:
    """``x`` itself becomes the sum."""
    out: Tensor = _Leave.apply(x, group, label)  # type: ignore[no-untyped-call]
    return out


# What the ranks make of a tensor, and the label of what they send for it.
Move = Callable[[Tensor, str], Tensor]


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Move, back: Move, label: str) -> Tensor:
        ctx.back, ctx.label = back, label
        return there(x, f"activations {label}")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.back(gradient, f"activation gradients {ctx.label}"), None, None, None


def exchanged(x: Tensor, there: Move, back: Move, label: str) -> Tensor:
    """What ``there`` makes of x; backward, ``back`` makes x's gradient of that of the result."""
    out: Tensor = _Exchanged.apply(x, there, back, label)  # type: ignore[no-untyped-call]
    return out


# ------------------------------------------------------------------ layers


class LinearPart(NamedTuple):
    """What this rank keeps of a linear layer."""

    weight: nn.Parameter  # (out, in), of which one is cut; transposed: (in, out)
    bias: nn.Parameter | None  # (out,)
    is_transposed: bool
    label: str


class SplitLinear(nn.Module):
    def __init__(self, part: LinearPart) -> None:
        super().__init__()
        self.weight, self.bias, self.is_transposed, self.label = part

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:  # (..., in) to (..., out)
        return F.linear(x, self.weight.t() if self.is_transposed else self.weight, bias)


class ColumnLinear(SplitLinear):
    """Some of a layer's outputs. ``stream`` is None in a branch whose layers share what entered."""

    def __init__(self, part: LinearPart, stream: Stream | None) -> None:
        super().__init__(part)
        self.stream = stream

    def forward(self, x: Tensor) -> Tensor:  # (..., in) to (..., columns)
        x = x if self.stream is None else self.stream.enter(x, self.label)
        return self.product(x, self.bias)


class RowLinear(SplitLinear):
    """A layer with some of the inputs. Its outputs are summands, and the bias is added to their
    sum, once."""

    def __init__(self, part: LinearPart, stream: Stream) -> None:
        super().__init__(part)
        self.stream = stream

    def forward(self, x: Tensor) -> Tensor:  # (..., rows) to (..., out)
        y = self.stream.leave(self.product(x, None), self.label)
        return y if self.bias is None else y + self.bias
