"""A micro-batch, and the protocol of the data sets that make them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
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


def tensors_of(value: Any, depth: int = 9) -> list[Tensor]:
    """Every tensor of a structure, in order, however it is wrapped. A structure may hold itself, so
    none are looked for that lie deeper than ``depth``."""
    parts: Iterable[Any] = ()
    if isinstance(value, Tensor):
        # Inside vmap a tensor stands for a batch of them: it has no storage and takes no hooks.
        return [] if torch._C._functorch.is_functorch_wrapped_tensor(value) else [value]
    if isinstance(value, Mapping):
        parts = value.values()
    elif isinstance(value, list | tuple | set):
        parts = value
    elif is_dataclass(value) and not isinstance(value, type):
        parts = [getattr(value, field.name, None) for field in fields(value)]
    return [t for part in parts for t in tensors_of(part, depth - 1)] if depth else []


class Dataset(Protocol):
    def __len__(self) -> int: ...

    def batch(self, ids: Sequence[int]) -> Batch:
        """The samples ``ids`` as one batch; with no ids, a batch of zero rows."""
        ...


@dataclass(frozen=True, slots=True)
class StandIn(Batch):
    """A row that counts nothing, for a model that cannot run without rows: ``count`` and
    ``samples`` are 0. The loss gets the row with its own numbers, and its result is dropped."""

    own_count: int
    own_samples: int


@dataclass(frozen=True)
class NeverEmpty:
    """A data set whose batch of no samples is a ``StandIn``."""

    whole: Dataset

    def __len__(self) -> int:
        return len(self.whole)

    @property
    def identity(self) -> Any:
        return getattr(self.whole, "identity", None)

    def batch(self, ids: Sequence[int]) -> Batch:
        return self.whole.batch(ids) if len(ids) else self.stand_in(0)

    def stand_in(self, sample: int) -> StandIn:
        row = self.whole.batch([sample])
        return StandIn(row.inputs, row.targets, 0, 0, row.count, row.samples)
