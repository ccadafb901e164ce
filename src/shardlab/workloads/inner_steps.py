"""Training while a loss is computed, as a GAN's discriminator may be: by an optimizer or by hand.

A strategy shares one loss and updates with one optimizer. What another one does in between, each
rank does with its own samples: nobody shares it, and no checkpoint has its state.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardlab.errors import UsageError
from shardlab.workloads import loss_additivity
from shardlab.workloads.base import Batch, LossFn
from shardlab.workloads.user_errors import Place


def refused(loss: LossFn) -> LossFn:
    """The same loss, in which no such optimizer may step. One that a call makes for itself, over
    tensors of its own, may: it leaves nothing behind."""
    seen: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()  # the first call it stepped in
    calls = 0

    @functools.wraps(loss)
    def of_batch(model: nn.Module, batch: Batch) -> Tensor:
        nonlocal calls
        calls += 1

        def look(optimizer: Optimizer, _args: Any, _options: Any) -> None:
            held = {id(p) for group in optimizer.param_groups for p in group["params"]}
            stays = seen.setdefault(optimizer, calls) != calls
            if stays or not held.isdisjoint(map(id, model.parameters())):
                raise _mistake(optimizer)

        handle = register_optimizer_step_pre_hook(look)
        try:
            return loss(model, batch)
        finally:
            handle.remove()

    return of_batch


def trained(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the parameters that train. One with max_norm, which clips the rows that it looks
    up, is left out: where ranks share a batch it is refused by name."""
    clipped = {id(m.weight) for m in model.modules() if getattr(m, "max_norm", None) is not None}
    return {
        name: p.detach().clone()
        for name, p in model.named_parameters()
        if p.requires_grad and id(p) not in clipped
    }


@torch.no_grad()
def fill(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    for name, p in model.named_parameters():
        if name in values:
            p.copy_(values[name])


def after_calls(
    model: nn.Module, loss: LossFn, batches: Sequence[Batch]
) -> dict[str, Tensor] | None:
    """The parameters after their losses were computed in train mode; None: they cannot be."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        for batch in batches:
            loss(loss_additivity.still(model), batch)
    except UsageError:
        raise
    except Exception:
        return None
    finally:
        for module, mode in modes:
            module.training = mode
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def differing(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> list[str]:
    """The names of both whose values differ by more than rounding."""
    return [
        name
        for name, value in before.items()
        if name in after
        and not torch.allclose(value, after[name], rtol=1e-6, atol=0.0, equal_nan=True)
    ]


def by_hand(name: str) -> str:
    return (
        f"parameter '{name}' is changed while the loss is computed: each rank would change it with "
        "its own samples, and a rank that holds a part of it not at all; return one loss and let "
        "the optimizer update (docs/workloads.md, 'Two optimizers')"
    )


def _mistake(optimizer: Optimizer) -> UsageError:
    message = (
        f"an optimizer, {type(optimizer).__name__}, steps while the loss is computed: each rank "
        "would step with its own samples, and no checkpoint would have it; return one loss and "
        "give one optimizer, with a group for each part (docs/workloads.md, 'Two optimizers')"
    )
    place = Place.now()
    return UsageError(message) if place is None else place.mistake(message)
