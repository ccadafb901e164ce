"""What is sharded and sent together: some parameters, end to end in a flat buffer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardlab import comm
from shardlab.strategies.flat import Layout


class Unit:
    """Parameters that are sharded and sent together: a bucket (ZeRO-1, 2) or a block (ZeRO-3)."""

    def __init__(
        self,
        label: str,
        params: Mapping[str, nn.Parameter],
        group: comm.Group,
    ) -> None:
        self.label = label
        self.params = dict(params)
        self.layout = Layout.of(params, group.size())
        first = next(iter(params.values()))
        self.like: dict[str, Any] = {"dtype": first.dtype, "device": first.device}
        self.shard: Tensor  # (shard,) this rank's parameters, the ones that are updated
        self.full: Tensor | None = None  # (padded,) all ranks' parameters, while they are here
        self.full_grad: Tensor | None = None  # (padded,) this rank's gradient of all of them
        self.missing: set[str] = set()  # whose gradient is not in it yet
        self.grad: Tensor | None = None  # (shard,) this rank's part of the summed gradient

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The given tensors, end to end: (padded,)."""
        flat = torch.zeros(self.layout.padded, **self.like)
        for name, tensor in tensors.items():
            self.layout.view(flat, name).copy_(tensor)
        return flat

    def split(self, flat: Tensor) -> dict[str, Tensor]:
        """The parameters' places in a full buffer (padded,), by name."""
        return {name: self.layout.view(flat, name) for name in self.params}
