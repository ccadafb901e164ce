# cause: sum-lost
"""p.grad becomes another tensor than the one that is summed."""

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
            grad, p.grad = p.grad, p.grad / dist.get_world_size()
            self.under_way.append((dist.all_reduce(grad, async_op=True), grad))

    def finish(self) -> None:
        for work, _grad in self.under_way:
            work.wait()
        self.under_way.clear()
