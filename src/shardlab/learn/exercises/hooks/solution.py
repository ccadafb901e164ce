"""In the package: strategies/data_parallel/simple_ddp_async.py; simple_ddp_hook.py waits in its
hooks."""

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

    def finish(self) -> None:
        for work, grad in self.under_way:
            work.wait()
            grad /= dist.get_world_size()  # only now: before, it would divide half a sum
        self.under_way.clear()
