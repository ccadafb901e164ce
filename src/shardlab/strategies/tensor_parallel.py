"""Tensor parallelism: every rank has a part of each layer, and all work on the same samples."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from shardlab import comm
from shardlab.strategies.on_mesh import OnMesh


class TensorParallel(OnMesh):
    """Ranks share each layer's weights, and send activations instead of gradients.

    A layer by columns has some of the outputs, and the next, by rows, has just these as inputs.
    What a rank computes between the two is its own: some heads, some channels of an MLP. So in each
    half of a block (attention, MLP) ranks meet twice: where the residual stream goes into their
    parts (``enter``: nothing forward, a sum backward), and where what their parts add to it is
    summed (``leave``: the reverse). The embedding and the head have some of the tokens each
    (``vocabulary.py``), and which module is split how the workload says (``splits.py``).

    Schedule, for n ranks, L blocks, and A bytes of the residual stream (batch x positions x dim):

        at construction     broadcast parameters and buffers from rank 0; each keeps its part
        forward             all_reduce activations after the embedding  A
                            all_reduce activations after each half      2LA
                            all_reduce the loss's maxima, then its sums 3 numbers per target
        backward            all_reduce activation gradients of the head A
                            all_reduce activation gradients, each half  2LA
        step                update                                      nothing

    Cost: (4L + 2)A for each micro-batch, all of it exposed: the next layer needs the sum. It does
    not grow with the model's width squared, as gradients do, but it does with the batch. What a
    rank holds of split layers, their gradients and optimizer state is 1/n; norms and the residual
    stream every rank has whole, which ``sequence_parallel`` mends. If only some of the ranks share
    a model (``tensor_parallel:tensor=2`` on 4), the others share the data as bucket_ddp_async does.
    """


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
