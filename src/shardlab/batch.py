"""A micro-batch, and the data sets that make them: what both data and workloads are about."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """A micro-batch. Zero rows with a count of 0 are legal: a rank may have nothing to do."""

    inputs: Any  # what the model is called with: a tensor, or a list or dict of them
    targets: Any
    count: int  # targets that the loss sums over, known before forward
    samples: int

    def to(self, device: torch.device) -> Batch:
        return self.map(lambda tensor: tensor.to(device, non_blocking=True))

    def map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """The same batch with every tensor of its inputs and targets changed."""
        return replace(
            self,
            inputs=map_tensors(self.inputs, change),
            targets=map_tensors(self.targets, change),
        )


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same structure with every tensor changed: lists, tuples, named tuples, mappings (which
    become dicts) and dataclasses, however nested. Anything else stays as it is."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {k: map_tensors(v, change) for k, v in value.items()}
    if isinstance(value, list | tuple):
        parts = [map_tensors(v, change) for v in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if is_dataclass(value) and not isinstance(value, type):
        changed = copy.copy(value)
        for field in fields(value):
            part = map_tensors(getattr(value, field.name), change)
            object.__setattr__(changed, field.name, part)  # also of a frozen one
        return changed
    return value


def tensors_of(value: Any) -> list[Tensor]:
    """Every tensor of a structure, in order."""
    found: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(value, keep)
    return found


class Dataset(Protocol):
    def __len__(self) -> int: ...

    def batch(self, ids: Sequence[int]) -> Batch:
        """The samples ``ids`` as one batch; with no ids, a batch of zero rows."""
        ...
