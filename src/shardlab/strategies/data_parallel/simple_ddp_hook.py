"""Rung 3. Communicate from inside backward: each gradient as soon as it is there."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardlab import comm
from shardlab.strategies import base, steps
from shardlab.strategies.buckets import Buckets
from shardlab.workloads.base import Batch


class SimpleDDPHook(base.Strategy):
    """All-reduce each gradient in the hook that backward calls when it is ready, and wait.

    Schedule, for n ranks and Ψ bytes of gradients:

        at construction     broadcast parameters and buffers from rank 0
        before forward      broadcast buffers from rank 0 (if the model has any)
                            all_reduce the number of targets            8 bytes
        all but the last    forward, backward                           nothing
        the last            forward; backward, and in each gradient's hook
                            all_reduce it, waiting for it               Ψ
        after backward      all_reduce which parameters got a gradient  1 byte each
                            all_reduce the loss                         8 bytes
        step                update                                      nothing

    Cost: Ψ per step, as ``simple_ddp_ga``. It starts earlier but hides nothing: backward stands
    still while a gradient travels. ``simple_ddp_async`` does not wait in the hook.

    The hook gets the *parameter*, with the sum of all micro-batches in its ``.grad``; to reduce
    the argument itself would average the weights. It must be silent until the last micro-batch.
    """

    def __init__(self, setup: base.Setup) -> None:
        super().__init__(setup)
        steps.broadcast_model(self.model, self.group)
        # Backward makes gradients roughly in the reverse of forward's order.
        self.buckets = Buckets(self.params, [[name] for name in reversed(self.params)], self.launch)

    def launch(self, bucket: int) -> None:
        """All-reduce the one gradient of a bucket. A rank that has none takes part with zeros."""
        (name,) = self.buckets.names[bucket]
        p = self.params[name]
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        self.reduce(name, p.grad)

    def reduce(self, name: str, gradient: Tensor) -> None:
        comm.all_reduce(gradient, self.group, label=f"grad {name}")

    def finish(self) -> None:
        """Nothing is under way: every hook has waited."""

    def gradients(self, microbatches: Sequence[Batch]) -> Tensor:
        steps.broadcast_buffers(self.model, self.group)
        total = steps.global_count(microbatches, self.device, self.group)
        divisor = self.update.divisor(total)
        *head, last = microbatches
        self.buckets.used.clear()
        loss_sum = steps.accumulate(self.model, self.loss_fn, head, divisor)
        with self.buckets.sending():
            loss_sum += steps.accumulate(self.model, self.loss_fn, [last], divisor)
        self.finish()
        used = [name in self.buckets.used for name in self.params]
        used = steps.any_rank(used, self.group, label="used parameters")
        for p, is_used in zip(self.params.values(), used, strict=True):
            p.grad = p.grad if is_used else None  # None: the optimizer skips it
        return steps.global_mean(loss_sum, total, self.group)
