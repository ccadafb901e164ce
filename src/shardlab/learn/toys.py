"""Nasty little models in float64 and their batches, for the checks: all ranks' are known to all.

Batches have the same size on every rank and the loss is a mean, so the gradient of one process that
sees every rank's batch is the mean of the ranks' gradients.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch = tuple[Tensor, Tensor]  # (rows, 6), (rows, 3)
Tensors = dict[str, Tensor | None]
ROWS = 4


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 11)
        self.head = nn.Linear(11, 3)

    def forward(self, x: Tensor) -> Tensor:  # (rows, 6)
        out: Tensor = self.head(torch.tanh(self.body(x)))
        return out


class Frozen(nn.Module):
    """The layer in the middle does not train."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 7)
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.head = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:  # (rows, 6)
        out: Tensor = self.head(torch.tanh(self.frozen(torch.tanh(self.body(x)))))
        return out


class Tied(nn.Module):
    """One weight, used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(6, 6, bias=False)
        self.decode = nn.Linear(6, 6)
        self.decode.weight = self.encode.weight
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:  # (rows, 6)
        out: Tensor = self.head(torch.tanh(self.decode(torch.tanh(self.encode(x)))))
        return out


class Unused(nn.Module):
    """``extra`` is used only by rank 0's batches, ``never`` by nobody's."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 5)
        self.never = nn.Linear(6, 5)
        self.head = nn.Linear(5, 3)
        self.extra = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:  # (rows, 6)
        hidden = self.body(x)
        if x[0, 0] > 0:
            hidden = hidden + self.extra(x)
        out: Tensor = self.head(torch.tanh(hidden))
        return out


class Deep(nn.Module):
    """Layers enough for something to happen before backward ends."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(m for _ in range(4) for m in (nn.Linear(6, 6), nn.Tanh())), nn.Linear(6, 3)
        )

    def forward(self, x: Tensor) -> Tensor:  # (rows, 6)
        out: Tensor = self.layers(x)
        return out


TOYS: dict[str, Callable[[], nn.Module]] = {
    "plain": Plain,
    "frozen": Frozen,
    "tied": Tied,
    "unused": Unused,
    "deep": Deep,
}


def build(toy: str, seed: int = 0) -> nn.Module:
    """The same on every rank for the same seed."""
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    model = TOYS[toy]().double()
    torch.set_rng_state(state)
    return model


def batch(rank: int, step: int = 0, rows: int = ROWS) -> Batch:
    """Different for each rank and step; only rank 0's make ``Unused`` use its extra layer."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(rows, 6, generator=generator, dtype=torch.float64)
    x[0, 0] = x[0, 0].abs() + 0.1 if rank == 0 else -x[0, 0].abs() - 0.1
    y = torch.randn(rows, 3, generator=generator, dtype=torch.float64)
    return x, y


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """The mean over the rows."""
    return F.mse_loss(model(batch[0]), batch[1])


def gradients(model: nn.Module) -> Tensors:
    """Of the parameters that train, by name; None where there is none. Copies."""
    return {
        name: None if p.grad is None else p.grad.detach().clone()
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def own_gradients(model: nn.Module, batches: Sequence[Batch]) -> Tensors:
    """What one rank has before it communicates: its batches' gradients, summed. The model is
    left alone."""
    twin = copy.deepcopy(model)
    for p in twin.parameters():
        p.grad = None
    for one in batches:
        loss(twin, one).backward()
    return gradients(twin)


def mean_gradients(model: nn.Module, by_rank: Sequence[Sequence[Batch]]) -> Tensors:
    """What one process has that sees every rank's batches: the mean of the ranks' gradients.

    None only where no rank has one; a rank without one counts as zeros.
    """
    parts = [own_gradients(model, batches) for batches in by_rank]
    means: Tensors = {}
    for name in parts[0]:
        given = [g for part in parts if (g := part[name]) is not None]
        means[name] = torch.stack(given).sum(0) / len(parts) if given else None
    return means
