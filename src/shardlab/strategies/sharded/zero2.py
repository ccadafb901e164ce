"""Rung 7. ZeRO-2: gradients too are kept only for one's own share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardlab import comm
from shardlab.optim import traits
from shardlab.strategies import base, buckets, steps
from shardlab.strategies.buckets import Buckets
from shardlab.strategies.flat import Unit, bucket_units
from shardlab.strategies.sharded.zero import Sent, Sharded
from shardlab.workloads.base import Batch


class Zero2(Sharded):
    """Reduce-scatter each bucket of gradients as backward fills it, and free it at once.

    Schedule, for n ranks, Ψ bytes of gradients and k micro-batches:

        at construction     broadcast parameters and buffers from rank 0
        before forward      wait for the parameters; broadcast buffers (if the model has any)
                            all_reduce the number of targets              8 bytes
        each micro-batch    forward; backward: a gradient moves into its bucket's buffer (made
                            when its first gradient comes), and when the last is in,
                            reduce_scatter the bucket, asynchronously     Ψ
                            add the result to this rank's shard, free the buffer
        after the last      all_reduce which parameters got a gradient
                            all_reduce the loss                           8 bytes
        step                update this rank's shard of each bucket
                            all_gather each bucket's parameters, asynchronously   Ψ

    Cost: (k+1)Ψ(n-1)/n on the wire: with accumulation the gradients must travel each time, for
    there is no room to add them up. Memory: parameters Ψ; of gradients and optimizer state one
    n-th, plus the buckets under way, of which there are at most ``IN_FLIGHT``. A ZeRO-2 that frees
    only after backward has ZeRO-1's peak. What an optimizer needs whole (Muon its matrices) is not
    cut: each has an owner, in whose shard it lies.
    """

    BUCKETS = 16  # smaller than ZeRO-1's: three buffers of a bucket's size are what it saves on

    def __init__(
        self,
        setup: base.Setup,
        *,
        bucket_mb: float | None = None,
        first_bucket_mb: float = 1.0,
        comm_dtype: str = "fp32",
    ) -> None:
        super().__init__(setup)
        dtype = buckets.comm_dtype("zero2", comm_dtype, self.params)
        sizes = bucket_mb, first_bucket_mb, self.BUCKETS
        whole = traits.kept_whole(setup.make_optimizer, "zero2")
        units = bucket_units(self.params, self.group, whole, sizes, dtype)
        self.own_units(setup, units)
        self.gathers: list[comm.Pending] = []
        self.buckets = Buckets(self.params, [u.params for u in units], self._launch, self._take)

    def _take(self, name: str, gradient: Tensor) -> None:
        """The gradient moves into its bucket's buffer, and backward's own tensor is freed."""
        self.units[self.buckets.bucket_of[name]].grad_view(name).copy_(gradient)

    def _launch(self, bucket: int) -> None:
        """Reduce-scatter the bucket, asynchronously."""
        unit = self.units[bucket]
        full, shard = self.send_buffers(unit)  # (padded,), (shard,)
        sizes, label = unit.layout.uneven, f"grad {unit.label}"
        pending = comm.reduce_scatter(
            shard, full, self.group, sizes=sizes, label=label, async_op=True
        )
        self.in_flight.append(Sent(unit, full, shard, pending))

    def gradients(self, microbatches: Sequence[Batch]) -> Tensor:
        self.settle()
        steps.broadcast_buffers(self.model, self.group)
        total = steps.global_count(microbatches, self.device, self.group)
        divisor = self.update.divisor(total)
        self.buckets.used.clear()
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        for batch in microbatches:
            with self.buckets.sending():
                loss_sum += steps.accumulate(self.model, self.loss_fn, [batch], divisor)
            self.receive_all()
        used = [name in self.buckets.used for name in self.params]
        used = steps.any_rank(used, self.group, label="used parameters")
        self.unused = [n for n, is_used in zip(self.params, used, strict=True) if not is_used]
        return steps.global_mean(loss_sum, total, self.group)

    def step(self) -> None:
        super().step()
        for unit in self.units:
            self._gather(unit)

    def _gather(self, unit: Unit) -> None:
        sizes, label = unit.layout.uneven, f"params {unit.label}"
        self.gathers.append(
            comm.all_gather(
                unit.full, unit.shard, self.group, sizes=sizes, label=label, async_op=True
            )
        )

    def settle(self) -> None:
        """Wait for the parameters that are under way."""
        for pending in self.gathers:
            pending.wait()
        self.gathers.clear()
