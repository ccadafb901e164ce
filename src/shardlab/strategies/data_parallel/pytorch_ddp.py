"""PyTorch's DistributedDataParallel, under the same contract."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shardlab.errors import UsageError
from shardlab.strategies import base, pytorch_errors, steps
from shardlab.workloads.base import Batch


class PyTorchDDP(base.Strategy):
    """PyTorch's own: gradients in buckets, all-reduced while backward still runs.

    Schedule, for n ranks and Ψ bytes of gradients (the collectives marked * are DDP's, called
    from C++, so they are in the profiler's trace and not in our ledger):

        at construction     broadcast parameters and buffers from rank 0 *
        before forward      broadcast buffers from rank 0 (if the model has any) *
                            all_reduce the number of targets            8 bytes
        all but the last    forward and backward under no_sync          nothing
        the last            forward; backward, and as soon as a bucket's last gradient is in,
                            all_reduce the bucket, asynchronously *     Ψ
        after backward      all_reduce the loss                         8 bytes
        step                update                                      nothing

    Cost: Ψ per step in few large messages, hidden behind backward but for the last bucket.
    """

    NAME = "pytorch_ddp"
    LEARNS_LAYOUT = True  # of its buckets, after the first step: a resumed run rehearses one

    def __init__(
        self,
        setup: base.Setup,
        *,
        bucket_mb: float = 25.0,
        find_unused_parameters: bool = False,
    ) -> None:
        super().__init__(setup)
        if not bucket_mb > 0:
            raise UsageError(f"pytorch_ddp's bucket_mb must be above 0, got {bucket_mb}")
        self.ranks = setup.mesh.size()
        self.arrived: Counter[str] = Counter()  # gradients in the last micro-batch's backward
        self.last = ""  # whose came last
        self.must_arrive = set() if find_unused_parameters else set(self.params)
        for name, p in self.params.items():
            p.register_post_accumulate_grad_hook(partial(self._arrived, name))
        steps.make_whole_buffers(self.model)
        with pytorch_errors.refusals(self.NAME):
            self.ddp = _DDP(
                self.model,
                process_group=self.group,
                bucket_cap_mb=bucket_mb,
                gradient_as_bucket_view=True,  # the gradients live in the buckets: no copy per step
                find_unused_parameters=find_unused_parameters,
            )

    def gradients(self, microbatches: Sequence[Batch]) -> Tensor:
        total = steps.global_count(microbatches, self.device, self.group)
        # DDP divides the sum over ranks by their number; we want the sum.
        divisor = self.update.divisor(total) / self.ranks
        *head, last = microbatches
        with self.ddp.no_sync():  # around forward too: DDP decides there whether to communicate
            loss_sum = steps.accumulate(self.ddp, self._loss, head, divisor)
        self.arrived.clear()
        with pytorch_errors.refusals(self.NAME, lambda: f"parameter '{self.last}'"):
            loss_sum += steps.accumulate(self.ddp, self._loss, [last], divisor)
        self._refuse_unused()
        self._refuse_repeated()
        return steps.global_mean(loss_sum, total, self.group)

    def _loss(self, ddp: nn.Module, batch: Batch) -> Tensor:
        self.ddp.forwards = 0
        loss = self.loss_fn(ddp, batch)
        if not self.ddp.forwards:
            raise UsageError(
                f"{self.NAME}: the loss calls parts of the model, and DDP acts in the model's own "
                "forward: let the loss call model(...), or use another strategy"
            )
        return loss

    def _arrived(self, name: str, _parameter: Tensor) -> None:
        self.last = name
        self.arrived[name] += 1

    def _refuse_unused(self) -> None:
        """DDP waits without end for unused parameters' gradients, unless it looks for them."""
        missing = sorted(self.must_arrive - self.arrived.keys())
        if missing:
            raise UsageError(
                f"{self.NAME}: parameter '{missing[0]}' got no gradient on rank "
                f"{dist.get_rank()} (of {len(missing)} such), and DDP would wait for "
                "it; set the strategy's option find_unused_parameters: true"
            )

    def _refuse_repeated(self) -> None:
        """DDP notices it only until all buckets are sent: what comes then stays on its rank."""
        for name, times in self.arrived.items():
            if times > 1:
                raise UsageError(
                    f"{self.NAME}: the gradient of parameter '{name}' came twice (re-entrant "
                    "checkpointing); use checkpoint(use_reentrant=False)"
                )


class _DDP(DistributedDataParallel):
    """DDP that has the model's attributes, for a loss that uses them, and counts its forwards."""

    forwards = 0  # with gradients, in this micro-batch: DDP reduces only after one of these

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            self.forwards += 1
        if self.forwards > 1:  # what the first one used for backward must stay as it is
            self.require_forward_param_sync = False
        return super().forward(*args, **kwargs)  # type: ignore[no-untyped-call]
