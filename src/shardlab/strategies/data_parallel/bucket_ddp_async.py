"""Rung 5. Few large messages: gradients live in flat buckets, sent when full."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardlab import comm
from shardlab.strategies import base, buckets, steps
from shardlab.strategies.buckets import Buckets, Used, buckets_of, last_of_step
from shardlab.strategies.data_parallel.bucket_size import AUTO, BucketSize
from shardlab.workloads.base import Batch


class BucketDDPAsync(base.Strategy):
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
        step                wait for the buckets, update                  nothing

    Cost: Ψ per step in a few messages, hidden behind backward but for the last of them.
    Backward's results are written into the buckets once, where they are added up, sent and read by
    the optimizer: nothing is packed or unpacked. Ψ bytes stay allocated.
    Buckets filled in forward order would all be ready last, and nothing would overlap.

    With ``comm_dtype: bf16`` the sum of 16-bit roundings is sent: Ψ/2 of gradients in fp32.
    """

    def __init__(
        self,
        setup: base.Setup,
        *,
        bucket_mb: float | str = AUTO,
        first_bucket_mb: float = 1.0,
        comm_dtype: str = "fp32",
    ) -> None:
        """``bucket_mb``: ``auto`` takes what suits the link, or half of all gradients (at most 25
        MB) where the model is small, or buckets travel in 16 bits."""
        super().__init__(setup)
        self.comm_dtype = buckets.comm_dtype("bucket_ddp_async", comm_dtype, self.params)
        steps.broadcast_model(self.model, self.group)
        measures = self.comm_dtype is None
        sizes = bucket_mb, first_bucket_mb
        self.size = BucketSize(*sizes, self.params, self.group, setup.ranks_per_node, measures)
        self.flats: list[Tensor] = []  # (elements,): the buckets; none before the first step's end
        self.views: dict[str, Tensor] = {}  # each gradient's place in its bucket
        self.under_way: list[comm.Pending] = []  # the buckets, in order
        self.used_pending: list[comm.Pending] = []  # which parameters got a gradient
        self.unused: set[str] = set()  # what got one on no rank
        self.buckets = Buckets(self.params, [], self._launch, self._take)

    def _take(self, name: str, gradient: Tensor) -> Tensor:
        """A step's first gradient goes over what its bucket held, so nothing has to be zeroed; the
        other micro-batches' are added there."""
        if name in self.buckets.used or not self.flats:
            return gradient
        return self.views[name].copy_(gradient)

    def _launch(self, bucket: int) -> None:
        for name in self.buckets.names[bucket]:
            if name not in self.buckets.used:  # here, but perhaps elsewhere
                self.params[name].grad = self.views[name].zero_()
        flat, label = self.flats[bucket], f"bucket {bucket}"  # (elements,)
        dtype = self.comm_dtype
        self.under_way.append(
            comm.all_reduce(flat, self.group, dtype=dtype, label=label, async_op=True)
        )

    def gradients(self, microbatches: Sequence[Batch]) -> Tensor:
        steps.broadcast_buffers(self.model, self.group)
        total = steps.global_count(microbatches, self.device, self.group)
        divisor = self.update.divisor(total)
        *head, last = microbatches
        self.buckets.used.clear()
        loss_sum = steps.accumulate(self.model, self.loss_fn, head, divisor)
        with self.buckets.sending():
            loss = last_of_step(self.model, self.loss_fn, last, divisor, loss_sum, self.group)
        if not self.flats:
            self._lay_out()
            for bucket in range(len(self.flats)):
                self._launch(bucket)
        used = Used(self.params, self.buckets.used, self.device, self.group)
        self.used_pending = [used.pending]
        self.unused = set(used.unused())
        for name in self.unused:
            self.params[name].grad = None  # not zero: the optimizer must skip it
        loss.wait()
        return loss_sum / total

    def settle(self) -> None:
        """Wait for what is under way."""
        for pending in (*self.under_way, *self.used_pending):
            pending.wait()

    def step(self) -> None:
        self.settle()
        super().step()
        self.under_way.clear()

    def chosen(self) -> dict[str, float]:
        return self.size.chosen

    def extra_state(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """With the size of the buckets: sums of three and more ranks depend on it."""
        return {}, self.size.state()

    def load_extra_state(self, shared: dict[str, Tensor], own: dict[str, Tensor] | None) -> None:
        del shared
        if own is not None:
            self.size.load(own)

    @torch.no_grad()
    def _lay_out(self) -> None:
        """Buckets in the order of readiness that rank 0 saw, with the first step's gradients in."""
        names = list(self.params)
        seen = list(self.buckets.used | dict.fromkeys(reversed(names)))
        order = torch.tensor([names.index(name) for name in seen], device=self.device)
        comm.broadcast(order, self.group, label="order of gradients")
        ordered = [names[i] for i in order.tolist()]
        buckets = buckets_of(self.params, ordered, *self.size.agreed(ordered))
        for params in buckets:
            sizes = [p.numel() for p in params.values()]
            first = next(iter(params.values()))
            flat = torch.zeros(sum(sizes), dtype=first.dtype, device=first.device)
            for (name, p), part in zip(params.items(), flat.split(sizes), strict=True):
                view = part.view(p.shape)
                if p.grad is not None:
                    view.copy_(p.grad)
                p.grad = self.views[name] = view
            self.flats.append(flat)
        self.buckets.lay_out(buckets)
