"""Exercise: broadcast.

Contract: ``broadcast_model(model, src)`` is called on every rank. When it returns, every parameter
and every buffer of the model has rank ``src``'s values, on every rank.

- The process group is there already: ``dist.broadcast(tensor, src)`` copies into the tensor.
- The ranks' models have the same shapes and different values.
- In place: the parameters stay the same objects, since an optimizer may hold them already.
- Parameters that do not train are part of the model. So are buffers, of whatever type.

Check with:  shardlab learn check broadcast
"""

import torch.distributed as dist
from torch import nn


def broadcast_model(model: nn.Module, src: int = 0) -> None:
    # TODO: give every rank the values of rank src.
    raise NotImplementedError("TODO: broadcast every parameter and buffer from rank src")
