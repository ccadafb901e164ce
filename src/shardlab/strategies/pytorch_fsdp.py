"""PyTorch's fully_shard (FSDP2) under the contract: what its three twins have in common."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from shardlab import comm
from shardlab.errors import UsageError
from shardlab.optim import factory
from shardlab.strategies import base, dtensors, fsdp_calls, overlap, refusals, steps, theirs
from shardlab.strategies.lockstep import Lockstep
from shardlab.strategies.sharded import DTYPES
from shardlab.strategies.slots import Slots
from shardlab.workloads.base import Batch


class PyTorchFSDP(base.Strategy):
    """``fully_shard`` on every block and on the root, as PyTorch recommends.

    It expects of all ranks the same blocks in the same order and a gradient for every parameter.
    The first is checked (``Lockstep``); where a gradient is missing, zeros are sent, and a
    parameter that got one on no rank has none.
    """

    WORKS_BY_BLOCK = True
    KEEPS_PARTS = True
    RESHARD_AFTER_FORWARD: bool

    def __init__(self, setup: base.Setup, *, comm_dtype: str = "fp32") -> None:
        super().__init__(setup, builds_optimizer=False)
        model = self.model
        self.ranks = setup.mesh.size()
        steps.broadcast_model(model, self.group)  # fully_shard does not
        self.mesh = self.shard_mesh(setup.mesh)
        self.lockstep = Lockstep("FSDP", self.group)
        units = fsdp_calls.units(model, setup.blocks)
        fsdp_calls.refuse(model, units)
        with theirs.refusals("FSDP"):
            self.shard(units, refusals.option("comm_dtype", comm_dtype, DTYPES))
            fsdp_calls.as_one(model)
        self.params = {n: p for n, p in model.named_parameters() if p.requires_grad}
        factory.check(setup.make_optimizer, factory.ROWS, "fully_shard", self.mesh)
        self.own(setup, self.params)
        self.used: set[str] = set()  # what got a gradient on this rank, in this step
        self.news: list[comm.Pending] = []  # what got one on any rank
        self.names = fsdp_calls.names(model)
        self.unwatched = set(self.params)  # whose whole, which is made by a first gather, we await
        self.arrived: set[str] = set()  # what got a gradient in this micro-batch
        inner = {m for unit in units.values() if unit is not model for m in unit.modules()}
        for name, unit in units.items():
            unit.register_forward_pre_hook(self._watch)
            fsdp_calls.Around(name, unit, inner if unit is model else set())

    def shard(self, units: fsdp_calls.Units, dtype: torch.dtype | None) -> None:
        """Every block, those inside others first, and the root last, which takes what is left."""
        for name, unit in units.items():
            fully_shard(
                unit,
                mesh=self.mesh,
                reshard_after_forward=self.RESHARD_AFTER_FORWARD,
                mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype),
            )
            fsdp_calls.watch(unit, name or "the root", self.lockstep)

    def shard_mesh(self, mesh: DeviceMesh) -> DeviceMesh:
        return mesh

    def gradients(self, microbatches: Sequence[Batch]) -> Tensor:
        steps.broadcast_buffers(self.model, self.group)
        total = steps.global_count(microbatches, self.device, self.group)
        # FSDP divides the sum over ranks by their number; we want the sum.
        divisor = self.update.divisor(total) / self.ranks
        self.used.clear()
        with theirs.refusals("FSDP"), self.lockstep.on_course("step"):
            loss_sum = steps.accumulate(self.model, self._loss, microbatches, divisor)
        used = overlap.Used(self.params, self.used, self.device, self.group)
        self.news = [used.pending]
        for name in used.unused():
            self.params[name].grad = None
        return steps.global_mean(loss_sum, total, self.group)

    def step(self) -> None:
        grads = [p.grad for p in self.params.values() if p.grad is not None]
        self.update([dtensors.local(g) for g in grads], sharded_over=self.mesh.get_group(-1))
        steps.drop_gradients(self.params)
        for pending in self.news:
            pending.wait()

    @torch.no_grad()
    def infer(self, function: base.Infer[base.T], batch: Batch) -> base.T:
        """``function(model, batch)`` without gradients. Every rank calls it, with rows or none."""
        with theirs.refusals("FSDP"), self.lockstep.on_course("evaluation"):
            result = function(self.model, batch)
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # there is no backward that would
        return result

    # ------------------------------------------------------------ which gradients came

    def _watch(self, unit: nn.Module, _inputs: Any) -> None:
        """Before a unit's forward, when its parameters are whole: note which get a gradient."""
        if not self.unwatched:
            return
        for module in unit.modules():
            for local, p in module._parameters.items():
                name = self.names.get((module, local), "")
                if name not in self.unwatched or p is None or isinstance(p, DTensor):
                    continue
                if p.requires_grad:  # one that is frozen for a while is watched later
                    self.unwatched.discard(name)
                    p.register_post_accumulate_grad_hook(partial(self._arrived, name))

    def _loss(self, model: nn.Module, batch: Batch) -> Tensor:
        self.arrived.clear()
        return self.loss_fn(model, batch)

    def _arrived(self, name: str, whole: Tensor) -> None:
        refusals.refuse_sparse(name, whole.grad)
        if name in self.arrived:  # FSDP has sent the first part, and would lose the second
            raise UsageError(
                f"FSDP: parameter '{name}' gets its gradient in two parts (re-entrant "
                "checkpointing of what runs twice?), and FSDP takes one; use "
                "checkpoint(use_reentrant=False)"
            )
        self.arrived.add(name)
        self.used.add(name)

    # ------------------------------------------------------------ whole tensors

    def full_params(self) -> dict[str, Tensor]:
        steps.broadcast_buffers(self.model, self.group)
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
                    else base.copied(value)
                    for key, value in state["optimizer"][name].items()
                }
        self.update.load_state_dict(state["update"])
