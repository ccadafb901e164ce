# cause: waited-in-backward
"""A plain, blocking all_reduce in the hook."""

import torch.distributed as dist
from torch import Tensor, nn


class AsyncDDP:
    def __init__(self, model: nn.Module) -> None:
        self.is_last = True
        self.under_way: list[Tensor] = []
        for p in model.parameters():  # a tied parameter comes once
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(self._launch)

    def _launch(self, p: nn.Parameter) -> None:
        if self.is_last:
            dist.all_reduce(p.grad)
            self.under_way.append(p.grad)

    def finish(self) -> None:
        for grad in self.under_way:
            grad /= dist.get_world_size()  # only now: before, it would divide half a sum
        self.under_way.clear()
