# cause: not-a-ring
"""All send to rank 0, which sends the sum to all."""

import torch
import torch.distributed as dist
from torch import Tensor


def ring_all_reduce(tensor: Tensor) -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    if rank:
        dist.send(tensor, 0)
        dist.recv(tensor, 0)
        return
    for other in range(1, n):
        received = torch.empty_like(tensor)
        dist.recv(received, other)
        tensor += received
    for other in range(1, n):
        dist.send(tensor, other)
