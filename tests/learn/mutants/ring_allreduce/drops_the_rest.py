# cause: rest-forgotten
"""numel // n: the last elements are in no chunk."""

import torch
import torch.distributed as dist
from torch import Tensor


def ring_all_reduce(tensor: Tensor) -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    right, left = (rank + 1) % n, (rank - 1) % n
    size = tensor.numel() // n
    chunks = tensor.view(-1)[: size * n].split(size) if size else [tensor.view(-1)[:0]] * n

    def exchange(send: Tensor, receive: Tensor) -> None:
        sending = dist.isend(send, right)  # not send(): all would wait for a receiver
        dist.recv(receive, left)
        sending.wait()

    for hop in range(n - 1):  # reduce-scatter: after it, chunk rank+1 is summed here
        mine, theirs = chunks[(rank - hop) % n], chunks[(rank - hop - 1) % n]
        received = torch.empty_like(theirs)
        exchange(mine, received)
        theirs += received
    for hop in range(n - 1):  # all-gather: sums go round, and are copied
        exchange(chunks[(rank + 1 - hop) % n], chunks[(rank - hop) % n])
