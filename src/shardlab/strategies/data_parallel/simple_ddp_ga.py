"""Rung 2. Gradient accumulation: communicate once per step, not once per micro-batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardlab import comm
from shardlab.strategies import base, steps
from shardlab.workloads.base import Batch


class SimpleDDPGradientAccumulation(base.Strategy):
    """Add up the micro-batches' gradients locally, then all-reduce each once.

    Schedule, for n ranks and Ψ bytes of gradients:

        at construction     broadcast parameters and buffers from rank 0
        before forward      broadcast buffers from rank 0 (if the model has any)
                            all_reduce the number of targets            8 bytes
        each micro-batch    forward, backward                           nothing
        after the last      all_reduce which parameters got a gradient  1 byte each
                            all_reduce each gradient, waiting for it    Ψ
                            all_reduce the loss                         8 bytes
        step                update                                      nothing

    Cost: Ψ per step, whatever the number of micro-batches, and no gradient is kept twice. A
    sum of sums is a sum: the result is that of ``simple_ddp`` up to rounding. Still exposed.
    """

    def __init__(self, setup: base.Setup) -> None:
        super().__init__(setup)
        steps.broadcast_model(self.model, self.group)

    def gradients(self, microbatches: Sequence[Batch]) -> Tensor:
        steps.broadcast_buffers(self.model, self.group)
        total = steps.global_count(microbatches, self.device, self.group)
        divisor = self.update.divisor(total)
        loss_sum = steps.accumulate(self.model, self.loss_fn, microbatches, divisor)
        used = [p.grad is not None for p in self.params.values()]
        used = steps.any_rank(used, self.group, label="used parameters")
        for (name, p), is_used in zip(self.params.items(), used, strict=True):
            if is_used:  # on any rank: one without this gradient takes part with zeros
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                comm.all_reduce(p.grad, self.group, label=f"grad {name}")
        return steps.global_mean(loss_sum, total, self.group)
