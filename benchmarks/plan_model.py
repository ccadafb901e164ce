"""A model of one's own for the planner's check: residual blocks of two shapes, and a tied head."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shardlab.workloads.base import Batch, Workload, classification_loss

FEATURES, WIDTH, CLASSES, BLOCKS = 256, 384, 64, 6


class Block(nn.Module):
    def __init__(self, times: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, times * WIDTH)
        self.down = nn.Linear(times * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:  # (batch, WIDTH)
        result: Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return result


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList(Block(1 + 3 * (i % 2)) for i in range(BLOCKS))
        self.leave = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:  # (batch, FEATURES)
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.leave(x)
        return result


class Data:
    def __init__(self, samples: int) -> None:
        self.x = torch.randn(samples, FEATURES, generator=torch.Generator().manual_seed(0))
        self.y = self.x[:, :CLASSES].argmax(1)

    def __len__(self) -> int:
        return len(self.x)

    def batch(self, ids: Sequence[int]) -> Batch:
        return Batch(inputs=self.x[ids], targets=self.y[ids], count=len(ids), samples=len(ids))


workload = Workload(
    name="residual-mlp",
    make_model=Model,
    dataset=Data(8192),
    loss=classification_loss,
    blocks=tuple(f"blocks.{i}" for i in range(BLOCKS)),
)
