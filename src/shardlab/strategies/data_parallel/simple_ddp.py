"""Rung 1. Data parallelism with nothing clever: all-reduce each gradient after backward."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shardlab import comm
from shardlab.strategies import base, steps
from shardlab.workloads.base import Batch


class SimpleDDP(base.Strategy):
    """All-reduce each gradient, one by one, after every micro-batch's backward.

    Schedule, for n ranks and Ψ bytes of gradients:

        at construction     broadcast parameters and buffers from rank 0
        before forward      broadcast buffers from rank 0 (if the model has any)
                            all_reduce the number of targets            8 bytes
        each micro-batch    forward, backward                           nothing
                            all_reduce which parameters got a gradient  1 byte each
                            all_reduce each gradient, waiting for it    Ψ
        after the last      all_reduce the loss                         8 bytes
        step                update                                      nothing

    Cost: Ψ per micro-batch (2Ψ(n-1)/n on the wire), all of it exposed: nothing computes while
    it runs. One call per parameter pays the latency of each. It knows nothing of gradient
    accumulation: k micro-batches cost k times the bytes, which ``simple_ddp_ga`` avoids.
    """

    def __init__(self, setup: base.Setup) -> None:
        super().__init__(setup)
        steps.broadcast_model(self.model, self.group)

    def gradients(self, microbatches: Sequence[Batch]) -> Tensor:
        steps.broadcast_buffers(self.model, self.group)
        total = steps.global_count(microbatches, self.device, self.group)
        divisor = self.update.divisor(total)
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        summed: dict[str, Tensor] = {}  # of the micro-batches so far, over all ranks
        for batch in microbatches:
            loss_sum += steps.accumulate(self.model, self.loss_fn, [batch], divisor)
            all_reduce_gradients(self.params, self.group)
            # Set aside what is summed already: the next all-reduce would count it n times.
            for name, p in self.params.items():
                if p.grad is not None:
                    summed[name] = summed[name] + p.grad if name in summed else p.grad
                    p.grad = None
        for name, gradient in summed.items():
            self.params[name].grad = gradient
        return steps.global_mean(loss_sum, total, self.group)


def all_reduce_gradients(params: dict[str, nn.Parameter], group: comm.Group) -> None:
    """Each gradient becomes its sum over the ranks. Every loss was divided by the global count
    already, so the sum is the mean over all targets: no division by n.

    A parameter with a gradient on some ranks only (a branch not taken) counts as zero on the
    others. With a gradient on none it keeps None: the optimizer must skip it, as it would in
    one process. Ranks that disagreed about it would hang, so they agree first.
    """
    used = [p.grad is not None for p in params.values()]
    used = steps.any_rank(used, group, label="used parameters")
    for (name, p), is_used in zip(params.items(), used, strict=True):
        if is_used:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            comm.all_reduce(p.grad, group, label=f"grad {name}")
