"""Around fully_shard: what it is given, what it cannot take, and each collective that it makes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


def _grad_tensors(output: Any) -> list[Tensor]:
    return [t for t in collect_grad_tensors(output) if isinstance(t, Tensor) and t.requires_grad]


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


def refuse(model: nn.Module, units: Units) -> None:
    """What fully_shard does not refuse itself, or not in every version, and gets wrong."""
    unit_of: dict[nn.Parameter, tuple[str, str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for local, p in module._parameters.items():
            if p is None:
                continue
            name = f"{path}.{local}" if path else local
            unit = _unit(model, path, units)
            if p in unit_of:
                first, its_name = unit_of[p]
                if first != unit:
                    raise UsageError(
                        f"FSDP: '{name}' and '{its_name}' are one parameter in two of the units "
                        "that are sharded one by one; leave these blocks out, or use zero1 to zero3"
                    )
                continue
            unit_of[p] = unit, name
            if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
                raise UsageError(
                    f"FSDP: parameter '{name}' has a hook on its gradient, and fully_shard puts "
                    "another tensor in its place; use zero1 to zero3"
                )
            if p.requires_grad and p.numel() == 0:
                raise UsageError(
                    f"FSDP: parameter '{name}' has no elements, and fully_shard cannot send its "
                    "gradient; freeze it, or use zero1 to zero3"
                )
            if p.requires_grad and p.is_complex():
                raise UsageError(
                    f"FSDP: parameter '{name}' is complex, and the optimizers get that wrong in "
                    "PyTorch's sharded tensors; use zero1 to zero3"
                )
            if not p.is_contiguous():
                raise UsageError(
                    f"FSDP: parameter '{name}' is not contiguous (strides {p.stride()}), and "
                    "fully_shard wants that; make it so, or use zero1 to zero3"
                )
            if p.requires_grad:  # a kept reference to it would not be the model's any more
                p.register_post_accumulate_grad_hook(partial(_refuse_stale, name))


def _unit(model: nn.Module, path: str, units: Units) -> str:
    """The innermost unit that a module lies in."""
    parts = path.split(".") if path else []
    inner = ""
    modules = {id(m): name for name, m in units.items()}
    for i in range(1, len(parts) + 1):
        module = model.get_submodule(".".join(parts[:i]))
        inner = modules.get(id(module), inner)
    return inner


def _refuse_stale(name: str, _original: Tensor) -> None:
    raise UsageError(
        f"FSDP: the model uses parameter '{name}' by a reference of its own (in a list, say), and "
        "fully_shard has put another tensor in its place; use zero1 to zero3"
    )


def names(model: nn.Module) -> dict[tuple[nn.Module, str], str]:
    """Under which name the optimizer knows what a module calls ``weight``: that of its first."""
    first: dict[Any, str] = {}
    found = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for local, p in module._parameters.items():
            if p is not None:
                name = f"{path}.{local}" if path else local
                found[module, local] = first.setdefault(p, name)
    return found


# ------------------------------------------------------------------ around a unit's forward


class Around:
    """Refuses what a unit's forward may do in plain PyTorch, and FSDP's hooks around it spoil."""

    def __init__(self, name: str, unit: nn.Module, inner: set[nn.Module]) -> None:
        self.name = name or "the model"
        self.modules = [m for m in unit.modules() if m is unit or m not in inner]
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
        if held and torch.is_grad_enabled() and _grad_tensors((args, kwargs)):
            self.given = [(value, value.copy()) for value in held]

    def _after(self, _unit: nn.Module, _args: Any, output: Any) -> None:
        given, self.given = self.given, []
        for value, before in given:
            if [*map(id, _items(value))] != [*map(id, _items(before))]:
                raise UsageError(
                    f"FSDP: {self.name} writes into a {type(value).__name__} that it is given, "
                    "and FSDP gives it a copy; return what it makes, or use zero1 or zero2"
                )
        if not torch.is_grad_enabled() or _grad_tensors(output):
            return
        for leaf in tree_leaves(output):  # FSDP acts where backward comes to these
            if leaf is not None and not isinstance(leaf, Tensor | int | float | str):
                raise UsageError(
                    f"FSDP: {self.name} returns a {type(leaf).__name__}, in which FSDP finds no "
                    "tensor; return tensors, or a tuple or dict of them"
                )


def _items(value: Any) -> list[Any]:
    return [*value.keys(), *value.values()] if isinstance(value, dict) else value


# ------------------------------------------------------------------ its collectives


class _Call:
    """One of fully_shard's collectives, as it makes them, but in lockstep."""

    def __init__(self, unit: str, lockstep: Lockstep) -> None:
        self.unit = unit
        self.lockstep = lockstep

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def before(self, what: str, tensor: Tensor) -> None:
        self.lockstep.before(what, self.unit, str(tensor.numel()))


class _Gather(_Call):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: comm.Group, async_op: bool = False
    ) -> Any:
        self.before("gather", output_tensor)
        return comm._gather_into(output_tensor, input_tensor, group=group, async_op=async_op)


class _Scatter(_Call):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: comm.Group,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        self.before("reduce", input_tensor)
        return comm._scatter_into(
            output_tensor, input_tensor, group=group, op=op, async_op=async_op
        )


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
