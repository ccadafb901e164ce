"""Which elements of the whole model a rank holds, where an axis of the mesh cuts it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardlab import comm
from shardlab.workloads.base import Batch, LossFn

if TYPE_CHECKING:
    from shardlab.strategies.pipeline import Pipeline

Runs = tuple[tuple[int, int], ...]  # (start, length) in a flattened tensor, in the part's order


@dataclass(frozen=True)
class Held:
    """What a rank holds of one tensor of the whole model."""

    shape: torch.Size  # of the whole
    runs: Runs  # where the part's elements lie in the flattened whole

    def between(self, start: int, length: int) -> Runs:
        """The runs of ``length`` elements of the part, from its ``start`` on."""
        found, end, at = [], start + length, 0
        for first, size in self.runs:
            low, high = max(start, at), min(end, at + size)
            if low < high:
                found.append((first + low - at, high - low))
            at += size
        return tuple(found)


Layout = dict[str, Held]  # by the tensor's first name; what is missing is not held here


@dataclass
class Cut:
    """What an axis has done to the model of this rank."""

    layout: Layout  # every parameter and buffer that this rank holds now
    loss: LossFn  # the loss to use from now on
    # Parameters whose gradient here is a part of a sum over a group. Their sum is made in backward.
    partial: dict[str, comm.Group] = field(default_factory=dict)
    # This rank's part of a micro-batch, where an axis cuts that, too; None: all of it.
    share: Callable[[Batch], Batch] | None = None
    # ``function(model, batch)`` where no rank can run the model alone; None: any can.
    infer: Callable[[Callable[[nn.Module, Batch], Any], Batch], Any] | None = None
    # Takes a function that says by what the step's loss will be divided, for what runs backward
    # before that.
    ask_divisor: Callable[[Callable[[], Tensor | None]], None] = lambda _ask: None
    executor: Pipeline | None = None  # runs the stages of a pipeline


def whole(tensor: Tensor) -> Held:
    return Held(tensor.shape, ((0, tensor.numel()),))


def whole_layout(model: nn.Module) -> Layout:
    """Everything, as before any cut."""
    return {name: whole(t) for name, t in (*model.named_parameters(), *model.named_buffers())}


def rows(shape: Sequence[int], ranges: Sequence[range], dim: int = 0) -> Held:
    """The part that keeps these ranges of indices along ``dim``, one after the other."""
    inner = math.prod(shape[dim + 1 :])
    size = shape[dim] * inner
    runs: list[tuple[int, int]] = []
    for outer in range(math.prod(shape[:dim])):
        for kept in ranges:
            start, length = outer * size + kept.start * inner, len(kept) * inner
            if runs and sum(runs[-1]) == start:
                runs[-1] = runs[-1][0], runs[-1][1] + length
            elif length:
                runs.append((start, length))
    return Held(torch.Size(shape), tuple(runs))


def inside(outer: Held, inner: Held) -> Held:
    """A part of a part: ``inner`` counts in the elements of ``outer``'s part."""
    runs = [run for start, length in inner.runs for run in outer.between(start, length)]
    return Held(outer.shape, tuple(runs))


def take(values: Tensor, runs: Runs) -> Tensor:
    """The elements of these runs of a flattened tensor: (length,)."""
    return torch.cat([values[start : start + length] for start, length in runs] or [values[:0]])


def put(values: Tensor, runs: Runs, part: Tensor) -> None:
    """Write a part to its places in a flattened tensor."""
    at = 0
    for start, length in runs:
        values[start : start + length] = part[at : at + length]
        at += length
