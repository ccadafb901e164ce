"""What of the training state a rank keeps between steps: what a checkpoint is taken from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Slot:
    """A rank's part of one of the model's tensors: one or several runs of its elements, in the
    whole's order."""

    name: str
    shape: torch.Size  # of the whole
    start: int  # in the flattened whole
    tensor: Tensor  # the part: flat, or some rows, or the whole
    # (start, length) of each run, where the part is made of several; None: it is one.
    runs: tuple[tuple[int, int], ...] | None = None


@dataclass(frozen=True)
class Slots:
    """A strategy whose ``slots()`` gives this is checkpointed without gathering anything.

    ``trained`` are the parts that the optimizer updates here, by the parameter that it knows: its
    state is laid out as they are. Parts of several ranks may be the same (replicas) or disjoint
    (shards); together they are everything.
    """

    model: list[Slot]
    trained: dict[nn.Parameter, Slot]
    optimizer: torch.optim.Optimizer  # the one whose ``state`` has those parameters


def whole(tensors: Iterable[tuple[str, Tensor]]) -> list[Slot]:
    """Slots of tensors that this rank has in full."""
    return [Slot(name, t.shape, 0, t.detach()) for name, t in tensors]


def whole_slots(
    model: nn.Module, params: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer
) -> Slots:
    """A whole model and a whole optimizer."""
    trained = {p: Slot(name, p.shape, 0, p.detach()) for name, p in params.items()}
    return Slots(whole((*model.named_parameters(), *model.named_buffers())), trained, optimizer)
