"""Rung 8. ZeRO-3: parameters too are kept only for one's own share, and gathered for use."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves

from shardlab import comm
from shardlab.errors import UsageError
from shardlab.strategies import base
from shardlab.strategies.flat import units_of
from shardlab.strategies.sharded import DTYPES, Sharded
from shardlab.strategies.unit import Unit
from shardlab.strategies.update import Rule
from shardlab.workloads.base import Batch, LossFn


class Zero3(Sharded):
    """Gather a block's parameters just before they are used, and free them right after.

    A unit is a block that the workload names, or the root: all that lies outside of blocks.
    Schedule, for n ranks, Ψ bytes of parameters and as many of gradients, each micro-batch:

        at construction     broadcast parameters and buffers from rank 0; keep one n-th of each unit
        before forward      broadcast buffers (if the model has any); all_reduce the target count
        forward             before a unit: all_gather its parameters, having prefetched them
                            during the one before                         Ψ
                            after a block: free them (not the last: backward begins with it)
        backward            before a block: all_gather its parameters again, prefetched
                            when the one before was half done             Ψ
                            after a unit: free its parameters,
                            reduce_scatter its gradients, asynchronously  Ψ
                            add the result to this rank's shard
        after the last      all_reduce the loss and which parameters got a gradient
        step                update this rank's shard: nothing to send

    Cost: 3Ψ(n-1)/n on the wire per micro-batch, less what is gathered once (root, last block).
    Memory: of everything one n-th, plus two blocks' parameters and gradients.

    Freeing means to shrink the storage to nothing: what autograd saved are views of the same
    storage, and they are whole again when the unit has been gathered for backward.
    """

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
        super().__init__(model, make_optimizer, loss_fn, mesh, rule)
        self.comm_dtype = base.option("zero3's comm_dtype", comm_dtype, DTYPES)
        self.own([self._shard(label, params) for label, params in units_of(model, blocks).items()])
        self.gathers: dict[str, comm.Pending] = {}  # under way, by label
        self.seen: set[str] = set()  # the units that this micro-batch's forward came to
        self.in_backward = False
        self.arrived: list[tuple[Unit, str, nn.Parameter]] = []  # gradients, not yet moved
        self.last_scattered = len(self.units)  # units from here on have sent their gradients
        for i, unit in enumerate(self.units):
            module = model.get_submodule(unit.label) if i else model
            module.register_forward_pre_hook(partial(self._before_forward, i))
            if i:
                module.register_forward_hook(partial(self._after_forward, i))
            for name, p in unit.params.items():
                if p.requires_grad:
                    p.register_post_accumulate_grad_hook(partial(self._arrived, i, name))

    @torch.no_grad()
    def _shard(self, label: str, params: dict[str, nn.Parameter]) -> Unit:
        unit = Unit(label, params, self.group, like=next(self.model.parameters()))
        flat = unit.flatten(params)  # (padded,)
        unit.shard = unit.layout.of_rank(flat, self.rank).clone()
        unit.full = flat.to(self.comm_dtype or flat.dtype)
        for name, view in unit.split(unit.full).items():
            params[name].data = view
        unit.free()
        return unit

    def _gather(self, unit: Unit) -> None:
        """Start to put the unit's parameters together, unless they are here or on their way."""
        assert unit.full is not None
        storage = unit.full.untyped_storage()
        if storage.size() or not unit.params:  # a model that is all blocks has an empty root
            return
        storage.resize_(unit.layout.padded * unit.full.element_size())
        shard, label = unit.shard.to(unit.full.dtype), f"params {unit.label or 'root'}"
        self.gathers[unit.label] = comm.all_gather(
            unit.full, shard, self.group, label=label, async_op=True
        )

    def _await(self, unit: Unit) -> None:
        self._gather(unit)
        if unit.label in self.gathers:
            self.gathers.pop(unit.label).wait()

    def settle(self) -> None:
        """After a forward without backward: wait for what is under way, free every unit."""
        while self.gathers:
            self.gathers.popitem()[1].wait()
        for unit in self.units:
            unit.free()
        self.seen.clear()

    def _before_forward(self, i: int, _module: nn.Module, _inputs: Any) -> None:
        self._await(self.units[i])
        if self.in_backward:  # a recomputation
            return
        if self.units[i].label in self.seen:
            self._refuse(self.units[i], "ran twice in one forward")
        self.seen.add(self.units[i].label)
        if i + 1 < len(self.units):
            self._gather(self.units[i + 1])

    def _after_forward(self, i: int, _module: nn.Module, _inputs: Any, output: Any) -> None:
        if self.in_backward:
            return
        tensors = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
        for tensor in tensors:
            tensor.register_hook(partial(self._before_backward, i))
        if not tensors or i + 1 < len(self.units):
            self.units[i].free()

    def _before_backward(self, i: int, _gradient: Tensor) -> None:
        """Backward has come to block i, and so is done with those after it.

        What is sent, and in which order, depends on blocks alone, never on which gradients a
        rank happened to have: gather i, scatter i+1, gather i-1, scatter i …
        """
        self.in_backward = True
        self._gather(self.units[i])
        self._scatter_down_to(i + 1)
        self._await(self.units[i])

    def _arrived(self, i: int, name: str, parameter: nn.Parameter) -> None:
        """Half way through a block, the gradients of the one before have had time to travel: when
        their buffers are free there is room for this block's, and to prefetch the next.
        """
        self.arrived.append((self.units[i], name, parameter))
        self.counts[i] += 1
        if self.counts[i] == (len(self.units[i].params) // 2 if i > 1 else 1):
            self.receive_all()
        if not self.in_flight:
            self._move_arrived()
        if i > 1 and self.counts[i] == len(self.units[i].params) * 3 // 4:  # the root is still here
            self._gather(self.units[i - 1])

    def _move_arrived(self) -> None:
        for unit, name, parameter in self.arrived:
            self.move_gradient(unit, name, parameter)
        self.arrived.clear()

    def _scatter_down_to(self, first: int) -> None:
        """Free the parameters of units that backward is done with, and send their gradients."""
        self._move_arrived()
        for i in range(self.last_scattered - 1, first - 1, -1):
            self.units[i].free()
            if any(p.requires_grad for p in self.units[i].params.values()):
                self.scatter(self.units[i])
        self.last_scattered = min(self.last_scattered, first)

    def gradients(self, microbatches: Sequence[Batch]) -> Tensor:
        base.broadcast_buffers(self.model, self.group)
        total = base.global_count(microbatches, self.device, self.group)
        divisor = self.update.divisor(total)
        self.used.clear()
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        for batch in microbatches:
            self.seen.clear()
            self.counts, self.last_scattered = [0] * len(self.units), len(self.units)
            loss_sum += base.accumulate(self.model, self.loss_fn, [batch], divisor)
            for unit in (u for u in self.units if u.label not in self.seen):
                self._refuse(unit, "was not run")
            self._scatter_down_to(0)
            self.receive_all()
            self.in_backward = False
        mean, self.unused = base.global_mean_and_unused(
            loss_sum, total, self.params, self.used, self.group
        )
        return mean

    def _refuse(self, unit: Unit, why: str) -> None:
        """The other ranks gathered it with us, or wait for us to: neither can be put right."""
        where = f"on rank {self.rank}; leave it out of the workload's blocks"
        raise UsageError(f"zero3: block '{unit.label}' {why} {where}")

    def step(self) -> None:
        self.update_shards()
        for unit in self.units:
            unit.grad = None
