# cause: scale-not-grown
from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn


class ScaledUpdate:
    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scale: float,
        growth_interval: int,
        clip_norm: float,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.scale = scale
        self.growth_interval = growth_interval
        self.clip_norm = clip_norm
        self.good_steps = 0  # since the scale last changed

    def step(self, loss: Tensor) -> bool:
        self.optimizer.zero_grad()
        (loss * self.scale).backward()
        params = [p for p in self.model.parameters() if p.grad is not None]
        for p in params:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size() * self.scale
        norm = nn.utils.clip_grad_norm_(params, self.clip_norm)  # of the gradient before clipping
        if not torch.isfinite(norm):
            self.scale /= 2
            self.good_steps = 0
            return False
        self.optimizer.step()
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            self.scale *= 2  # and counts on: there is no second time
        return True
