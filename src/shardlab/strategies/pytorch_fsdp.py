"""PyTorch's fully_shard (FSDP2) under the contract: what its three twins have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from shardlab import optimizers
from shardlab.errors import UsageError
from shardlab.strategies import base, dtensors
from shardlab.strategies.replica import copied
from shardlab.strategies.sharded import DTYPES
from shardlab.strategies.slots import Slots
from shardlab.strategies.update import Rule, Update
from shardlab.workloads.base import Batch, LossFn


class PyTorchFSDP:
    """``fully_shard`` on every block and on the root, as PyTorch recommends."""

    RESHARD_AFTER_FORWARD: bool

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: base.MakeOptimizer,
        loss_fn: LossFn,
        mesh: DeviceMesh,
        *,
        rule: Rule = Rule(),
        blocks: Sequence[str] = (),
        comm_dtype: str = "fp32",
    ) -> None:
        self.model = model
        self.loss_fn = loss_fn
        self.group = mesh.get_group("dp")
        self.ranks = mesh.size()
        self.device = next(model.parameters()).device
        base.broadcast_model(model, self.group)  # fully_shard does not
        self.mesh = self.shard_mesh(mesh)
        dtype = base.option("comm_dtype", comm_dtype, DTYPES)
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
        self.names: dict[Tensor, str] = {}  # of the whole parameters that forward used
        for name in (*blocks, ""):
            module = model.get_submodule(name)
            try:
                fully_shard(
                    module,
                    mesh=self.mesh,
                    reshard_after_forward=self.RESHARD_AFTER_FORWARD,
                    mp_policy=policy,
                )
            except ValueError as error:  # it cannot shard a parameter without dimensions
                raise UsageError(f"fully_shard refuses: {error}") from None
        self.params = base.trainable(model)
        optimizers.check(make_optimizer, optimizers.ROWS, "fully_shard", self.mesh)
        self.optimizer = make_optimizer(self.params)
        self.update = Update(self.optimizer, rule)
        self.checks_left = 2  # steps in which we look for parameters without a gradient
        self.hooks = [self._watch(model, name) for name in (*blocks, "")]

    def shard_mesh(self, mesh: DeviceMesh) -> DeviceMesh:
        return mesh

    def gradients(self, microbatches: Sequence[Batch]) -> Tensor:
        base.broadcast_buffers(self.model, self.group)
        total = base.global_count(microbatches, self.device, self.group)
        # FSDP divides the sum over ranks by their number; we want the sum.
        divisor = self.update.divisor(total) / self.ranks
        loss_fn = self._refusing_loss if self.checks_left else self.loss_fn
        loss_sum = base.accumulate(self.model, loss_fn, microbatches, divisor)
        if self.checks_left:
            self.checks_left -= 1
            self.names.clear()
        return base.global_mean(loss_sum, total, self.group)

    def step(self) -> None:
        grads = [p.grad for p in self.params.values() if p.grad is not None]
        self.update([dtensors.local(g) for g in grads], sharded_over=self.mesh.get_group(-1))
        base.drop_gradients(self.params)

    @torch.no_grad()
    def infer(self, function: base.Infer[base.T], batch: Batch) -> base.T:
        """``function(model, batch)`` without gradients. Every rank calls it, with rows or none."""
        result = function(self.model, batch)
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # there is no backward that would
        self.names.clear()
        return result

    def exchange_averages(self) -> None:
        """Parameters and their moving average change places, between steps."""
        optimizers.exchange_averages(self.optimizer)

    # ------------------------------------------------------------ a parameter without a gradient

    def _watch(self, model: nn.Module, block: str) -> Any:
        """Learn the names of the whole parameters, which exist only while a module runs."""

        def note(module: nn.Module, _inputs: Any) -> None:
            if self.checks_left:
                prefix = f"{block}." if block else ""
                for name, p in module.named_parameters():
                    if p.requires_grad and not isinstance(p, DTensor):
                        self.names[p] = prefix + name

        return model.get_submodule(block).register_forward_pre_hook(note)

    def _refusing_loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """FSDP sends gradients in step with the other ranks: one that is missing cannot be sent."""
        loss = self.loss_fn(model, batch)
        reached = _leaves(loss)
        for parameter, name in self.names.items():
            if parameter not in reached:
                raise UsageError(
                    f"FSDP: parameter '{name}' gets no gradient on rank {self.group.rank()}; "
                    "freeze it, or use a strategy that allows that (zero1 to zero3 do)"
                )
        return loss

    # ------------------------------------------------------------ whole tensors

    def full_params(self) -> dict[str, Tensor]:
        base.broadcast_buffers(self.model, self.group)
        tensors = (*self.model.named_parameters(), *self.model.named_buffers())
        return {name: dtensors.whole(t.detach()) for name, t in tensors}

    def full_grads(self) -> dict[str, Tensor | None]:
        scale = self.update.scale
        return {
            name: None if p.grad is None else dtensors.whole(p.grad) / scale
            for name, p in self.params.items()
        }

    def slots(self) -> Slots:
        tensors = (*self.model.named_parameters(), *self.model.named_buffers())
        trained = {p: dtensors.slot(name, p) for name, p in self.params.items()}
        return Slots([dtensors.slot(name, t) for name, t in tensors], trained, self.optimizer)

    def state_dict(self) -> dict[str, Any]:
        optimizer = {
            name: {k: dtensors.whole_state(v) for k, v in self.optimizer.state[p].items()}
            for name, p in self.params.items()
            if p in self.optimizer.state
        }
        update = self.update.state_dict()
        return {"model": self.full_params(), "optimizer": optimizer, "update": update}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers()):
            tensor.copy_(dtensors.like(state["model"][name], tensor))
        self.optimizer.state.clear()
        for name, p in self.params.items():
            if name in state["optimizer"]:
                self.optimizer.state[p] = {
                    key: dtensors.like(value, p)
                    if isinstance(value, Tensor) and value.shape == p.shape
                    else copied(value)
                    for key, value in state["optimizer"][name].items()
                }
        self.update.load_state_dict(state["update"])


def _leaves(loss: Tensor) -> set[Tensor]:
    """The tensors that will get a gradient from this loss."""
    found, seen, todo = set(), set(), [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(node.variable)
        todo.extend(parent for parent, _ in node.next_functions)
    return found
