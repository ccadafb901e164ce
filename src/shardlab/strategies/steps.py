"""The parts of a step that strategies share: plain functions, each with its collective."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from shardlab import comm
from shardlab.errors import UsageError
from shardlab.phases import BACKWARD, FORWARD, phase
from shardlab.workloads.base import Batch, LossFn


def trained_params(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that train: a tied one once, under its first name."""
    found = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not found:
        raise UsageError(f"the model ({type(model).__name__}) has no parameter that trains")
    return found


def broadcast_model(model: nn.Module, group: comm.Group) -> None:
    """Every rank starts from rank 0's parameters and buffers, whatever it was initialised with."""
    make_whole_buffers(model)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        comm.broadcast(tensor.data, group, label=f"init {name}")


def broadcast_buffers(model: nn.Module, group: comm.Group) -> None:
    """Buffers (BatchNorm's running statistics) follow rank 0's, as in DDP."""
    for name, buffer in model.named_buffers():
        comm.broadcast(buffer, group, label=f"buffer {name}")


def make_whole_buffers(model: nn.Module) -> None:
    """Give a buffer whose elements share memory (``expand``) memory that can be written to."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and 0 in buffer.stride() and buffer.numel() > 1:
                module._buffers[name] = buffer.clone(memory_format=torch.contiguous_format)


def local_count(microbatches: Sequence[Batch], device: torch.device) -> Tensor:
    """The number of targets on this rank: (), on the device.

    Created on the device: copying from the host would synchronize.
    """
    if not isinstance(microbatches, list | tuple) or not microbatches:
        raise UsageError("gradients() takes a list of micro-batches, with at least one")
    for batch in microbatches:
        if not isinstance(batch, Batch):
            kind = type(batch).__name__
            raise UsageError(f"a micro-batch is a shardlab.Batch, with its count; this is a {kind}")
    count = sum(b.count for b in microbatches)
    return torch.full((), count, dtype=torch.float64, device=device)


def global_count(microbatches: Sequence[Batch], device: torch.device, group: comm.Group) -> Tensor:
    """The number of targets in the global batch, at least 1: (), on the device."""
    count = local_count(microbatches, device)
    comm.all_reduce(count, group, label="target count")
    return count.clamp_(min=1.0)


def global_mean(loss_sum: Tensor, total: Tensor, group: comm.Group) -> Tensor:
    """The mean loss over the global batch, the same on every rank: ()."""
    comm.all_reduce(loss_sum, group, label="loss")
    return loss_sum / total


def any_rank(flags: Sequence[bool], group: comm.Group, label: str) -> list[bool]:
    """For each flag, whether it is set on any rank. The hosts agree over Gloo, also for GPUs:
    reading the answer from the device would synchronize it."""
    mask = torch.tensor([int(flag) for flag in flags], dtype=torch.uint8)
    comm.all_reduce(mask, comm.host_group(group), op="max", label=label)
    return [bool(flag) for flag in mask.tolist()]


def accumulate(
    model: nn.Module, loss_fn: LossFn, microbatches: Sequence[Batch], divisor: Tensor
) -> Tensor:
    """Forward and backward of each micro-batch in turn; the gradients add up in ``p.grad``.

    Each loss (a sum) is divided by ``divisor`` before backward. Returns their plain sum.
    """
    loss_sum = torch.zeros((), dtype=torch.float64, device=divisor.device)
    for batch in microbatches:
        with phase(FORWARD):
            loss = loss_fn(model, batch)  # ()
        with phase(BACKWARD):
            backward(loss, divisor)
        loss_sum = loss_sum + loss.detach()
    return loss_sum


def backward(loss: Tensor, divisor: Tensor) -> None:
    if not loss.requires_grad:
        raise UsageError(
            "the loss of a micro-batch depends on no parameter that requires a gradient; one "
            "process could not train on it either"
        )
    (loss / divisor).backward()


def in_backward() -> bool:
    """Whether autograd is running: a backward, or a gradient that forward asked for."""
    return bool(torch._C._current_graph_task_id() != -1)


def drop_gradients(params: Mapping[str, nn.Parameter]) -> None:
    """Drop them all. An optimizer's zero_grad() leaves those that it was not given."""
    for p in params.values():
        p.grad = None
