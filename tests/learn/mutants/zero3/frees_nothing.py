# cause: not-freed
"""p.data = torch.empty(0): autograd's saved views keep every block alive until backward."""

import torch
import torch.distributed as dist
from torch.nn.functional import pad


class Block:
    def __init__(self, module):
        self.params = list(module.parameters())
        self.shapes = [p.shape for p in self.params]
        self.n = dist.get_world_size()
        flat = torch.cat([p.data.flatten() for p in self.params])
        flat = pad(flat, (0, -len(flat) % self.n))
        self.size = len(flat)
        self.shard = flat.chunk(self.n)[dist.get_rank()].clone()
        self.missing = len(self.params)
        for p in self.params:
            p.register_post_accumulate_grad_hook(self.arrived)
        self.free()

    def gather(self, _grad=None):
        full = self.shard.new_empty(self.size)
        dist.all_gather(list(full.chunk(self.n)), self.shard)
        start = 0
        for p, shape in zip(self.params, self.shapes, strict=True):
            p.data = full[start : start + shape.numel()].view(shape)
            start += shape.numel()

    def free(self):
        for p in self.params:
            p.data = p.data.new_empty(0)

    def arrived(self, _p):
        self.missing -= 1
        if self.missing:
            return
        self.missing = len(self.params)
        grads = torch.cat([p.grad.flatten() for p in self.params])
        for p in self.params:
            p.grad = None
        self.free()
        mine = torch.empty_like(self.shard)
        dist.reduce_scatter(mine, list(pad(grads, (0, -len(grads) % self.n)).chunk(self.n)))
        mine /= self.n
        self.shard.grad = mine if self.shard.grad is None else self.shard.grad + mine


class Zero3:
    def __init__(self, model, make_optimizer):
        self.model = model
        self.blocks = {m: Block(m) for m in model if list(m.parameters())}
        self.optimizer = make_optimizer([block.shard for block in self.blocks.values()])

    def forward(self, x):
        for module in self.model:
            block = self.blocks.get(module)
            if block is not None:
                block.gather()
            x = module(x)
            if block is not None:
                block.free()
                x.register_hook(block.gather)
        return x

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()

    def full_params(self):
        for block in self.blocks.values():
            block.gather()
        params = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        for block in self.blocks.values():
            block.free()
        return params
