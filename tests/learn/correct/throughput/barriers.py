"""Rank 0's clock alone, between two barriers; the trace is recorded before the timed steps."""

import torch
import torch.distributed as dist


def throughput(step, synchronize, clock, profile, warmup, steps):
    for _ in range(warmup):
        step()
    with profile:
        step()
    synchronize()
    dist.barrier()
    begin = clock()
    tokens = torch.zeros((), dtype=torch.int64)
    for _ in range(steps):
        tokens += step()
    synchronize()
    dist.barrier()
    seconds = torch.tensor([clock() - begin])
    dist.all_reduce(tokens)
    dist.broadcast(seconds, src=0)
    return tokens.item() / seconds.item()
