"""In the package this is strategies/simple_ddp_ga.py: there the last micro-batch is known, so that
no mode is needed. PyTorch's DistributedDataParallel has ``no_sync``."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn


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
            for p in self.model.parameters():
                if p.requires_grad:
                    dist.all_reduce(p.grad)
                    p.grad /= dist.get_world_size()


def accumulate(
    ddp: DDP, microbatches: Sequence[Any], loss_fn: Callable[[nn.Module, Any], Tensor]
) -> None:
    *head, last = microbatches
    with ddp.no_sync():
        for batch in head:
            ddp.backward(loss_fn(ddp.model, batch) / len(microbatches))
    ddp.backward(loss_fn(ddp.model, last) / len(microbatches))
