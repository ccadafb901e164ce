"""PyTorch's ZeRO-1: DistributedDataParallel with ZeroRedundancyOptimizer."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from shardlab.errors import UsageError
from shardlab.optim import factory
from shardlab.strategies import base, refusals, theirs
from shardlab.strategies.pytorch_ddp import PyTorchDDP
from shardlab.strategies.slots import Slots, whole_slots

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
        refusals.refuse_unsupported(setup.model, setup.mesh.size())
        factory.check(setup.make_optimizer, factory.DEALT, "pytorch_zero1")
        for name, p in setup.model.named_parameters():
            span = 1 + sum((n - 1) * s for n, s in zip(p.shape, p.stride(), strict=True))
            if 0 < p.numel() != span:
                raise UsageError(
                    f"pytorch_zero1: parameter '{name}' has gaps in memory (strides {p.stride()}), "
                    "and ZeroRedundancyOptimizer sends what lies in them; make it contiguous"
                )
        group = refusals.dp_group(setup.mesh)

        def make_sharded(params: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
            names = {p: name for name, p in params.items()}

            def of_rank(groups: Any) -> torch.optim.Optimizer:
                mine = [p for group in groups for p in group["params"]]
                return setup.make_optimizer({names[p]: p for p in mine})

            groups = setup.make_optimizer(params).param_groups
            with theirs.refusals(self.NAME):
                return ZeroRedundancyOptimizer(groups, of_rank, group)  # type: ignore[arg-type]

        super().__init__(
            replace(setup, make_optimizer=make_sharded),
            bucket_mb=bucket_mb,
            find_unused_parameters=find_unused_parameters,
        )

    def exchange_averages(self) -> None:
        factory.exchange_averages(self.optimizer.optim)  # type: ignore[attr-defined]
        self.optimizer._sync_params()  # type: ignore[attr-defined]

    def slots(self) -> Slots:
        inner = self.optimizer.optim  # type: ignore[attr-defined]
        owned = {p for group in inner.param_groups for p in group["params"]}
        mine = {name: p for name, p in self.params.items() if p in owned}
        return whole_slots(self.model, mine, inner)

    def state_dict(self) -> dict[str, Any]:
        """Each rank's part of the optimizer's state, put together by name."""
        local = super().state_dict()
        parts: list[Any] = [None] * self.group.size()
        torch.distributed.all_gather_object(parts, self._local_state(), group=self.group)
        local["optimizer"] = {name: state for part in parts for name, state in part.items()}
        return local

    def _local_state(self) -> dict[str, dict[str, Any]]:
        state = self.optimizer.optim.state  # type: ignore[attr-defined]
        return {name: dict(state[p]) for name, p in self.params.items() if p in state}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers()):
            tensor.copy_(state["model"][name])
        mine = self.optimizer.optim  # type: ignore[attr-defined]
        owned = {p for group in mine.param_groups for p in group["params"]}
        mine.state.clear()
        for name, p in self.params.items():
            if p in owned and name in state["optimizer"]:
                mine.state[p] = {k: base.copied(v) for k, v in state["optimizer"][name].items()}
        self.update.load_state_dict(state["update"])
