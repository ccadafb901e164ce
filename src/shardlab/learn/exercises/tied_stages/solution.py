"""Tied stages. In the package: strategies/pipeline.py, which sums the gradients of what several
stages hold before the data-parallel strategy sees them."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn


def begin(shared: nn.Parameter | None, tied: dist.ProcessGroup | None) -> None:
    if shared is not None:
        dist.broadcast(shared.data, src=dist.get_global_rank(tied, 0), group=tied)


def reduce_gradients(
    params: Sequence[nn.Parameter],
    shared: nn.Parameter | None,
    tied: dist.ProcessGroup | None,
    data: dist.ProcessGroup,
) -> None:
    if shared is not None:
        dist.all_reduce(shared.grad, group=tied)
    for p in params:
        dist.all_reduce(p.grad, group=data)
        p.grad /= dist.get_world_size(data)


def clip(
    params: Sequence[nn.Parameter],
    shared: nn.Parameter | None,
    tied: dist.ProcessGroup | None,
    pipe: dist.ProcessGroup,
    max_norm: float,
) -> float:
    squares = torch.zeros((), dtype=torch.float64)
    for p in params:
        if p is not shared or dist.get_rank(tied) == 0:  # the embedding counts on the first stage
            squares += p.grad.square().sum()
    dist.all_reduce(squares, group=pipe)
    norm = float(squares.sqrt())
    for p in params:
        p.grad *= min(1.0, max_norm / norm)
    return norm
