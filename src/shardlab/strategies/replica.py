"""What every strategy with whole replicas does alike. Only ``gradients`` tells them apart."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardlab import optimizers
from shardlab.strategies import base
from shardlab.strategies.slots import Slots, replica
from shardlab.strategies.update import Rule, Update
from shardlab.workloads.base import Batch, LossFn


class Replica:
    """A whole model and a whole optimizer on each rank."""

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: base.MakeOptimizer,
        loss_fn: LossFn,
        mesh: DeviceMesh,
        *,
        rule: Rule = Rule(),
    ) -> None:
        base.refuse_unsupported(model, mesh.size())
        self.model = model
        self.loss_fn = loss_fn
        self.group = base.dp_group(mesh)
        self.params = base.trainable(model)
        base.refuse_sparse_gradients(self.params)
        self.device = next(iter(self.params.values())).device
        self.optimizer = make_optimizer(self.params)
        self.update = Update(self.optimizer, rule)

    def step(self) -> None:
        self.update([p.grad for p in self.params.values() if p.grad is not None])
        base.drop_gradients(self.params)

    @torch.no_grad()
    def infer(self, function: base.Infer[base.T], batch: Batch) -> base.T:
        """``function(model, batch)`` without gradients. Every rank calls it, with rows or none."""
        return function(self.model, batch)

    def exchange_averages(self) -> None:
        """Parameters and their moving average change places, between steps. A collective."""
        optimizers.exchange_averages(self.optimizer)

    def full_params(self) -> dict[str, Tensor]:
        base.broadcast_buffers(self.model, self.group)
        tensors = (*self.model.named_parameters(), *self.model.named_buffers())
        return {name: t.detach().clone() for name, t in tensors}

    def full_grads(self) -> dict[str, Tensor | None]:
        scale = self.update.scale
        return {n: None if p.grad is None else p.grad / scale for n, p in self.params.items()}

    def slots(self) -> Slots:
        return replica(self.model, self.params, self.optimizer)

    def state_dict(self) -> dict[str, Any]:
        optimizer = {
            name: {k: copied(v) for k, v in self.optimizer.state[p].items()}
            for name, p in self.params.items()
            if p in self.optimizer.state
        }
        update = self.update.state_dict()
        return {"model": self.full_params(), "optimizer": optimizer, "update": update}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers()):
            tensor.copy_(state["model"][name])
        # The optimizer numbers its parameters in the order of its groups.
        groups = self.optimizer.state_dict()["param_groups"]
        held = [p for group in self.optimizer.param_groups for p in group["params"]]
        names = {p: name for name, p in self.params.items()}
        numbered = {
            i: {k: copied(v) for k, v in state["optimizer"][names[p]].items()}
            for i, p in enumerate(held)
            if names.get(p) in state["optimizer"]
        }
        self.optimizer.load_state_dict({"state": numbered, "param_groups": groups})
        self.update.load_state_dict(state["update"])


def copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
