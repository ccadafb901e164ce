# cause: not-reset
"""The list of the last step is worked through again."""

import torch.distributed as dist
from torch import nn


class AsyncDDP:
    def __init__(self, model: nn.Module) -> None:
        self.is_last = True
        self.under_way: list[tuple[dist.Work, nn.Parameter]] = []
        for p in model.parameters():  # a tied parameter comes once
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(self._launch)

    def _launch(self, p: nn.Parameter) -> None:
        if self.is_last:
            self.under_way.append((dist.all_reduce(p.grad, async_op=True), p))

    def finish(self) -> None:
        for work, p in self.under_way:
            work.wait()
            p.grad /= dist.get_world_size()
