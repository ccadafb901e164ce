"""Rung 2. Gradient accumulation: communicate once per step, not once per micro-batch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from shardlab.strategies import base
from shardlab.strategies.simple_ddp import SimpleDDP, all_reduce_gradients
from shardlab.workloads.base import Batch


class SimpleDDPGradientAccumulation(SimpleDDP):
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

    def gradients(self, microbatches: Sequence[Batch]) -> Tensor:
        base.broadcast_buffers(self.model, self.group)
        total = base.global_count(microbatches, self.device, self.group)
        divisor = self.update.divisor(total)
        loss_sum = base.accumulate(self.model, self.loss_fn, microbatches, divisor)
        all_reduce_gradients(self.params, self.group, self.compressor)
        return base.global_mean(loss_sum, total, self.group)
