"""Models that no strategy can train: refused by name where a strategy is built.

Before that, ``refuse_unsupported`` looks at the model; after it, ``refuse_sparse_gradients`` at the
first gradients of its parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from shardlab.errors import UsageError
from shardlab.strategies import steps


def refuse_unsupported(model: nn.Module, ranks: int) -> None:
    """Refuse, by name, a model that no strategy can train, before anything is done with it."""
    steps.trained_params(model)
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
