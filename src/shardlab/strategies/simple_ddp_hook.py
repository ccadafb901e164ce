"""Rung 3. Communicate from inside backward: each gradient as soon as it is there."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from shardlab import comm
from shardlab.strategies import base, steps
from shardlab.strategies.compress import Compressing
from shardlab.strategies.overlap import InOrder
from shardlab.workloads.base import Batch


class SimpleDDPHook(Compressing):
    """All-reduce each gradient in the hook that backward calls when it is ready, and wait.

    Schedule, for n ranks and Ψ bytes of gradients:

        at construction     broadcast parameters and buffers from rank 0
        before forward      broadcast buffers from rank 0 (if the model has any)
                            all_reduce the number of targets            8 bytes
        all but the last    forward, backward                           nothing
        the last            forward; backward, and in each gradient's hook
                            all_reduce it, waiting for it               Ψ
        after backward      all_reduce which parameters got a gradient, or one more
                            all_reduce gradients that came once more    (see below)
                            all_reduce the loss                         8 bytes
        step                update                                      nothing

    Cost: Ψ per step, as ``simple_ddp_ga``. It starts earlier but hides nothing: backward stands
    still while a gradient travels. That is what ``simple_ddp_async`` mends.

    The hook gets the *parameter*, with the sum of all micro-batches in its ``.grad``; to reduce
    the argument itself would average the weights. It must be silent until the last micro-batch.
    Re-entrant checkpointing of a layer that is used twice gives its gradient in two parts, and the
    hook runs for each: what comes after the first was sent is kept apart, and sent after backward.
    """

    def __init__(
        self, setup: base.Setup, *, compress: str = "none", powersgd_rank: int | None = None
    ) -> None:
        super().__init__(setup, compress=compress, powersgd_rank=powersgd_rank)
        # Backward makes gradients roughly in the reverse of forward's order.
        self.order = list(reversed(self.params))
        self.queue = InOrder([{name: 1} for name in self.order], self.launch)
        self.sent: dict[str, Tensor] = {}  # gradients, summed or on their way
        self.used: set[str] = set()  # what got a gradient on this rank, in this step
        self.is_last = False  # micro-batch of the step
        for i, name in enumerate(self.order):
            self.params[name].register_post_accumulate_grad_hook(partial(self._arrived, i))

    def _arrived(self, i: int, parameter: nn.Parameter) -> None:
        if parameter.grad is None:  # frozen after its use: autograd calls the hook all the same
            return
        self.used.add(self.order[i])
        if self.is_last:
            self.queue.arrived(i, self.order[i])

    def launch(self, i: int) -> None:
        """All-reduce gradient i. A rank that has none takes part with zeros."""
        name = self.order[i]
        p = self.params[name]
        self.sent[name] = torch.zeros_like(p) if p.grad is None else p.grad
        p.grad = None  # backward must not add to what is under way
        self.reduce(name, self.sent[name])

    def reduce(self, name: str, gradient: Tensor) -> None:
        if self.compressor is None:
            comm.all_reduce(gradient, self.group, label=f"grad {name}")
        else:
            self.compressor.all_reduce(name, gradient, self.group, label=f"grad {name}")

    def finish(self) -> None:
        """Nothing is under way: every hook has waited."""

    def gradients(self, microbatches: Sequence[Batch]) -> Tensor:
        steps.broadcast_buffers(self.model, self.group)
        total = steps.global_count(microbatches, self.device, self.group)
        divisor = self.update.divisor(total)
        *head, last = microbatches
        self.used.clear()
        self.sent.clear()
        self.queue.start()
        loss_sum = steps.accumulate(self.model, self.loss_fn, head, divisor)
        self.is_last = True
        loss_sum += steps.accumulate(self.model, self.loss_fn, [last], divisor)
        self.is_last = False
        self.queue.flush()
        self.finish()
        self._send_late()
        return steps.global_mean(loss_sum, total, self.group)

    def _send_late(self) -> None:
        """Gradients that came once more; then each parameter gets what was summed."""
        late = {name: p.grad for name, p in self.params.items() if p.grad is not None}
        flags = [*(n in self.used for n in self.params), *(n in late for n in self.params)]
        found = iter(steps.any_rank(flags, self.group, label="used parameters"))
        is_used = dict(zip(self.params, found, strict=False))
        for (name, p), is_late in zip(self.params.items(), found, strict=True):
            if is_late:
                more = torch.zeros_like(p) if p.grad is None else p.grad
                self.reduce(name, more)
                self.finish()
                self.sent[name] += more
            p.grad = self.sent[name] if is_used[name] else None  # None: the optimizer skips it
        self.sent.clear()
