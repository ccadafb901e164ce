# cause: touched-under-way
"""Divides while the sum is under way."""

import torch.distributed as dist
from torch import Tensor, nn


class AsyncDDP:
    def __init__(self, model: nn.Module) -> None:
        self.is_last = True
        self.under_way: list[tuple[dist.Work, Tensor]] = []
        for p in model.parameters():  # a tied parameter comes once
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(self._launch)

    def _launch(self, p: nn.Parameter) -> None:
        if self.is_last:
            self.under_way.append((dist.all_reduce(p.grad, async_op=True), p.grad))
            p.grad /= dist.get_world_size()

    def finish(self) -> None:
        for work, _grad in self.under_way:
            work.wait()
        self.under_way.clear()
