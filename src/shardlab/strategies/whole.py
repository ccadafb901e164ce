"""What the tensors of a whole model are called and shaped, whoever holds which part of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Whole:
    """The tensors of a model as one process has it."""

    tensors: dict[str, Tensor]  # parameters and buffers, on the meta device
    trained: tuple[str, ...]  # the parameters that train
    tied: dict[str, str]  # other names, each with the first: ``head.weight: wte.weight``
    unsaved: tuple[str, ...]  # buffers that are no part of the model's state_dict

    @classmethod
    def of(cls, model: nn.Module) -> Whole:
        first: dict[int, str] = {}
        tied = {}
        for named in (model.named_parameters, model.named_buffers):
            for name, tensor in named(remove_duplicate=False):
                if first.setdefault(id(tensor), name) != name:
                    tied[name] = first[id(tensor)]
        skipped = {
            f"{path}.{name}" if path else name
            for path, module in model.named_modules(remove_duplicate=False)
            for name in module._non_persistent_buffers_set
        }
        tensors = (*model.named_parameters(), *model.named_buffers())
        return cls(
            {n: torch.empty(t.shape, dtype=t.dtype, device="meta") for n, t in tensors},
            tuple(n for n, p in model.named_parameters() if p.requires_grad),
            tied,
            tuple(name for name, _ in model.named_buffers() if name in skipped),
        )
