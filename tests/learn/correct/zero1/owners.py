"""Whole parameters have owners: reduce to the owner, update, broadcast."""

import torch
import torch.distributed as dist


class Zero1:
    def __init__(self, params, make_optimizer, max_norm=None):
        self.params, self.max_norm = list(params), max_norm
        self.rank, self.n = dist.get_rank(), dist.get_world_size()
        load = [0] * self.n
        self.owner = {}
        for p in sorted(self.params, key=lambda p: -p.numel()):
            self.owner[p] = load.index(min(load))
            load[self.owner[p]] += p.numel()
        self.mine = [p for p in self.params if self.owner[p] == self.rank]
        self.optimizer = make_optimizer(self.mine)

    def step(self):
        for p in self.params:
            dist.reduce(p.grad, dst=self.owner[p])
        for p in self.params:
            if self.owner[p] == self.rank:
                p.grad.div_(self.n)
            else:
                p.grad = None
        if self.max_norm is not None:
            squares = torch.zeros((), dtype=torch.float64)
            for p in self.mine:
                squares += p.grad.pow(2).sum()
            dist.all_reduce(squares)
            factor = float(self.max_norm / (squares.sqrt() + 1e-6))
            for p in self.mine:
                p.grad.mul_(min(1.0, factor))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        for p in self.params:
            dist.broadcast(p.data, src=self.owner[p])
