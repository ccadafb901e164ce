"""All-reduces the gradients, updates a slice of each parameter, gathers slices: 3Ψ(n-1)/n."""

import math

import torch
import torch.distributed as dist
from torch.nn.utils import clip_grad_norm_


class Zero1:
    def __init__(self, params, make_optimizer, max_norm=None):
        self.params = list(params)
        self.max_norm = max_norm
        self.world = dist.get_world_size()
        self.shares = [self.slice_of(p.detach()).clone() for p in self.params]
        self.optimizer = make_optimizer(self.shares)

    def size(self, tensor):
        return math.ceil(tensor.numel() / self.world)

    def slice_of(self, tensor):
        """This rank's part, always of the same size: the tail is zeros."""
        size = self.size(tensor)
        part = torch.zeros(size, dtype=tensor.dtype)
        begin = size * dist.get_rank()
        piece = tensor.reshape(-1)[begin : begin + size]
        part[: len(piece)] = piece
        return part

    def step(self):
        for p in self.params:
            dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)
        if self.max_norm is not None:
            clip_grad_norm_(self.params, self.max_norm)
        for p, share in zip(self.params, self.shares, strict=True):
            share.grad = self.slice_of(p.grad)
            p.grad = None
        self.optimizer.step()
        for p, share in zip(self.params, self.shares, strict=True):
            parts = [torch.empty_like(share) for _ in range(self.world)]
            dist.all_gather(parts, share)
            p.data = torch.cat(parts)[: p.numel()].view(p.shape)
