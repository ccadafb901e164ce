"""ZeRO-1. In the package: strategies/sharded/zero1.py (in buckets, and
overlapped); the clipping by the norm of all shards is in update.py."""

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.optim import Optimizer


class Zero1:
    def __init__(
        self,
        params: Iterable[nn.Parameter],
        make_optimizer: Callable[[list[Tensor]], Optimizer],
        max_norm: float | None = None,
    ) -> None:
        self.params, self.max_norm = list(params), max_norm
        self.n, rank = dist.get_world_size(), dist.get_rank()
        self.shard = self._flatten([p.data for p in self.params]).chunk(self.n)[rank].clone()
        self.optimizer = make_optimizer([self.shard])

    def _flatten(self, tensors: list[Tensor]) -> Tensor:
        flat = torch.cat([t.flatten() for t in tensors])
        return pad(flat, (0, -len(flat) % self.n))  # (n * shard,)

    def step(self) -> None:
        grads = self._flatten([p.grad for p in self.params])
        self.shard.grad = torch.empty_like(self.shard)
        dist.reduce_scatter(self.shard.grad, list(grads.chunk(self.n)))
        self.shard.grad /= self.n
        if self.max_norm is not None:
            squares = self.shard.grad.square().sum()  # of this shard: all of them together count
            dist.all_reduce(squares)
            self.shard.grad *= (self.max_norm / (squares.sqrt() + 1e-6)).clamp(max=1.0)
        self.optimizer.step()
        full = torch.empty_like(grads)
        dist.all_gather(list(full.chunk(self.n)), self.shard)
        sizes = [p.numel() for p in self.params]
        for p, new in zip(self.params, full[: sum(sizes)].split(sizes), strict=True):
            p.data.copy_(new.view_as(p))
            p.grad = None
