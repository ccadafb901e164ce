"""Models and options that strategies refuse, by name, before anything is done with them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import is_lazy

from shardlab import comm
from shardlab.errors import UsageError, unknown

T = TypeVar("T")


DTYPES = {"fp32": None, "bf16": torch.bfloat16}


def option(name: str, value: str, known: Mapping[str, T]) -> T:
    """What a strategy's option stands for, or its refusal with the nearest right word."""
    if value not in known:
        raise unknown(name, value, known)
    return known[value]


def comm_dtype(strategy: str, value: str, params: Mapping[str, Tensor]) -> torch.dtype | None:
    """What gradients (ZeRO-3: parameters) travel in; None: their own type."""
    dtype = option(f"{strategy}'s comm_dtype", value, DTYPES)
    for name, p in params.items():
        if dtype is not None and p.is_complex():
            raise UsageError(
                f"{strategy}'s comm_dtype {value}: '{name}' is complex, and its imaginary part "
                "would be lost; leave comm_dtype out"
            )
    return dtype


def dp_group(mesh: DeviceMesh) -> comm.Group:
    """The process group of the data-parallel ranks: the mesh's dimension "dp"."""
    if "dp" not in (mesh.mesh_dim_names or ()):
        names = ", ".join(mesh.mesh_dim_names or ()) or "none"
        raise UsageError(
            f"the device mesh needs a dimension named 'dp', and its names are: {names}; make it "
            "with init_device_mesh(device, (ranks,), mesh_dim_names=('dp',))"
        )
    return mesh.get_group("dp")


def refuse_unsupported(model: nn.Module, ranks: int | None = None) -> None:
    """Refuse, by name, a model that no strategy can train, before anything is done with it."""
    if not any(p.requires_grad for p in model.parameters()):
        raise UsageError(f"the model ({type(model).__name__}) has no parameter that trains")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise UsageError(
                f"'{name}' has no shape yet (a lazy module): call the model once on a sample in "
                "make_model, or give the module its sizes"
            )
    for name, p in model.named_parameters():
        if ranks != 1 and getattr(p, "_post_accumulate_grad_hooks", None):
            raise UsageError(
                f"parameter '{name}' has a hook of the model's own that runs after its gradient is "
                "added up; on several ranks that is not the whole gradient: use p.register_hook"
            )
    for name, module in model.named_modules():
        is_sparse = isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
        if is_sparse and module.weight.requires_grad:
            raise UsageError(
                f"module '{name}' has sparse=True, and no strategy sends sparse gradients; "
                "build it with sparse=False"
            )
        if ranks != 1 and getattr(module, "max_norm", None) is not None:
            raise UsageError(
                f"module '{name}' has max_norm: its forward changes the weight by the rows that it "
                "looks up, which differ from rank to rank; leave max_norm out, or use one rank"
            )


def refuse_sparse(name: str, gradient: Tensor | None) -> None:
    """F.embedding may give a sparse gradient, and no module shows that it will."""
    if gradient is not None and gradient.layout != torch.strided:
        raise UsageError(
            f"parameter '{name}' got a sparse gradient, and no strategy sends these; call "
            "F.embedding with sparse=False"
        )


def refuse_sparse_gradients(params: Mapping[str, nn.Parameter]) -> None:
    """Look at each parameter's first gradient, once."""
    handles: dict[str, Any] = {}
    for name, p in params.items():

        def look(gradient: Tensor, name: str = name) -> None:
            refuse_sparse(name, gradient)
            handles.pop(name).remove()

        handles[name] = p.register_hook(look)


def refuse_number(name: str, value: float, is_right: bool, wanted: str) -> None:
    if not is_right:
        raise UsageError(f"{name} must be {wanted}, got {value}")
