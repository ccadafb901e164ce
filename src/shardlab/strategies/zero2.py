"""Rung 7. ZeRO-2: gradients too are kept only for one's own share."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from shardlab import comm
from shardlab.optim import factory
from shardlab.strategies import base, refusals, steps
from shardlab.strategies.flat import Unit, bucket_units
from shardlab.strategies.overlap import InOrder
from shardlab.strategies.sharded import DTYPES, Sent, Sharded
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
        after the last      all_reduce which parameters got a gradient, and which buckets one more
                            reduce_scatter those (re-entrant checkpointing: a gradient in parts)
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
        self.comm_dtype = refusals.option("zero2's comm_dtype", comm_dtype, DTYPES)
        sizes = bucket_mb, first_bucket_mb, self.BUCKETS
        whole = factory.kept_whole(setup.make_optimizer, "zero2")
        units = bucket_units(self.params, self.group, whole, *sizes)
        self.own_units(setup, units)
        self.queue = InOrder([dict.fromkeys(unit.params, 1) for unit in units], self._launch)
        self.gathers: list[comm.Pending] = []
        for i, unit in enumerate(units):
            for name, p in unit.params.items():
                p.register_post_accumulate_grad_hook(partial(self._arrived, i, name))

    def _arrived(self, bucket: int, name: str, parameter: nn.Parameter) -> None:
        if parameter.grad is None:  # frozen after its use: autograd calls the hook all the same
            return
        self.move_gradient(self.units[bucket], name, parameter)
        self.queue.arrived(bucket, name)

    def _launch(self, bucket: int) -> None:
        """Reduce-scatter the bucket, asynchronously."""
        unit = self.units[bucket]
        full, shard = self.taken(unit)  # (padded,), (shard,)
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
        self.used.clear()
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        for batch in microbatches:
            self.queue.start()
            loss_sum += steps.accumulate(self.model, self.loss_fn, [batch], divisor)
            self.queue.flush()
            self.receive_all()
        self._send_late()
        return steps.global_mean(loss_sum, total, self.group)

    def _send_late(self) -> None:
        """Gradients that came when their bucket was gone have begun a new one."""
        late = [unit.full_grad is not None for unit in self.units]
        flags = [*(name in self.used for name in self.params), *late]
        found = iter(steps.any_rank(flags, self.group, label="used parameters"))
        self.unused = [name for name in self.params if not next(found)]
        for bucket, is_late in enumerate(found):
            if is_late:
                self._launch(bucket)
        self.receive_all()

    def step(self) -> None:
        self.update_shards(then=self._gather)
        for unit in self.units:
            unit.grad = unit.full_grad = None
        steps.drop_gradients(self.params)

    def _gather(self, unit: Unit) -> None:
        assert unit.full is not None
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
