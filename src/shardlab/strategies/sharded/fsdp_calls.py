"""Around fully_shard: what it is given, what it cannot take, and each collective that it makes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves

from shardlab import comm
from shardlab.errors import UsageError
from shardlab.strategies.lockstep import Lockstep

try:  # torch 2.13 also looks into dataclasses
    from torch.distributed.fsdp._common_utils import collect_grad_tensors
except ImportError:
    collect_grad_tensors = tree_leaves  # type: ignore[assignment]

Units = Mapping[str, nn.Module]


def units(model: nn.Module, blocks: Sequence[str]) -> dict[str, nn.Module]:
    """The modules to shard, a block inside another before that one, and the root last.

    A module under two names is one, and one without parameters has nothing to shard.
    """
    found: dict[str, nn.Module] = {}
    for name in sorted(blocks, key=lambda name: -name.count(".")):
        module = model.get_submodule(name)
        if module not in found.values() and any(True for _ in module.parameters()):
            found[name] = module
    return {**found, "": model}


def own_modules(unit: nn.Module, units: Units) -> set[nn.Module]:
    """The modules that fully_shard takes for a unit's: those that are in no other unit inside."""
    found, waiting, heads = {unit}, [unit], {*units.values()}
    while waiting:
        inside = [m for m in waiting.pop().children() if m not in found and m not in heads]
        found.update(inside)
        waiting += inside
    return found


def refuse(model: nn.Module, units: Units) -> None:
    """Refuse what fully_shard, in this version or an older one, gets wrong without an error."""
    named: dict[nn.Parameter, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        named.setdefault(p, []).append(name)
    in_units: Counter[nn.Parameter] = Counter()
    for unit in units.values():
        own = own_modules(unit, units)
        in_units.update({p for m in own for p in m._parameters.values() if p is not None})
    for p, (name, *others) in named.items():
        if in_units[p] > 1:
            raise UsageError(
                f"FSDP: '{others[-1]}' and '{name}' are one parameter in two of the units "
                "that are sharded one by one; leave these blocks out, or use zero1 to zero3"
            )
        if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
            raise UsageError(
                f"FSDP: parameter '{name}' has a hook on its gradient, and fully_shard puts "
                "another tensor in its place; use zero1 to zero3"
            )
        if p.requires_grad and p.is_complex():
            raise UsageError(
                f"FSDP: parameter '{name}' is complex, and the optimizers get that wrong in "
                "PyTorch's sharded tensors; use zero1 to zero3"
            )
        if p.requires_grad:  # a kept reference to it would not be the model's any more
            p.register_post_accumulate_grad_hook(partial(_refuse_stale, name))


def _refuse_stale(name: str, _original: Tensor) -> None:
    raise UsageError(
        f"FSDP: the model uses parameter '{name}' by a reference of its own (in a list, say), and "
        "fully_shard has put another tensor in its place; use zero1 to zero3"
    )


def names(model: nn.Module) -> dict[tuple[nn.Module, str], str]:
    """Under which name the optimizer knows what a module calls ``weight``: that of its first."""
    first = {p: name for name, p in model.named_parameters()}
    return {
        (module, local): first[p]
        for module in model.modules()
        for local, p in module._parameters.items()
        if p is not None
    }


# ------------------------------------------------------------------ around a unit's forward


class Around:
    """Refuses what a unit's forward may do in plain PyTorch, and FSDP's hooks around it spoil."""

    def __init__(self, name: str, unit: nn.Module, units: Units) -> None:
        self.name = name or "the model"
        self.modules = own_modules(unit, units)
        self.given: list[tuple[Any, Any]] = []  # lists and dicts among the inputs, and a copy
        unit.register_forward_pre_hook(self._first, prepend=True)
        unit.register_forward_pre_hook(self._before, with_kwargs=True)
        unit.register_forward_hook(self._after)

    def _first(self, _unit: nn.Module, _args: Any) -> None:
        """Before FSDP's own: it would put its parameters in the place of others."""
        for module in self.modules:
            for local, p in module._parameters.items():
                if p is not None and not isinstance(p, nn.Parameter):
                    raise UsageError(
                        f"FSDP: {self.name} is called with another tensor as its '{local}' "
                        "(functional_call), which FSDP would overwrite; use zero1 or zero2"
                    )

    def _before(self, _unit: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """FSDP has put the inputs that need a gradient into new lists and dicts."""
        held = [v for v in (*args, *kwargs.values()) if isinstance(v, list | dict)]
        tensors = [t for t in collect_grad_tensors((args, kwargs)) if isinstance(t, Tensor)]
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            self.given = [(value, value.copy()) for value in held]

    def _after(self, _unit: nn.Module, _args: Any, _output: Any) -> None:
        given, self.given = self.given, []
        for value, before in given:
            if [*map(id, _items(value))] != [*map(id, _items(before))]:
                raise UsageError(
                    f"FSDP: {self.name} writes into a {type(value).__name__} that it is given, "
                    "and FSDP gives it a copy; return what it makes, or use zero1 or zero2"
                )


def _items(value: Any) -> list[Any]:
    return [*value.keys(), *value.values()] if isinstance(value, dict) else value


# ------------------------------------------------------------------ its collectives


@dataclass
class _Call:
    """One of fully_shard's collectives, in the ledger and in lockstep."""

    unit: str
    lockstep: Lockstep

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _Gather(_Call):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: comm.Group, **_: Any
    ) -> None:
        self.lockstep.before("gather", self.unit, str(output_tensor.numel()))
        comm.gather_as_pytorch(output_tensor, input_tensor, group, label=f"params {self.unit}")


class _Scatter(_Call):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: comm.Group, op: Any, **_: Any
    ) -> None:
        self.lockstep.before("scatter", self.unit, str(input_tensor.numel()))
        comm.scatter_as_pytorch(output_tensor, input_tensor, group, op, label=f"grad {self.unit}")


def watch(unit: nn.Module, name: str, lockstep: Lockstep) -> None:
    """Make the unit's collectives in lockstep, and with zeros where a gradient is missing."""
    assert isinstance(unit, FSDPModule)
    unit.set_custom_all_gather(_Gather(name, lockstep))  # type: ignore[arg-type]
    unit.set_custom_reduce_scatter(_Scatter(name, lockstep))  # type: ignore[arg-type]
    if hasattr(unit, "set_reduce_scatter_unused_params"):  # torch 2.13
        unit.set_reduce_scatter_unused_params(True, recurse=False)
    else:
        send_zeros(unit)


def send_zeros(unit: FSDPModule) -> None:
    """The same, for torch 2.11."""
    group: Any = unit._get_fsdp_state()._fsdp_param_group
    if group is None:
        return
    post_backward = group.post_backward

    def with_zeros(*args: Any) -> None:
        for held in group.fsdp_params:
            whole = getattr(held, "_unsharded_param", None)
            if whole is None or not whole.requires_grad or whole.grad is not None:
                continue
            if held.unsharded_accumulated_grad is None:
                whole.grad = torch.zeros_like(whole)
        post_backward(*args)

    group.post_backward = with_zeros


def as_one(model: nn.Module) -> None:
    """Tell fully_shard that this is the root, though a loss may call a part of the model first."""
    assert isinstance(model, FSDPModule)
    model._get_fsdp_state()._lazy_init()


def hide(model: nn.Module) -> None:
    """Take away the mark by which a model sees that FSDP runs it, and computes something else than
    in one process: speech models of transformers then leave out none of their layers (layerdrop).
    """
    for module in model.modules():
        if hasattr(module, "_is_fsdp_managed_module"):
            module._is_fsdp_managed_module = False  # type: ignore[assignment]
