"""For runs on a GPU: three models whose blocks do not run once each, in order, with gradients, and
one whose parameters lie in memory in other orders.

shardlab prove --device cuda --strategies zero3 --workload benchmarks/odd_models.py:frozen_first
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shardlab.workloads.base import Batch, Workload

WIDTH, BLOCKS = 256, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:  # (rows, WIDTH)
        out: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return out


class FrozenFirst(nn.Module):
    """The first block is frozen: backward never comes to it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.blocks[0].requires_grad_(False)
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:  # (rows, WIDTH)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


class OutOfOrder(FrozenFirst):
    """Blocks run in another order than they are listed in, and one of them runs twice."""

    def forward(self, x: Tensor) -> Tensor:
        for i in (2, 0, 3, 1, 3):
            x = self.blocks[i](x)
        out: Tensor = self.head(x)
        return out


class PassThrough(FrozenFirst):
    """Every block is given, and returns, a tensor that the first one made (as T5's bias)."""

    def forward(self, x: Tensor) -> Tensor:
        bias = None
        for block in self.blocks:
            x, bias = self.run(block, x, bias)
        out: Tensor = self.head(x)
        return out

    def run(self, block: nn.Module, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        y = block(x)
        bias = torch.tanh(y) if bias is None else bias
        return y + bias, bias


class InOtherOrders(FrozenFirst):
    """Its matrices are transposed: their elements lie column by column."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            up = block.get_submodule("up")
            up.weight = nn.Parameter(up.get_parameter("weight").detach().t().contiguous().t())


class Data:
    def __len__(self) -> int:
        return 4096

    def batch(self, ids: Sequence[int]) -> Batch:
        rows = [torch.randn(WIDTH, generator=torch.Generator().manual_seed(int(i))) for i in ids]
        x = torch.stack(rows) if rows else torch.empty(0, WIDTH)
        return Batch(inputs=x, targets=x[:, :8].sin(), count=len(rows), samples=len(rows))


def squares(model: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = (model(batch.inputs) - batch.targets).square().sum()
    return loss


def workload_of(model: type[nn.Module]) -> Workload:
    names = tuple(f"blocks.{i}" for i in range(BLOCKS))
    return Workload(model.__name__, model, squares, Data(), blocks=names)


frozen_first = workload_of(FrozenFirst)
out_of_order = workload_of(OutOfOrder)
pass_through = workload_of(PassThrough)
in_other_orders = workload_of(InOtherOrders)
