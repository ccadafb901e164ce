"""Rung 6. ZeRO-1: every rank keeps and updates only its share of the optimizer's state."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from shardlab import comm
from shardlab.optim import traits
from shardlab.strategies import base, buckets, steps
from shardlab.strategies.buckets import Buckets, Used, last_of_step
from shardlab.strategies.flat import Unit, bucket_units
from shardlab.strategies.sharded.zero import Sharded
from shardlab.workloads.base import Batch


class Zero1(Sharded):
    """Reduce-scatter the gradients, update one share of the parameters, all-gather the rest.

    Schedule, for n ranks and Ψ bytes of gradients (and of parameters):

        at construction     broadcast parameters and buffers from rank 0
        before forward      wait for the parameters; broadcast buffers (if the model has any)
                            all_reduce the number of targets              8 bytes
        all but the last    forward, backward                             nothing
        the last            forward; all_reduce the loss, asynchronously  8 bytes
                            backward, and as soon as a bucket's last gradient is in,
                            reduce_scatter the bucket, asynchronously     Ψ
        after backward      all_reduce which parameters got a gradient, asynchronously
        step                wait for the gradients, update this rank's shard of each bucket
                            all_gather each bucket's parameters, asynchronously   Ψ

    Cost: Ψ(n-1)/n twice on the wire, together exactly an all-reduce, which is these two halves.
    (To all-reduce the gradients and gather the parameters besides would cost half as much again.)
    Memory: parameters Ψ, gradients Ψ, and of the optimizer's state one n-th. What an optimizer
    needs whole (Muon its matrices) is not cut: each has an owner, in whose shard it lies.

    Parameters and gradients live in flat buckets, views of which the model uses (those of the
    gradients from backward to update); a rank's shard is the same slice of each bucket, so both
    collectives work in place. The layout must be known when the optimizer is built, so buckets
    follow the reverse of the parameters' order.

    With ``comm_dtype: bf16`` the sum of 16-bit roundings of the gradients is sent, half the bytes
    of fp32; they are added up and kept in their own type.
    """

    BUCKETS = 4  # the approximate number of buckets, unless their size is given

    def __init__(
        self,
        setup: base.Setup,
        *,
        bucket_mb: float | None = None,
        first_bucket_mb: float = 1.0,
        comm_dtype: str = "fp32",
    ) -> None:
        super().__init__(setup)
        self.comm_dtype = buckets.comm_dtype("zero1", comm_dtype, self.params)
        sizes = bucket_mb, first_bucket_mb, self.BUCKETS
        whole = traits.kept_whole(setup.make_optimizer, "zero1")
        units = bucket_units(self.params, self.group, whole, sizes)
        self.own_units(setup, units)
        self.scatters: dict[str, comm.Pending] = {}  # under way, by the unit's label
        self.used_pending: list[comm.Pending] = []  # which parameters got a gradient
        self.gathers: list[comm.Pending] = []
        self.buckets = Buckets(self.params, [u.params for u in units], self._launch, self._take)

    def _take(self, name: str, gradient: Tensor) -> Tensor:
        """A gradient's first micro-batch goes into its bucket; the others are added there."""
        if name in self.buckets.used:
            return gradient
        return self.units[self.buckets.bucket_of[name]].grad_view(name).copy_(gradient)

    def _launch(self, bucket: int) -> None:
        unit = self.units[bucket]
        full = unit.filled()  # (padded,)
        # In place, for the rest is not needed again: (shard,).
        unit.grad = unit.layout.of_rank(full, self.rank)
        while len(self.scatters) >= self.IN_FLIGHT:  # over Gloo each holds a buffer
            self.scatters.pop(next(iter(self.scatters))).wait()
        sizes, dtype, label = unit.layout.uneven, self.comm_dtype, f"grad {unit.label}"
        self.scatters[unit.label] = comm.reduce_scatter(
            unit.grad, full, self.group, sizes=sizes, dtype=dtype, label=label, async_op=True
        )

    def settle(self) -> None:
        """Wait for what is under way."""
        for pending in (*self.scatters.values(), *self.used_pending, *self.gathers):
            pending.wait()
        self.scatters.clear()
        self.gathers.clear()

    def gradients(self, microbatches: Sequence[Batch]) -> Tensor:
        self.settle()
        steps.broadcast_buffers(self.model, self.group)
        total = steps.global_count(microbatches, self.device, self.group)
        divisor = self.update.divisor(total)
        *head, last = microbatches
        self.buckets.used.clear()
        loss_sum = steps.accumulate(self.model, self.loss_fn, head, divisor)
        with self.buckets.sending():
            loss = last_of_step(self.model, self.loss_fn, last, divisor, loss_sum, self.group)
        used = Used(self.params, self.buckets.used, self.device, self.group)
        self.used_pending = [used.pending]
        self.unused = used.unused()
        loss.wait()
        return loss_sum / total

    def step(self) -> None:
        self.settle()
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
