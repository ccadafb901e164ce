"""ZeRO-2. In the package: strategies/sharded/zero2.py (which does it by buckets, and
asynchronously)."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.optim import Optimizer


class Zero2:
    def __init__(
        self, model: nn.Module, make_optimizer: Callable[[list[Tensor]], Optimizer]
    ) -> None:
        self.n, rank = dist.get_world_size(), dist.get_rank()
        params = [p for p in model.parameters() if p.requires_grad]
        self.shard_of = {p: self._parts(p.data)[rank].clone() for p in params}
        self.optimizer = make_optimizer(list(self.shard_of.values()))
        for p in params:
            p.register_post_accumulate_grad_hook(self._scatter)

    def _parts(self, tensor: Tensor) -> list[Tensor]:
        """n pieces of one size: (shard,) each; the last is padded with zeros."""
        return list(pad(tensor.flatten(), (0, -tensor.numel() % self.n)).chunk(self.n))

    def _scatter(self, p: nn.Parameter) -> None:
        parts = self._parts(p.grad)
        p.grad = None  # here and now: after backward would be ZeRO-1's peak
        mine = torch.empty_like(parts[0])
        dist.reduce_scatter(mine, parts)
        mine /= self.n
        shard = self.shard_of[p]
        shard.grad = mine if shard.grad is None else shard.grad + mine

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        for p, shard in self.shard_of.items():
            parts = self._parts(p.data)
            dist.all_gather(parts, shard)
            p.data.copy_(torch.cat(parts)[: p.numel()].view_as(p))
