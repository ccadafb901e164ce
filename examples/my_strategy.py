"""A strategy of your own: every gradient in one message, after the last backward."""

from collections.abc import Sequence

import torch
from torch import Tensor

from shardlab import comm
from shardlab.strategies import base, steps
from shardlab.workloads.base import Batch


class OneMessage(base.Strategy):
    """Pack all gradients into one flat tensor and all-reduce that, once per step."""

    claim = "simple_ddp_ga"  # it sends and holds as much, which `shardlab prove` checks

    def __init__(self, setup: base.Setup) -> None:
        super().__init__(setup)
        steps.broadcast_model(self.model, self.group)

    def gradients(self, microbatches: Sequence[Batch]) -> Tensor:
        steps.broadcast_buffers(self.model, self.group)
        total = steps.global_count(microbatches, self.device, self.group)
        divisor = self.update.divisor(total)
        loss_sum = steps.accumulate(self.model, self.loss_fn, microbatches, divisor)
        used = [p.grad is not None for p in self.params.values()]
        used = steps.any_rank(used, self.group, label="used parameters")
        sent = [p for p, is_used in zip(self.params.values(), used, strict=True) if is_used]
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in sent]
        flat = torch.cat([part.reshape(-1) for part in parts])  # (elements,)
        comm.all_reduce(flat, self.group, label="grad all")
        for p, part in zip(sent, flat.split([p.numel() for p in sent]), strict=True):
            p.grad = part.view_as(p)
        return steps.global_mean(loss_sum, total, self.group)
