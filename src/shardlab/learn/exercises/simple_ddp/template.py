"""Exercise: gradient averaging, and accumulation with no_sync.

Contract: ``average_gradients(model)`` is called on every rank after ``loss.backward()``. When it
returns, the ``.grad`` of every parameter that trains is the mean over the ranks of what the ranks
had, the same on each of them. The weights stay as they are.

- The process group is there already: ``dist.get_world_size()``, ``dist.all_reduce(tensor)``.
- Every rank has a copy of the same model and its own batch of the same size.
- Some parameters do not train (``requires_grad`` is False): leave them alone.
- A parameter may have a gradient on one rank and none (None) on another. Every rank must make the
  same calls in the same order, or they wait for each other for ever.

``DDP(model)`` is made once, on every rank. ``accumulate(ddp, microbatches, loss_fn)`` makes one
step's gradients: when it returns, each ``.grad`` is the mean over all ranks and all micro-batches,
and each gradient was communicated once, in the last micro-batch's backward.

- ``ddp.backward(loss)`` computes gradients and averages them over the ranks, except inside
  ``with ddp.no_sync():``, where it only adds to ``.grad``.
- ``no_sync`` leaves things as it found them, also when an exception comes out of it.
- ``loss_fn(ddp.model, microbatch)`` is a mean over the micro-batch; all have the same size.
- ``microbatches`` is a list, of another length in each step. ``.grad`` is None before.

Check with:  shardlab learn check simple_ddp
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn


def average_gradients(model: nn.Module) -> None:
    # TODO 1: for each parameter that trains, replace .grad by its mean over the ranks.
    raise NotImplementedError("TODO 1: average each parameter's .grad over the ranks")


class DDP:
    def __init__(self, model: nn.Module) -> None:
        self.model = model

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        # TODO 2: inside, backward does not communicate.
        yield

    def backward(self, loss: Tensor) -> None:
        # TODO 3: not inside no_sync.
        loss.backward()
        average_gradients(self.model)


def accumulate(
    ddp: DDP, microbatches: Sequence[Any], loss_fn: Callable[[nn.Module, Any], Tensor]
) -> None:
    # TODO 4: every micro-batch's forward and backward; communicate in the last one only.
    raise NotImplementedError("TODO 4: forward and backward of every micro-batch")
