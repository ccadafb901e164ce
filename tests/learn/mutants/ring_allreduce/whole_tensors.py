# cause: too-many-bytes
"""Hands whole tensors round: the sum is right, the bytes are not."""

import torch
import torch.distributed as dist
from torch import Tensor


def ring_all_reduce(tensor: Tensor) -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    passing = tensor.clone()
    for _hop in range(n - 1):
        received = torch.empty_like(passing)
        sending = dist.isend(passing, (rank + 1) % n)
        dist.recv(received, (rank - 1) % n)
        sending.wait()
        tensor += received
        passing = received
