"""What a workload is: a model, a loss that is a sum, and samples by number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Batch:
    """A micro-batch. Zero rows with a count of 0 are legal: a rank may have nothing to do."""

    inputs: Any  # what the model is called with: a tensor, or a list or dict of them
    targets: Any
    count: int  # targets that the loss sums over, known before forward
    samples: int

    def to(self, device: torch.device) -> Batch:
        return replace(self, inputs=_to(self.inputs, device), targets=_to(self.targets, device))


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, dict):
        return {k: _to(v, device) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_to(v, device) for v in value)
    return value


# The loss of a batch: a sum over batch.count targets, never their mean, so that batches of
# different sizes add up to the exact global mean. It must call model(...), not a part of the
# model: PyTorch's own strategies act in the model's forward.
LossFn = Callable[[nn.Module, Batch], Tensor]


class Dataset(Protocol):
    def __len__(self) -> int: ...

    def batch(self, ids: Sequence[int]) -> Batch:
        """The samples ``ids`` as one batch; with no ids, a batch of zero rows."""
        ...


@dataclass(frozen=True)
class Workload:
    name: str
    make_model: Callable[[], nn.Module]  # initialised from torch's random state
    loss: LossFn
    dataset: Dataset
    tokens_per_sample: int | None = None  # none: throughput is told in samples
    blocks: tuple[str, ...] = ()  # names of the modules to shard or checkpoint one by one
