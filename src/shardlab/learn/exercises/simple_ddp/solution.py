"""In the package this is strategies/data_parallel/simple_ddp.py, which agrees first on who has a
gradient, and simple_ddp_ga.py beside it, where the last micro-batch is known, so that no mode is
needed. PyTorch's DistributedDataParallel has ``no_sync``."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def average_gradients(model: nn.Module) -> None:
    for p in model.parameters():
        if not p.requires_grad:
            continue
        if p.grad is None:  # not used by this rank's batch: zeros, so that every rank calls
            p.grad = torch.zeros_like(p)
        dist.all_reduce(p.grad)  # the sum over the ranks, in place
        p.grad /= dist.get_world_size()


class DDP:
    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.sync = True

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self.sync = self.sync, False
        try:
            yield
        finally:
            self.sync = before

    def backward(self, loss: Tensor) -> None:
        loss.backward()
        if self.sync:
            average_gradients(self.model)


def accumulate(
    ddp: DDP, microbatches: Sequence[Any], loss_fn: Callable[[nn.Module, Any], Tensor]
) -> None:
    *head, last = microbatches
    with ddp.no_sync():
        for batch in head:
            ddp.backward(loss_fn(ddp.model, batch) / len(microbatches))
    ddp.backward(loss_fn(ddp.model, last) / len(microbatches))
