"""In the package this is strategies/simple_ddp.py, which agrees first on who has a gradient."""

import torch
import torch.distributed as dist
from torch import nn


def average_gradients(model: nn.Module) -> None:
    for p in model.parameters():
        if not p.requires_grad:
            continue
        if p.grad is None:  # not used by this rank's batch: zeros, so that every rank calls
            p.grad = torch.zeros_like(p)
        dist.all_reduce(p.grad)  # the sum over the ranks, in place
        p.grad /= dist.get_world_size()
