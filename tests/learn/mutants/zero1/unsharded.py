# cause: not-sharded
"""Every rank updates everything: right, and nothing is saved."""

import torch
import torch.distributed as dist


class Zero1:
    def __init__(self, params, make_optimizer, max_norm=None):
        self.params, self.max_norm = list(params), max_norm
        self.optimizer = make_optimizer(self.params)

    def step(self):
        for p in self.params:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        if self.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.params, self.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
