"""What the tensors of a whole model are called and shaped, whoever holds which part of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Whole:
    """The tensors of a model as one process has it."""

    tensors: dict[str, Tensor]  # parameters and buffers, on the meta device
    # Other names in the model's state_dict, each with the first: ``head.weight: wte.weight``
    tied: dict[str, str]
    unsaved: tuple[str, ...]  # buffers that are no part of the model's state_dict

    @classmethod
    def of(cls, model: nn.Module) -> Whole:
        skipped = {
            f"{path}.{name}" if path else name
            for path, module in model.named_modules(remove_duplicate=False)
            for name in module._non_persistent_buffers_set
        }
        first: dict[int, str] = {}
        tied = {}
        for named in (model.named_parameters, model.named_buffers):
            for name, tensor in named(remove_duplicate=False):
                if first.setdefault(id(tensor), name) != name and name not in skipped:
                    tied[name] = first[id(tensor)]
        tensors = dict((*model.named_parameters(), *model.named_buffers()))
        return cls(
            {n: torch.empty(t.shape, dtype=t.dtype, device="meta") for n, t in tensors.items()},
            # A buffer that is a parameter as well has a tensor of its own here.
            {name: first for name, first in tied.items() if name not in tensors},
            tuple(name for name, _ in model.named_buffers() if name in skipped),
        )


def as_state_dict(
    tensors: Mapping[str, Tensor], tied: Mapping[str, str], unsaved: Sequence[str]
) -> dict[str, Tensor]:
    """A whole model's tensors, each by its first name, under the names of its state_dict."""
    named = {**tensors, **{name: tensors[first] for name, first in tied.items()}}
    return {name: tensor for name, tensor in named.items() if name not in unsaved}
