"""PyTorch's ZeRO-1: DistributedDataParallel with ZeroRedundancyOptimizer."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from shardlab.errors import UsageError
from shardlab.optim import traits
from shardlab.strategies import base, pytorch_errors
from shardlab.strategies.data_parallel.pytorch_ddp import PyTorchDDP
from shardlab.strategies.shards import Shard

with warnings.catch_warnings():  # its package still scripts functional optimizers on import
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.distributed.optim import ZeroRedundancyOptimizer


class PyTorchZero1(PyTorchDDP):
    """PyTorch's own: DDP's gradients, and an optimizer whose state is spread over the ranks.

    Schedule, for n ranks and Ψ bytes of gradients (* called by PyTorch, not in our ledger):

        at construction     broadcast parameters and buffers from rank 0 *
        before forward      broadcast buffers from rank 0 (if the model has any) *
                            all_reduce the number of targets            8 bytes
        all but the last    forward and backward under no_sync          nothing
        the last            forward; backward, all_reduce each bucket when it is full *   Ψ
        after backward      all_reduce the loss                         8 bytes
        step                update the parameters that are this rank's
                            broadcast each rank's parameters *          Ψ

    Cost: 3Ψ(n-1)/n on the wire, half as much again as ``zero1``: every rank gets the whole
    gradient though it needs one n-th. Parameters are dealt out whole, so the shares are uneven.
    """

    NAME = "pytorch_zero1"

    def __init__(
        self,
        setup: base.Setup,
        *,
        bucket_mb: float = 25.0,
        find_unused_parameters: bool = False,
    ) -> None:
        traits.check_some(setup.make_optimizer, self.NAME)
        for name, p in setup.model.named_parameters():
            span = 1 + sum((n - 1) * s for n, s in zip(p.shape, p.stride(), strict=True))
            if 0 < p.numel() != span:
                raise UsageError(
                    f"pytorch_zero1: parameter '{name}' has gaps in memory (strides {p.stride()}), "
                    "and ZeroRedundancyOptimizer sends what lies in them; make it contiguous"
                )

        def make_sharded(params: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
            names = {p: name for name, p in params.items()}

            def of_rank(groups: Any) -> torch.optim.Optimizer:
                mine = [p for group in groups for p in group["params"]]
                return setup.make_optimizer({names[p]: p for p in mine})

            groups = [dict(group) for group in setup.make_optimizer(params).param_groups]
            with pytorch_errors.refusals(self.NAME):
                return ZeroRedundancyOptimizer(groups, of_rank, setup.group)  # type: ignore[arg-type]

        super().__init__(
            replace(setup, make_optimizer=make_sharded),
            bucket_mb=bucket_mb,
            find_unused_parameters=find_unused_parameters,
        )

    def shards(self) -> list[Shard]:
        """Everything, and once more what this rank's optimizer updates."""
        found = super().shards()
        owned = {p for group in self.update.inner.param_groups for p in group["params"]}
        mine = [s._replace(value=None, grad=None) for s in found if s.key in owned]
        return [*(s._replace(key=None) for s in found), *mine]
