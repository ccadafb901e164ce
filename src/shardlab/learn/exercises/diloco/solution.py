"""DiLoCo. In the package: strategies/local/diloco.py; what it shares with local SGD is in
workers.py beside it."""

import torch
import torch.distributed as dist
from torch import nn


class DiLoCo:
    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        every: int,
        outer_lr: float,
        outer_momentum: float,
    ) -> None:
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = optimizer
        self.every = every
        self.steps = 0
        self.seen = 0  # samples since the last exchange
        self.lr, self.momentum = outer_lr, outer_momentum
        self.anchors = [p.detach().clone() for p in self.params]
        self.velocities = [torch.zeros_like(p) for p in self.anchors]

    def step(self, samples: int) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        self.seen += samples
        if self.steps % self.every == 0:
            self.exchange()

    @torch.no_grad()
    def exchange(self) -> None:
        total = torch.tensor(float(self.seen))
        dist.all_reduce(total)
        share = self.seen / total.item()
        for p, anchor, velocity in zip(self.params, self.anchors, self.velocities, strict=True):
            difference = share * (anchor - p)
            dist.all_reduce(difference)
            velocity.mul_(self.momentum).add_(difference)
            anchor.sub_(self.lr * (difference + self.momentum * velocity))
            p.copy_(anchor)
        self.seen = 0
