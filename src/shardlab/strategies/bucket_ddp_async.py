"""Rung 5. Few large messages: gradients live in flat buckets, sent when full."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from shardlab import comm
from shardlab.errors import UsageError
from shardlab.optim import factory
from shardlab.strategies import base, overlap, refusals, steps
from shardlab.strategies.bucket_size import AUTO, BucketSize
from shardlab.strategies.compress import Compressing, Waitable
from shardlab.strategies.flat import Layout, new_flat
from shardlab.strategies.groups import inside_and_between
from shardlab.strategies.overlap import InOrder, buckets_of
from shardlab.workloads.base import Batch


class BucketDDPAsync(Compressing):
    """All-reduce whole buckets of gradients, each launched by the hook of its last gradient.

    Schedule, for n ranks and Ψ bytes of gradients:

        at construction     broadcast parameters and buffers from rank 0
        first step          learn the order in which gradients come; broadcast rank 0's order;
                            lay out the buckets; all_reduce them          Ψ, after backward
                            (large models measure the link before: ``bucket_size.py``)
        before forward      broadcast buffers from rank 0 (if the model has any)
                            all_reduce the number of targets              8 bytes
        all but the last    forward, backward                             nothing
        the last            forward; all_reduce the loss, asynchronously  8 bytes
                            backward, and as soon as a bucket's last gradient is in,
                            all_reduce the bucket, asynchronously         Ψ
        after backward      all_reduce which parameters got a gradient, asynchronously
        step                bucket by bucket: wait for it, update         nothing

    Cost: Ψ per step in a few messages, hidden behind backward and, for the last buckets, behind
    the update of the first (which must wait for all if it needs the norm of the whole gradient).
    Backward's results are written into the buckets once, where they are added up, sent and read by
    the optimizer: nothing is packed or unpacked. Ψ bytes stay allocated.
    Buckets filled in forward order would all be ready last, and nothing would overlap.

    How often each gradient comes in a backward (re-entrant checkpointing may give it in parts) is
    learnt in the first step. One that comes more often later, when its bucket is gone, is refused.

    With ``hierarchical``, for nodes of s ranks each, a bucket is not all-reduced at once, but

        inside the node     reduce_scatter the bucket, asynchronously     Ψ
        between the nodes   all_reduce this rank's part, asynchronously   Ψ/s
        inside the node     all_gather the bucket, asynchronously         Ψ

    each begun when the next bucket is full, or after backward. A node sends 2Ψ(g-1)/g to the others
    of g nodes, in s streams; the ring of all n ranks sends 2Ψ(n-1)/n, in one.
    """

    def __init__(
        self,
        setup: base.Setup,
        *,
        bucket_mb: float | str = AUTO,
        first_bucket_mb: float = 1.0,
        compress: str = "none",
        powersgd_rank: int | None = None,
        hierarchical: bool = False,
        ranks_per_node: int | None = None,
    ) -> None:
        """``bucket_mb``: ``auto`` takes what suits the link, or half of all gradients (at most 25
        MB) where the model is small, or buckets are compressed or hierarchical.
        ``ranks_per_node``: of what is taken for a node; None asks the launcher."""
        super().__init__(setup, compress=compress, powersgd_rank=powersgd_rank)
        size = (ranks_per_node or setup.ranks_per_node) if hierarchical else None
        if size is not None and (compress != "none" or not 1 < size < setup.mesh.size()):
            raise UsageError(
                "bucket_ddp_async: hierarchical is for several nodes with several ranks on each, "
                "and without compress; its option ranks_per_node says what is taken for a node"
            )
        where = setup.mesh, size, "bucket_ddp_async", "ranks_per_node"
        self.node, self.between = inside_and_between(*where)
        measures = self.compressor is None and self.between is None
        sizes = bucket_mb, first_bucket_mb
        self.size = BucketSize(*sizes, self.group, setup.ranks_per_node, measures)
        self.arrivals: dict[str, None] = {}  # whose gradient came in this step, in that order
        self.times: dict[str, int] = {}  # how often, in the last micro-batch
        self.is_last = False  # micro-batch of the step
        self.buckets: list[Tensor] = []  # (elements,) each; empty before the first step's end
        self.views: dict[str, Tensor] = {}  # each gradient's place in its bucket
        self.names: list[list[str]] = []  # of the parameters in each bucket
        self.bucket_of: dict[str, int] = {}
        self.under_way: list[Waitable] = []  # the buckets, in order
        self.news: list[comm.Pending] = []  # which parameters got a gradient
        for name, p in self.params.items():
            p.register_post_accumulate_grad_hook(partial(self._arrived, name))

    def _arrived(self, name: str, parameter: nn.Parameter) -> None:
        if parameter.grad is None:  # frozen after its use: autograd calls the hook all the same
            return
        is_first = name not in self.arrivals
        self.arrivals[name] = None
        if self.is_last:
            self.times[name] = self.times.get(name, 0) + 1
        if not self.buckets:
            self.size.arrived(name, self.device)
            return
        if is_first:  # in this step: over what the bucket held, so nothing has to be zeroed
            parameter.grad = self.views[name].copy_(parameter.grad)
        if self.is_last and not self.queue.arrived(self.bucket_of[name], name):
            raise refusals.came_again("bucket_ddp_async", name)

    def _launch(self, bucket: int) -> None:
        parts = {name: self.views[name] for name in self.names[bucket]}
        for name in parts.keys() - self.arrivals.keys():
            self.params[name].grad = parts[name].zero_()  # unused here, perhaps not elsewhere
        flat, label = self.buckets[bucket], f"bucket {bucket}"  # (elements,)
        if self.between is not None:
            pending: Waitable = overlap.Chain(self._by_nodes(flat, label))
        elif self.compressor is None:
            pending = comm.all_reduce(flat, self.group, label=label, async_op=True)
        else:
            pending = self.compressor.all_reduce_bucket(
                parts, flat, self.group, label=label, async_op=True
            )
        self.under_way.append(pending)
        for before in reversed(self.under_way[-3:-1]):  # what they wait for had time to travel
            if isinstance(before, overlap.Chain):
                before.go_on()

    def _by_nodes(self, flat: Tensor, label: str) -> Iterator[comm.Pending]:
        """The three parts of a hierarchical all-reduce; who asks for the next has waited."""
        assert self.between is not None
        mine = flat.view(self.node.size(), -1)[self.node.rank()]  # (elements / s,)
        yield comm.reduce_scatter(mine, flat, self.node, label=label, async_op=True)
        yield comm.all_reduce(mine, self.between, label=label, async_op=True)
        yield comm.all_gather(flat, mine, self.node, label=label, async_op=True)

    def gradients(self, microbatches: Sequence[Batch]) -> Tensor:
        steps.broadcast_buffers(self.model, self.group)
        total = steps.global_count(microbatches, self.device, self.group)
        divisor = self.update.divisor(total)
        *head, last = microbatches
        self.arrivals.clear()
        self.times.clear()
        loss_sum = steps.accumulate(self.model, self.loss_fn, head, divisor)
        if self.buckets:
            self.queue.start()
        self.is_last = True
        loss = overlap.last_of_step(self.model, self.loss_fn, last, divisor, loss_sum, self.group)
        self.is_last = False
        if not self.buckets:
            self._lay_out()
        self.queue.flush()
        used = overlap.Used(self.params, set(self.arrivals), self.device, self.group)
        self.news = [used.pending]
        for name in used.unused():
            self.params[name].grad = None  # not zero: the optimizer must skip it
        loss.wait()
        return loss_sum / total

    def settle(self) -> None:
        """Wait for what is under way."""
        for pending in (*self.under_way, *self.news):
            pending.wait()

    def step(self) -> None:
        if self.update.needs_norm:
            self.settle()
        gradients = {n: p.grad for n, p in self.params.items() if p.grad is not None}
        steps.drop_gradients(self.params)
        self.update(list(gradients.values()), apply=partial(self._update_buckets, gradients))
        steps.drop_gradients(self.params)
        self.settle()
        self.under_way.clear()

    def _update_buckets(self, gradients: dict[str, Tensor]) -> None:
        # Not strict: without gradients before it, a step has nothing under way and changes nothing.
        turns = [([p], names) for p, names in zip(self.under_way, self.names, strict=False)]
        if not factory.steps_by_parts(self.optimizer) and turns:
            turns = [(self.under_way, [name for names in self.names for name in names])]
        for under_way, names in turns:
            for pending in under_way:
                pending.wait()
            for name in names:
                self.params[name].grad = gradients.get(name)
            self.optimizer.step()  # it passes over parameters that have no gradient
            for name in names:
                self.params[name].grad = None

    def chosen(self) -> dict[str, float]:
        return self.size.chosen

    def own_state(self) -> dict[str, Tensor]:
        """With the size of the buckets: sums of three and more ranks depend on it."""
        return super().own_state() | self.size.state()

    def load_own_state(self, state: dict[str, Tensor]) -> None:
        super().load_own_state(self.size.load(state))

    def full_grads(self) -> dict[str, Tensor | None]:
        self.settle()
        return super().full_grads()

    @torch.no_grad()
    def _lay_out(self) -> None:
        """Buckets in the order of readiness that rank 0 saw, with the first step's gradients in."""
        names = list(self.params)
        seen = [*self.arrivals, *(n for n in reversed(names) if n not in self.arrivals)]
        order = torch.tensor([names.index(name) for name in seen], device=self.device)
        comm.broadcast(order, self.group, label="order of gradients")
        ordered = [names[i] for i in order.tolist()]
        for params in buckets_of(self.params, ordered, *self.size.agreed(self.params, ordered)):
            layout = Layout.of(params, ranks=1 if self.between is None else self.node.size())
            first = next(iter(params.values()))
            flat = new_flat(layout.padded, first.dtype, first.device).zero_()
            for name, p in params.items():
                view = layout.view(flat, name)
                if p.grad is not None:
                    view.copy_(p.grad)
                p.grad = self.views[name] = view
                self.bucket_of[name] = len(self.buckets)
            self.buckets.append(flat)
            self.names.append(list(params))
        needs = [{name: max(1, self.times.get(name, 0)) for name in names} for names in self.names]
        self.queue = InOrder(needs, self._launch)
