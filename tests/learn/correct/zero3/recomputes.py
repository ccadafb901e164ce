"""Each block is computed again in backward: autograd saves no parameter at all."""

import torch
import torch.distributed as dist
from torch.func import functional_call


class Block:
    def __init__(self, module):
        self.module = module
        self.n = dist.get_world_size()
        named = dict(module.named_parameters())
        self.shapes = {name: p.shape for name, p in named.items()}
        flat = torch.cat([p.detach().reshape(-1) for p in named.values()])
        self.size = len(flat)
        flat = self.padded(flat)
        self.shard = flat.chunk(self.n)[dist.get_rank()].clone()
        for p in named.values():
            p.data = p.data.new_empty(0)

    def padded(self, flat):
        return torch.cat([flat, flat.new_zeros(-len(flat) % self.n)])

    def whole(self):
        parts = [torch.empty_like(self.shard) for _ in range(self.n)]
        dist.all_gather(parts, self.shard)
        flat = torch.cat(parts)[: self.size]
        pieces = flat.split([shape.numel() for shape in self.shapes.values()])
        return {n: p.view(s) for (n, s), p in zip(self.shapes.items(), pieces, strict=True)}

    def scatter(self, grads):
        flat = self.padded(torch.cat([g.reshape(-1) for g in grads]))
        mine = torch.empty_like(self.shard)
        dist.reduce_scatter(mine, list(flat.chunk(self.n)))
        mine /= self.n
        self.shard.grad = mine if self.shard.grad is None else self.shard.grad + mine


class Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, block, _anchor):
        ctx.save_for_backward(x)
        ctx.block = block
        with torch.no_grad():
            return functional_call(block.module, block.whole(), (x,))

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            params = {n: p.requires_grad_() for n, p in ctx.block.whole().items()}
            y = functional_call(ctx.block.module, params, (x,))
            wanted = [x, *params.values()]
            gx, *grads = torch.autograd.grad(y, wanted, grad)
        ctx.block.scatter(grads)
        return gx, None, None


class Zero3:
    def __init__(self, model, make_optimizer):
        self.model = model
        self.blocks = {m: Block(m) for m in model if any(True for _ in m.parameters())}
        self.optimizer = make_optimizer([b.shard for b in self.blocks.values()])
        self.anchor = torch.zeros((), requires_grad=True)  # so that autograd comes to every block

    def forward(self, x):
        for module in self.model:
            if module in self.blocks:
                x = Recompute.apply(x, self.blocks[module], self.anchor)
            else:
                x = module(x)
        return x

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()

    def full_params(self):
        result = {}
        for prefix, module in self.model.named_children():
            if module in self.blocks:
                for name, p in self.blocks[module].whole().items():
                    result[f"{prefix}.{name}"] = p.clone()
        return result
