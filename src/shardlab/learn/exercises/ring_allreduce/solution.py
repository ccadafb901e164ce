"""Ring all-reduce. In the package there is none: Gloo and NCCL have theirs in C++, behind comm.py,
whose wire_bytes() is the formula that this reaches."""

import torch
import torch.distributed as dist
from torch import Tensor


def ring_all_reduce(tensor: Tensor) -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    right, left = (rank + 1) % n, (rank - 1) % n
    chunks = tensor.view(-1).tensor_split(n)  # n views; sizes differ by one at most, some may be 0

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
