"""In the package this is broadcast_model in strategies/steps.py."""

import torch.distributed as dist
from torch import nn


def broadcast_model(model: nn.Module, src: int = 0) -> None:
    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor.detach(), src)  # detach shares the memory, and needs no gradient
