"""The tensors that fully_shard deals out: this rank's rows, and the whole."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from shardlab import comm
from shardlab.strategies.slots import Slot


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def slot(name: str, tensor: Tensor) -> Slot:
    """The rows that fully_shard has dealt to this rank: ceil(rows / n), the last ones fewer."""
    if not isinstance(tensor, DTensor):
        return Slot(name, tensor.shape, 0, tensor.detach())
    group = tensor.device_mesh.get_group(-1)
    rows = -(-len(tensor) // group.size())
    of_row = tensor.numel() // max(1, len(tensor))
    start = min(group.rank() * rows, len(tensor)) * of_row
    return Slot(name, tensor.shape, start, tensor.to_local().detach())


def whole_state(value: Any) -> Any:
    """A value of an optimizer's state as a whole tensor. A number stays a number."""
    return whole(value) if isinstance(value, Tensor) else value


def whole(tensor: Tensor) -> Tensor:
    """A copy of the whole of it. A collective, if it is sharded.

    fully_shard deals out rows: each rank has ceil(rows / n), the last ones fewer or none. (Its own
    ``full_tensor`` crashes with CUDA tensors over Gloo, torch 2.11.)
    """
    if not isinstance(tensor, DTensor):
        return tensor.clone()
    group, local = tensor.device_mesh.get_group(-1), tensor.to_local()
    rows = -(-len(tensor) // group.size())
    padded = local.new_zeros(rows, *local.shape[1:])
    padded[: len(local)] = local
    full = local.new_empty(rows * group.size(), *local.shape[1:])
    comm.all_gather(full, padded, group, label="full")
    return full[: len(tensor)].clone()


def like(full: Tensor, tensor: Tensor) -> Tensor:
    """Sharded as ``tensor`` is."""
    if not isinstance(tensor, DTensor):
        return full.clone()
    return distribute_tensor(full.to(tensor.device), tensor.device_mesh, tensor.placements)
