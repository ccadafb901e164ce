"""Rung 6. ZeRO-1: every rank keeps and updates only its share of the optimizer's state."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor, nn

from shardlab import comm
from shardlab.optim import factory
from shardlab.strategies import base, overlap, refusals, steps
from shardlab.strategies.flat import Unit, bucket_units
from shardlab.strategies.overlap import InOrder
from shardlab.strategies.sharded import Sharded
from shardlab.workloads.base import Batch


class Zero1(Sharded):
    """Reduce-scatter the gradients, update one share of the parameters, all-gather the rest.

    Schedule, for n ranks and Ψ bytes of gradients (and as many of parameters):

        at construction     broadcast parameters and buffers from rank 0
        before forward      wait for the parameters; broadcast buffers (if the model has any)
                            all_reduce the number of targets              8 bytes
        all but the last    forward, backward                             nothing
        the last            forward; all_reduce the loss, asynchronously  8 bytes
                            backward, and as soon as a bucket's last gradient is in,
                            reduce_scatter the bucket, asynchronously     Ψ
        after backward      all_reduce which parameters got a gradient, asynchronously
        step                bucket by bucket: wait for it, update this rank's shard of it,
                            all_gather its parameters, asynchronously     Ψ

    Cost: Ψ(n-1)/n twice on the wire, together exactly an all-reduce, which is these two halves.
    (To all-reduce the gradients and gather the parameters besides would cost half as much again.)
    Memory: parameters Ψ, gradients Ψ, and of the optimizer's state one n-th. What an optimizer
    needs whole (Muon its matrices) is not cut: each has an owner, in whose shard it lies.

    Parameters and gradients live in flat buckets, views of which the model uses (those of the
    gradients from backward to update); a rank's shard is the same slice of each bucket, so both
    collectives work in place. The layout must be known
    when the optimizer is built, so buckets follow the reverse of the parameters' order.

    How often each gradient comes in a backward (re-entrant checkpointing may give it in parts) is
    learnt in the first step, which sends after backward. One that comes more often later, when its
    bucket is gone, is refused.
    """

    BUCKETS = 4  # the approximate number of buckets, unless their size is given

    def __init__(
        self,
        setup: base.Setup,
        *,
        bucket_mb: float | None = None,
        first_bucket_mb: float = 1.0,
    ) -> None:
        super().__init__(setup)
        sizes = bucket_mb, first_bucket_mb, self.BUCKETS
        whole = factory.kept_whole(setup.make_optimizer, "zero1")
        units = bucket_units(self.params, self.group, whole, *sizes)
        self.own_units(setup, units)
        self.is_last = False  # micro-batch of the step
        self.queue = InOrder([dict.fromkeys(unit.params, 1) for unit in units], self._launch)
        self.times: dict[str, int] = {}  # how often each gradient came in the first step
        self.has_learnt = False
        self.scatters: dict[str, comm.Pending] = {}  # under way, by the unit's label
        self.news: list[comm.Pending] = []  # which parameters got a gradient
        self.gathers: list[comm.Pending] = []
        for i, unit in enumerate(units):
            for name, p in unit.params.items():
                p.register_post_accumulate_grad_hook(partial(self._arrived, i, name))

    def _arrived(self, bucket: int, name: str, parameter: nn.Parameter) -> None:
        """A gradient's first micro-batch goes into its bucket; the others are added there."""
        if parameter.grad is None:  # frozen after its use: autograd calls the hook all the same
            return
        if name not in self.used:
            parameter.grad = self.place(self.units[bucket], name).copy_(parameter.grad)
            self.used.add(name)
        if self.is_last and not self.has_learnt:
            self.times[name] = self.times.get(name, 0) + 1
        elif self.is_last and not self.queue.arrived(bucket, name):
            raise refusals.came_again("zero1", name)

    def _launch(self, bucket: int) -> None:
        unit = self.units[bucket]
        full = self.filled(unit)
        unit.grad = unit.layout.of_rank(full, self.rank)  # in place: the rest is not needed again
        while len(self.scatters) >= self.IN_FLIGHT:  # over Gloo each holds a buffer
            self.scatters.pop(next(iter(self.scatters))).wait()
        sizes, label = unit.layout.uneven, f"grad {unit.label}"
        self.scatters[unit.label] = comm.reduce_scatter(
            unit.grad, full, self.group, sizes=sizes, label=label, async_op=True
        )

    def await_gradient(self, unit: Unit) -> None:
        if unit.label in self.scatters:
            self.scatters.pop(unit.label).wait()

    def settle(self) -> None:
        """Wait for what is under way."""
        for pending in (*self.scatters.values(), *self.news, *self.gathers):
            pending.wait()
        self.scatters.clear()
        self.gathers.clear()

    def gradients(self, microbatches: Sequence[Batch]) -> Tensor:
        self.settle()
        steps.broadcast_buffers(self.model, self.group)
        total = steps.global_count(microbatches, self.device, self.group)
        divisor = self.update.divisor(total)
        *head, last = microbatches
        self.used.clear()
        self.queue.start()
        loss_sum = steps.accumulate(self.model, self.loss_fn, head, divisor)
        self.is_last = True
        loss = overlap.last_of_step(self.model, self.loss_fn, last, divisor, loss_sum, self.group)
        self.is_last = False
        self.queue.flush()
        if not self.has_learnt:
            self.has_learnt = True
            self.queue.needs = [
                {name: max(1, self.times.get(name, 0)) for name in unit.params}
                for unit in self.units
            ]
        used = overlap.Used(self.params, self.used, self.device, self.group)
        self.news = [used.pending]
        self.unused = used.unused()
        loss.wait()
        return loss_sum / total

    def step(self) -> None:
        self.update_shards(then=self._gather)
        for pending in self.news:
            pending.wait()
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
