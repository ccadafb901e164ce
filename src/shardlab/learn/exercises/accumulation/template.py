"""Exercise: gradient accumulation with no_sync.

Contract: ``DDP(model)`` is made once, on every rank. ``accumulate(ddp, microbatches, loss_fn)``
makes one step's gradients: when it returns, each ``.grad`` is the mean over all ranks and all
micro-batches, and each gradient was communicated once, in the last micro-batch's backward.

- ``ddp.backward(loss)`` computes gradients and averages them over the ranks, except inside
  ``with ddp.no_sync():``, where it only adds to ``.grad``.
- ``no_sync`` leaves things as it found them, also when an exception comes out of it.
- ``loss_fn(ddp.model, microbatch)`` is a mean over the micro-batch; all have the same size.
- ``microbatches`` is a list, of another length in each step. ``.grad`` is None before.

Check with:  shardlab learn check accumulation
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn


class DDP:
    def __init__(self, model: nn.Module) -> None:
        self.model = model

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        # TODO 1: inside, backward does not communicate.
        yield

    def backward(self, loss: Tensor) -> None:
        # TODO 2: not inside no_sync.
        loss.backward()
        for p in self.model.parameters():
            if p.requires_grad:
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()


def accumulate(
    ddp: DDP, microbatches: Sequence[Any], loss_fn: Callable[[nn.Module, Any], Tensor]
) -> None:
    # TODO 3: every micro-batch's forward and backward; communicate in the last one only.
    raise NotImplementedError("TODO: forward and backward of every micro-batch")
