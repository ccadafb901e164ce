"""Exercise: gradient averaging.

Contract: ``average_gradients(model)`` is called on every rank after ``loss.backward()``. When it
returns, the ``.grad`` of every parameter that trains is the mean over the ranks of what the ranks
had, the same on each of them. The weights stay as they are.

- The process group is there already: ``dist.get_world_size()``, ``dist.all_reduce(tensor)``.
- Every rank has a copy of the same model and its own batch of the same size.
- Some parameters do not train (``requires_grad`` is False): leave them alone.
- A parameter may have a gradient on one rank and none (None) on another. Every rank must make the
  same calls in the same order, or they wait for each other for ever.

Check with:  shardlab learn check simple_ddp
"""

import torch.distributed as dist
from torch import nn


def average_gradients(model: nn.Module) -> None:
    # TODO: for each parameter that trains, replace .grad by its mean over the ranks.
    raise NotImplementedError("TODO: average each parameter's .grad over the ranks")
