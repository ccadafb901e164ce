"""Planted bugs, each one that real code has had. The conformance suite must catch every one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardlab import comm
from shardlab.strategies import base
from shardlab.strategies.replica import Replica
from shardlab.strategies.simple_ddp import all_reduce_gradients
from shardlab.strategies.simple_ddp_ga import SimpleDDPGradientAccumulation as Right
from shardlab.workloads.base import Batch


class NoAveraging(Right):
    """Each rank divides by its own count, and the sum over ranks is n times too large."""

    def gradients(self, microbatches: Sequence[Batch]) -> Tensor:
        base.broadcast_buffers(self.model, self.group)
        total = base.global_count(microbatches, self.device, self.group)
        local = base.local_count(microbatches, self.device).clamp(min=1)
        loss_sum = base.accumulate(self.model, self.loss_fn, microbatches, local)
        all_reduce_gradients(self.params, self.group)
        return base.global_mean(loss_sum, total, self.group)


class AveragesWeights(Right):
    """The hook's argument is taken for the gradient; it is the parameter."""

    def gradients(self, microbatches: Sequence[Batch]) -> Tensor:
        base.broadcast_buffers(self.model, self.group)
        total = base.global_count(microbatches, self.device, self.group)
        loss_sum = base.accumulate(self.model, self.loss_fn, microbatches, total)
        for p in self.params.values():
            comm.all_reduce(p.data, self.group)
            p.data /= self.group.size()
        return base.global_mean(loss_sum, total, self.group)


class ReducesOnlyTheLast(Right):
    """The gradients of all micro-batches but the last stay on their rank."""

    def gradients(self, microbatches: Sequence[Batch]) -> Tensor:
        base.broadcast_buffers(self.model, self.group)
        total = base.global_count(microbatches, self.device, self.group)
        *head, last = microbatches
        loss_sum = base.accumulate(self.model, self.loss_fn, head, total)
        kept = {name: p.grad for name, p in self.params.items()}
        for p in self.params.values():
            p.grad = None
        loss_sum += base.accumulate(self.model, self.loss_fn, [last], total)
        all_reduce_gradients(self.params, self.group)
        for name, p in self.params.items():
            local = kept[name]
            if local is not None:
                p.grad = local if p.grad is None else p.grad + local
        return base.global_mean(loss_sum, total, self.group)


class NoBroadcast(Right):
    """Each rank starts from its own weights (buffers are still sent, each step)."""

    def __init__(self, *args: Any, **options: Any) -> None:
        Replica.__init__(self, *args, **options)


class NoBufferBroadcast(Right):
    """Running statistics drift apart."""

    def gradients(self, microbatches: Sequence[Batch]) -> Tensor:
        total = base.global_count(microbatches, self.device, self.group)
        loss_sum = base.accumulate(self.model, self.loss_fn, microbatches, total)
        all_reduce_gradients(self.params, self.group)
        return base.global_mean(loss_sum, total, self.group)

    def full_params(self) -> dict[str, Tensor]:
        tensors = (*self.model.named_parameters(), *self.model.named_buffers())
        return {name: t.detach().clone() for name, t in tensors}


class MeanOfMeans(Right):
    """The mean over ranks of each rank's mean: wrong as soon as their counts differ."""

    def gradients(self, microbatches: Sequence[Batch]) -> Tensor:
        base.broadcast_buffers(self.model, self.group)
        local = base.local_count(microbatches, self.device).clamp(min=1)
        ranks = self.group.size()
        loss_sum = base.accumulate(self.model, self.loss_fn, microbatches, local * ranks)
        all_reduce_gradients(self.params, self.group)
        return base.global_mean(loss_sum / local, torch.tensor(float(ranks)), self.group)


class ReadsAnothersData(Right):
    """The local rank taken for the data rank: on a second host, the same samples again."""

    def gradients(self, microbatches: Sequence[Batch]) -> Tensor:
        box = [list(microbatches)]
        dist.broadcast_object_list(box, src=0)
        return super().gradients(box[0])


SABOTEURS = [
    NoAveraging,
    AveragesWeights,
    ReducesOnlyTheLast,
    NoBroadcast,
    NoBufferBroadcast,
    MeanOfMeans,
    ReadsAnothersData,
]
