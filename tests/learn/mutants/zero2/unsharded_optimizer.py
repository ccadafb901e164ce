# cause: not-sharded
"""The optimizer holds the whole parameters; only gradients travel in parts."""

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
        self.rank, self.sums = rank, {}
        self.shard_of = {p: p for p in params}
        self.optimizer = make_optimizer(params)
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
        self.sums[p] = self.sums[p] + mine if p in self.sums else mine

    def step(self) -> None:
        for p, mine in self.sums.items():
            parts = self._parts(p.data)
            dist.all_gather(parts, mine)
            p.grad = torch.cat(parts)[: p.numel()].view_as(p)
        self.sums.clear()
        self.optimizer.step()
        self.optimizer.zero_grad()
