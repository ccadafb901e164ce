"""Rung 4. Overlap: let gradients travel while backward computes."""

from __future__ import annotations

from torch import Tensor

from shardlab import comm
from shardlab.strategies import base
from shardlab.strategies.data_parallel.simple_ddp_hook import SimpleDDPHook


class SimpleDDPAsync(SimpleDDPHook):
    """All-reduce each gradient from its hook without waiting; wait for all after backward.

    Schedule, for n ranks and Ψ bytes of gradients:

        at construction     broadcast parameters and buffers from rank 0
        before forward      broadcast buffers from rank 0 (if the model has any)
                            all_reduce the number of targets            8 bytes
        all but the last    forward, backward                           nothing
        the last            forward; backward, and in each gradient's hook
                            all_reduce it, asynchronously               Ψ
        after backward      wait for all of them
                            all_reduce which parameters got a gradient  1 byte each
                            all_reduce the loss                         8 bytes
        step                update                                      nothing

    Cost: Ψ per step, hidden behind backward but for the last gradients. Still a message per
    parameter: a bias of a few bytes pays the latency of a matrix. See ``bucket_ddp_async``.
    """

    def __init__(self, setup: base.Setup) -> None:
        super().__init__(setup)
        self.under_way: list[comm.Pending] = []

    def reduce(self, name: str, gradient: Tensor) -> None:
        pending = comm.all_reduce(gradient, self.group, label=f"grad {name}", async_op=True)
        self.under_way.append(pending)

    def finish(self) -> None:
        """Not to wait here is the classic mistake: the update would read half-summed gradients."""
        for pending in self.under_way:
            pending.wait()
        self.under_way.clear()
