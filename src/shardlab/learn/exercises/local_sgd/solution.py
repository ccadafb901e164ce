"""Local SGD. In the package: strategies/local_sgd.py; what it shares with DiLoCo is in workers.py
beside it."""

import torch
import torch.distributed as dist
from torch import nn


class LocalSGD:
    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, every: int) -> None:
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = optimizer
        self.every = every
        self.steps = 0
        self.seen = 0  # samples since the last mean

    def step(self, samples: int) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        self.seen += samples
        if self.steps % self.every == 0:
            self.average()

    @torch.no_grad()
    def average(self) -> None:
        total = torch.tensor(float(self.seen))
        dist.all_reduce(total)
        share = self.seen / total.item()
        for p in self.params:
            p.mul_(share)
            dist.all_reduce(p)
        self.seen = 0
