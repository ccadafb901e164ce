"""Parameters that notice when code reads them while their memory is away.

A sharded parameter has its shape but no content. Modules are met with hooks, but a model may read
a parameter anywhere: another module's forward, a penalty over ``model.parameters()``, code that
activation checkpointing runs again. So while a parameter is away its class is a subclass whose
every operation first asks for the content; when it is there, it is an ordinary parameter again,
and costs nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

_PROPERTIES = (
    "shape", "dtype", "device", "layout", "ndim", "requires_grad", "grad", "is_leaf", "grad_fn",
    "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_mkldnn", "itemsize", "nbytes",
    "_version", "_backward_hooks", "_post_accumulate_grad_hooks", "names", "output_nr", "is_nested",
    "is_mps", "is_xpu", "retains_grad", "_base", "_grad", "_grad_fn",
)  # fmt: skip
_METHODS = (
    "size", "dim", "numel", "nelement", "element_size", "stride", "storage_offset", "ndimension",
    "is_floating_point", "is_complex", "is_contiguous", "register_hook", "requires_grad_",
    "register_post_accumulate_grad_hook", "untyped_storage", "get_device", "__len__", "is_signed",
    "is_same_size", "is_inference", "retain_grad", "__hash__",
)  # fmt: skip
_FUNCTIONS = ("is_floating_point", "is_complex", "numel", "is_tensor", "is_same_size")


_PLAIN = nn.Parameter.__torch_function__


@functools.cache
def _harmless() -> frozenset[Any]:
    """What tells nothing of a tensor's content."""
    properties = [getattr(torch.Tensor, name, None) for name in _PROPERTIES]
    return frozenset(
        [
            *(accessor.__get__ for accessor in properties if accessor is not None),
            vars(torch._C.TensorBase)["requires_grad"].__set__,
            vars(torch._C.TensorBase)["grad"].__set__,
            vars(torch._C.TensorBase)["grad"].__delete__,
            *(getattr(torch.Tensor, name) for name in _METHODS),
            *(getattr(torch, name) for name in _FUNCTIONS),
        ]
    )


class Placeholder:
    """Mixed into a parameter's class while its content is away."""

    own_class: type
    ask: Callable[[Any], None]  # set on the parameter itself: brings the content back

    @classmethod
    def __torch_function__(
        cls, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func not in _harmless():
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, Placeholder):
                    leaf.ask(func)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


@functools.cache
def _placeholder_class(kind: type) -> type:
    return type(kind.__name__, (Placeholder, kind), {"own_class": kind})


def can_be_placeholder(parameter: Tensor) -> bool:
    """Whether its class may be exchanged. That of a tensor with a dispatch of its own may not: in a
    simulation parameters are fake tensors, which have no memory to read anyway."""
    kind = type(parameter)
    return issubclass(kind, nn.Parameter) and kind.__torch_function__ == _PLAIN


def become_placeholders(parameters: Iterable[Tensor]) -> None:
    """Their content is gone from now on."""
    for p in parameters:
        if can_be_placeholder(p):
            p.__class__ = _placeholder_class(type(p))


def become_parameters(parameters: Iterable[Tensor]) -> None:
    """Their content is here."""
    for p in parameters:
        if isinstance(p, Placeholder):
            p.__class__ = p.own_class
