"""Whole parameters have owners: reduce the gradient to the owner, in backward, and drop it."""

import torch.distributed as dist


class Zero2:
    def __init__(self, model, make_optimizer):
        self.rank, self.n = dist.get_rank(), dist.get_world_size()
        params = [p for p in model.parameters() if p.requires_grad]
        load = [0] * self.n
        self.owner, self.total = {}, {}
        for p in sorted(params, key=lambda p: p.numel(), reverse=True):
            who = min(range(self.n), key=lambda r: load[r])
            self.owner[p] = who
            load[who] += p.numel()
        self.mine = [p for p in params if self.owner[p] == self.rank]
        self.optimizer = make_optimizer(self.mine)
        for p in params:
            p.register_post_accumulate_grad_hook(self.collect)

    def collect(self, p):
        grad, p.grad = p.grad, None
        dist.reduce(grad, self.owner[p])
        if self.owner[p] == self.rank:
            grad /= self.n
            self.total[p] = grad + self.total[p] if p in self.total else grad

    def step(self):
        for p in self.mine:
            p.grad = self.total.pop(p)
        self.optimizer.step()
        for p in self.mine:
            p.grad = None
        for p, owner in self.owner.items():
            dist.broadcast(p.data, owner)
