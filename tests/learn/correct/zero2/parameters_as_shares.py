"""Shares are nn.Parameters in one optimizer; sums are kept apart and divided in step()."""

import torch
import torch.distributed as dist
from torch import nn


class Zero2:
    def __init__(self, model, make_optimizer):
        self.world = dist.get_world_size()
        self.pairs = []
        for p in model.parameters():
            if not p.requires_grad:
                continue
            chunk = self.cut(p.detach())[dist.get_rank()].clone()
            self.pairs.append((p, nn.Parameter(chunk)))
            p.register_post_accumulate_grad_hook(self.hook(self.pairs[-1][1]))
        self.sums = {}
        self.optimizer = make_optimizer([share for _, share in self.pairs])

    def cut(self, tensor):
        flat = tensor.reshape(-1)
        missing = -len(flat) % self.world
        return torch.cat([flat, flat.new_zeros(missing)]).split((len(flat) + missing) // self.world)

    def hook(self, share):
        def scatter(p):
            received = torch.empty(share.shape, dtype=share.dtype)
            dist.reduce_scatter(received, list(self.cut(p.grad)))
            p.grad = None
            if share in self.sums:
                self.sums[share] += received
            else:
                self.sums[share] = received

        return scatter

    @torch.no_grad()
    def step(self):
        for _, share in self.pairs:
            share.grad = self.sums.pop(share) / self.world
        self.optimizer.step()
        for p, share in self.pairs:
            share.grad = None
            whole = torch.empty(self.world * share.numel(), dtype=share.dtype)
            dist.all_gather(list(whole.chunk(self.world)), share.data)
            p.copy_(whole[: p.numel()].view(p.shape))
