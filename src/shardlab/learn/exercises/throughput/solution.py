"""In the package this is measure/throughput.py, which also looks for the largest batch."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist


def throughput(
    step: Callable[[], int],
    synchronize: Callable[[], None],
    clock: Callable[[], float],
    profile: AbstractContextManager[Any],
    warmup: int,
    steps: int,
) -> float:
    for _ in range(warmup):
        step()
    synchronize()  # what the warm-up launched is not ours
    begin = clock()
    tokens = sum(step() for _ in range(steps))
    synchronize()  # launched is not done
    seconds = clock() - begin
    with profile:
        step()
        synchronize()
    total = torch.tensor(tokens, dtype=torch.float64)
    slowest = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(total)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return (total / slowest).item()
