"""PyTorch's DistributedDataParallel, under the same contract."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from shardlab.errors import UsageError
from shardlab.strategies import base, steps, theirs
from shardlab.strategies import compress as compression
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

    Cost: Ψ per step in few large messages, hidden behind backward but for the last bucket. With
    ``compress``, PyTorch's own communication hooks send less: the twins of ``compress.py``.
    """

    NAME = "pytorch_ddp"
    LEARNS_LAYOUT = True  # of its buckets, after the first step: a resumed run rehearses one

    def __init__(
        self,
        setup: base.Setup,
        *,
        bucket_mb: float = 25.0,
        find_unused_parameters: bool = False,
        compress: str = "none",
        powersgd_rank: int | None = None,
    ) -> None:
        super().__init__(setup)
        compression.compressor(compress, powersgd_rank, setup.rule)  # the same refusals as ours
        if not bucket_mb > 0:
            raise UsageError(f"pytorch_ddp's bucket_mb must be above 0, got {bucket_mb}")
        self.ranks = setup.mesh.size()
        self.arrived: set[str] = set()  # whose gradient came in the last micro-batch's backward
        self.last = ""  # whose came last
        self.must_arrive = set() if find_unused_parameters else set(self.params)
        for name, p in self.params.items():
            p.register_post_accumulate_grad_hook(partial(self._arrived, name))
        steps.make_whole_buffers(self.model)
        with theirs.refusals(self.NAME):
            self.ddp = _DDP(
                self.model,
                process_group=self.group,
                bucket_cap_mb=bucket_mb,
                gradient_as_bucket_view=True,  # the gradients live in the buckets: no copy per step
                find_unused_parameters=find_unused_parameters,
            )
        self._compress(compress, powersgd_rank or compression.RANK)

    def _compress(self, compress: str, rank: int) -> None:
        """Register the hook. All of them divide by the number of ranks, as DDP itself does."""
        if compress == "fp16":
            self.ddp.register_comm_hook(self.group, default_hooks.fp16_compress_hook)
        elif compress == "bf16":
            if self.group.name() != "nccl":
                raise UsageError(
                    f"pytorch_ddp: PyTorch's bf16 hook needs the nccl backend, and this is "
                    f"{self.group.name()}; use compress: fp16, or another strategy's bf16"
                )
            self.ddp.register_comm_hook(self.group, default_hooks.bf16_compress_hook)
        elif compress == "powersgd":
            self._refuse_for_powersgd()
            state = _Memory(
                self.group,
                matrix_approximation_rank=rank,
                start_powerSGD_iter=2,  # the least: DDP lays its buckets out anew in the first step
                min_compression_rate=1,  # compress whatever shrinks
                orthogonalization_epsilon=1e-8,  # a gradient of zeros would become NaN
            )
            self.ddp.register_comm_hook(state, _powersgd_one_by_one)
            state.may_skip = self.update.rule.on_nonfinite == "skip"
            self.update.after = state.after_step

    def _refuse_for_powersgd(self) -> None:
        """What PyTorch's hook would fail on in the third step."""
        scalars = [name for name, p in self.params.items() if p.dim() == 0]
        if scalars:
            raise UsageError(
                f"pytorch_ddp: PyTorch's PowerSGD hook cannot take parameter '{scalars[0]}', which "
                "has no dimensions; use another strategy's"
            )
        if self.device.type == "cpu" and torch.cuda.is_available():
            raise UsageError(
                "pytorch_ddp: PyTorch's PowerSGD hook fails for ranks on the CPU where there is a "
                "GPU; use launch.device: cuda, or set CUDA_VISIBLE_DEVICES to nothing"
            )

    def gradients(self, microbatches: Sequence[Batch]) -> Tensor:
        total = steps.global_count(microbatches, self.device, self.group)
        # DDP divides the sum over ranks by their number; we want the sum.
        divisor = self.update.divisor(total) / self.ranks
        *head, last = microbatches
        with self.ddp.no_sync():  # around forward too: DDP decides there whether to communicate
            loss_sum = steps.accumulate(self.ddp, self._loss, head, divisor)
        self.arrived.clear()
        with theirs.refusals(self.NAME, lambda: f"parameter '{self.last}'"):
            loss_sum += steps.accumulate(self.ddp, self._loss, [last], divisor)
        self._refuse_unused()
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
        self.arrived.add(name)

    def _refuse_unused(self) -> None:
        """Unless told to look for unused parameters, DDP waits for ever for their gradients."""
        missing = sorted(self.must_arrive - self.arrived)
        if missing:
            raise UsageError(
                f"{self.NAME}: parameter '{missing[0]}' got no gradient on rank "
                f"{dist.get_rank()} (of {len(missing)} such), and DDP would wait for "
                "it; set the strategy's option find_unused_parameters: true"
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


class _Memory(powerSGD_hook.PowerSGDState):
    """The hook's memory, which a skipped step leaves as it was before: the same law as ours."""

    may_skip = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.before: dict[int, tuple[Tensor | None, Tensor | None]] = {}  # errors and Q, by bucket

    def keep(self, index: int) -> None:
        """Before the hook works on a bucket: it makes new errors, and writes over its Q."""
        if self.may_skip:
            q = self.q_memory_dict.get(index)
            self.before[index] = self.error_dict.get(index), None if q is None else q.clone()

    def after_step(self, was_made: bool) -> None:
        for index, (error, q) in self.before.items():
            if was_made:
                continue
            if error is None or q is None:  # it was the first step with PowerSGD: it begins anew
                for memory in (self.error_dict, self.p_memory_dict, self.q_memory_dict):
                    memory.pop(index, None)
            else:
                self.error_dict[index] = error
                self.q_memory_dict[index].copy_(q)
        self.before.clear()


# Without annotations: DDP compares a hook's with classes, and ours are text.
def _powersgd_one_by_one(state, bucket):  # type: ignore[no-untyped-def]
    """PyTorch's hook, and on Gloo the wait for it. It all-reduces P and Q from callbacks, which
    Gloo runs on its own threads: with another bucket under way, ranks pair the wrong tensors.
    """
    state.keep(bucket.index())
    future = powerSGD_hook.powerSGD_hook(state, bucket)
    if state.process_group.name() == "gloo":
        future.wait()
    return future
