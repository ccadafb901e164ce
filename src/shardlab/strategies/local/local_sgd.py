"""Workers that train apart, and average their parameters now and then."""

from __future__ import annotations

import torch

from shardlab import comm
from shardlab.strategies import base, steps
from shardlab.strategies.local.workers import Workers


class LocalSGD(Workers):
    """Each rank takes ``every`` steps of its own; then all average their parameters.

    Schedule, for n ranks and Ψ bytes of parameters that train:

        at construction     broadcast parameters and buffers from rank 0
        each step           forward and backward of this rank's micro-batches; meanwhile
                            all_reduce the loss with its number of targets  16 bytes
        step                update, from this rank's own gradients          nothing
        each every-th step  all_reduce parameters, each times its share     Ψ
                            broadcast buffers from rank 0 (if the model has any)

    Cost: Ψ / every in a step on average, all of it exposed. It is not what one process computes: in
    between, every worker follows its own samples. A worker's share is that of the targets that it
    has seen since the last average, so with ``every=1`` and plain SGD this is data parallelism.
    """

    def __init__(self, setup: base.Setup, *, every: int = 10) -> None:
        super().__init__(setup, base.Rounds(every))

    @torch.no_grad()
    def exchange(self) -> None:
        share = self.share(self.seen)
        under_way = [
            comm.all_reduce(p.mul_(share), self.group, label=f"param {name}", async_op=True)
            for name, p in self.params.items()
        ]
        for pending in under_way:
            pending.wait()
        steps.broadcast_buffers(self.model, self.group)
