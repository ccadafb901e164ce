"""all_to_all and a local sum in place of reduce_scatter; the share is a view of one flat buffer."""

import torch
import torch.distributed as dist


class Zero1:
    def __init__(self, params, make_optimizer, max_norm=None):
        self.params, self.max_norm = list(params), max_norm
        self.n, self.rank = dist.get_world_size(), dist.get_rank()
        total = sum(p.numel() for p in self.params)
        self.each = (total + self.n - 1) // self.n
        self.flat = torch.zeros(self.n * self.each, dtype=self.params[0].dtype)
        start = 0
        for p in self.params:
            place = self.flat[start : start + p.numel()].view(p.shape)
            place.copy_(p.data)
            p.data = place
            start += p.numel()
        self.share = self.flat.view(self.n, self.each)[self.rank]
        self.optimizer = make_optimizer([self.share])

    def step(self):
        outgoing = torch.zeros_like(self.flat)
        torch.cat([p.grad.flatten() for p in self.params], out=outgoing[: self.used()])
        incoming = torch.empty_like(outgoing)
        dist.all_to_all_single(incoming, outgoing)
        self.share.grad = incoming.view(self.n, self.each).mean(0)
        if self.max_norm is not None:
            norms = [torch.zeros((), dtype=self.flat.dtype) for _ in range(self.n)]
            dist.all_gather(norms, self.share.grad.norm())
            norm = torch.stack(norms).norm()
            if norm > self.max_norm:
                self.share.grad *= self.max_norm / norm
        self.optimizer.step()
        parts = list(self.flat.view(self.n, self.each))
        dist.all_gather(parts, self.share.clone())
        for p in self.params:
            p.grad = None

    def used(self):
        return sum(p.numel() for p in self.params)
