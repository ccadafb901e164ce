"""Nasty little models, in float64, and their data: a pure function of (step, rank, micro-batch)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardlab.workloads.base import Batch

ROWS = 4  # of most batches; ragged ones have fewer, or none


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:  # (rows, 6)
        out: Tensor = self.layers(x)
        return out


class TiedFrozen(nn.Module):
    """The output weight is the input's; the layer between does not train."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:  # (rows, 6), read as tokens
        tokens = (x.abs() * 10).long() % 11
        out: Tensor = self.head(torch.tanh(self.frozen(self.embed(tokens)))).mean(1)
        return out


class Buffers(nn.Module):
    """BatchNorm, and a buffer that every forward changes and the output depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 5, bias=False)  # BatchNorm would cancel it: pure rounding
        self.norm = nn.BatchNorm1d(5)
        self.head = nn.Linear(5, 3)
        self.register_buffer("drift", torch.rand(5))

    def forward(self, x: Tensor) -> Tensor:  # (rows, 6)
        y = self.layer(x)
        if len(y):
            with torch.no_grad():
                self.drift.mul_(0.9).add_(0.1 * y.mean(0))
        out: Tensor = self.head(self.norm(y) * (1 + self.drift))
        return out


class Odd(nn.Module):
    """Sizes that nothing divides: one element, primes."""

    SCALE_SHAPE: tuple[int, ...] = (1,)

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(self.SCALE_SHAPE))
        self.shift = nn.Parameter(torch.rand(1))
        self.wide = nn.Linear(6, 13)
        self.narrow = nn.Linear(13, 3)

    def forward(self, x: Tensor) -> Tensor:  # (rows, 6)
        out: Tensor = self.narrow(torch.tanh(self.wide(x) * self.scale + self.shift))
        return out


class Scalar(Odd):
    """A parameter without dimensions."""

    SCALE_SHAPE = ()


class Unused(nn.Module):
    """``never`` is used by nobody; ``sometimes`` only where the data says so."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.sometimes = nn.Linear(6, 3)
        self.never = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:  # (rows, 6)
        out: Tensor = self.layer(x)
        if len(x) and x[0, 0] > 0:
            out = out + self.sometimes(x)
        return out


class Branch(nn.Module):
    """A block of which the data decides how much is used."""

    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Linear(6, 6)
        self.extra = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:  # (rows, 6)
        out: Tensor = torch.tanh(self.main(x))
        return out + self.extra(x) if len(x) and x[0, 0] > 0 else out


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Branch() for _ in range(3))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:  # (rows, 6)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


TOYS: dict[str, type[nn.Module]] = {
    "mlp": MLP,
    "tied_frozen": TiedFrozen,
    "buffers": Buffers,
    "odd": Odd,
    "scalar": Scalar,
    "unused": Unused,
    "branches": Branches,
}


# The units of sharding: modules that every forward comes to.
BLOCKS = {
    "mlp": ("layers.0", "layers.2"),
    "tied_frozen": ("frozen",),
    "buffers": ("layer", "norm", "head"),
    "odd": ("wide", "narrow"),
    "scalar": ("wide", "narrow"),
    "unused": ("layer",),
    "branches": ("blocks.0", "blocks.1", "blocks.2"),
}


def build(toy: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return TOYS[toy]().double()


def batch(step: int, rank: int, micro: int) -> Batch:
    """Different for each argument; ragged in rows, and some labels do not count."""
    generator = torch.Generator().manual_seed(10_000 * step + 100 * rank + micro)
    rows = [ROWS, 2, 3][(step + 2 * rank + micro) % 3]
    if rank > 0 and (step + rank + micro) % 4 == 0:
        rows = 0
    x = torch.randn(rows, 6, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 3, (rows,), generator=generator)
    y[torch.rand(rows, generator=generator) < 0.25] = -100  # a label that does not count
    return Batch(inputs=x, targets=y, count=int((y != -100).sum()), samples=rows)


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch.inputs), batch.targets, reduction="sum", ignore_index=-100)
