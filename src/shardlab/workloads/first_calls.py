"""Watches what a model changes in itself in its first forwards; refuses what no strategy can do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shardlab.errors import UsageError
from shardlab.workloads.base import Batch, LossFn


def watch_first_calls(loss: LossFn, say: Callable[[str], None]) -> LossFn:
    """The same loss, with a look at the model before and after each of its first two calls.

    It refuses a model that makes or replaces parameters or buffers in forward: no strategy and no
    optimizer would know of the new ones. ``say`` gets a note about state that a model keeps in
    plain attributes. Two calls, because what changes in the first one alone is a cache.
    """
    changed: list[set[str]] = []  # the attributes that each call has changed
    calls = 0  # those that do not return count too: a pipeline ends the forward of a stage

    def watched(model: nn.Module, batch: Batch) -> Tensor:
        nonlocal calls
        if calls == 2:
            return loss(model, batch)
        calls += 1
        # DDP counts and keeps things of its own: look at the user's model inside it.
        users = model.module if isinstance(model, DistributedDataParallel) else model
        tensors, attributes = registered(users), _attributes(users)
        result = loss(model, batch)
        refuse_new_tensors(tensors, registered(users))
        after = _attributes(users)
        changed.append({name for name in after if _differs(attributes.get(name), after[name])})
        always = changed[0] & changed[-1]
        if len(changed) == 2 and always:
            names = ", ".join(f"'{name}'" for name in sorted(always)[:3])
            say(
                f"the model changes {names} in every forward: each rank has its own, and no "
                "checkpoint has it; if forward also reads it, make it a buffer (register_buffer)"
            )
        return result

    return watched


def registered(model: nn.Module) -> dict[str, Tensor]:
    """The model's parameters and buffers by name."""
    return dict((*model.named_parameters(), *model.named_buffers()))


def refuse_new_tensors(before: dict[str, Tensor], after: dict[str, Tensor]) -> None:
    """Refuse a forward that made or replaced one of them."""
    for name, tensor in after.items():
        if name not in before:
            raise UsageError(
                f"the model makes '{name}' in its first forward, when it is too late to train, "
                "send or save it: make it in __init__, or run the model once in make_model"
            )
        # fully_shard itself puts whole parameters in the place of sharded ones during forward.
        is_ours = isinstance(before[name], DTensor) or isinstance(tensor, DTensor)
        if isinstance(tensor, nn.Parameter) and tensor is not before[name] and not is_ours:
            raise UsageError(
                f"the model puts a new parameter in the place of '{name}' in forward; the "
                "optimizer has the old one, so the new one would never train: change it in place "
                "under torch.no_grad(), or use torch.nn.utils.parametrize"
            )


def _attributes(model: nn.Module) -> dict[str, Any]:
    """Numbers and unregistered tensors that modules hold in plain attributes, by their path."""
    return {
        f"{path}.{name}" if path else name: value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if name != "training" and isinstance(value, bool | int | float | Tensor)
    }


def _differs(before: Any, after: Any) -> bool:
    if isinstance(after, Tensor):
        return after is not before  # comparing the content would wait for a GPU
    return type(before) is not type(after) or bool(before != after)
