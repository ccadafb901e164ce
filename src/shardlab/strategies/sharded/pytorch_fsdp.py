"""PyTorch's fully_shard (FSDP2) under the contract: three twins, and what they have in common."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from shardlab import comm
from shardlab.errors import UsageError, option
from shardlab.optim import traits
from shardlab.strategies import base, model_checks, pytorch_errors, shards, steps
from shardlab.strategies.buckets import DTYPES, Used
from shardlab.strategies.lockstep import Lockstep
from shardlab.strategies.sharded import fsdp_calls
from shardlab.workloads.base import Batch

# The meshes of each world. A process group lives as long as its world, with threads and sockets of
# its own: a second strategy in the same process uses the groups of the first.
_meshes: WeakKeyDictionary[comm.Group, dict[tuple[str, int], DeviceMesh]] = WeakKeyDictionary()


class PyTorchFSDP(base.Strategy):
    """``fully_shard`` on every block and on the root, as PyTorch recommends.

    FSDP2 expects the same blocks in the same order on all ranks (``Lockstep`` checks this), and a
    gradient for every parameter. Where a gradient is missing, zeros are sent; a parameter that
    got a gradient on no rank has none.
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
        self.lockstep = Lockstep(self.group, "FSDP needs all ranks to run the same blocks")
        units = fsdp_calls.units(model, setup.blocks)
        fsdp_calls.refuse(model, units)
        with pytorch_errors.refusals("FSDP"):
            self.shard(units, option("comm_dtype", comm_dtype, DTYPES))
            fsdp_calls.as_one(model)
        fsdp_calls.hide(model)
        self.params = {n: p for n, p in model.named_parameters() if p.requires_grad}
        traits.check(setup.make_optimizer, traits.ROWS, "fully_shard")
        self.own(setup, self.params)
        self.used: set[str] = set()  # what got a gradient on this rank, in this step
        self.used_pending: list[comm.Pending] = []  # what got one on any rank
        self.names = fsdp_calls.names(model)
        self.unwatched = set(self.params)  # whose whole, which is made by a first gather, we await
        self.arrived: dict[str, Tensor] = {}  # the whole of what got a gradient in this micro-batch
        for name, unit in units.items():
            unit.register_forward_pre_hook(self._watch)
            fsdp_calls.Around(name, unit, units)

    def shard(self, units: fsdp_calls.Units, dtype: torch.dtype | None) -> None:
        """Every block, those inside others first, and the root last, which takes what is left."""
        for name, unit in units.items():
            fully_shard(
                unit,
                mesh=self.mesh,
                reshard_after_forward=self.RESHARD_AFTER_FORWARD,
                mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype),
            )
            fsdp_calls.watch(unit, name or "root", self.lockstep)

    def shard_mesh(self, mesh: DeviceMesh) -> DeviceMesh:
        return mesh

    def gradients(self, microbatches: Sequence[Batch]) -> Tensor:
        steps.broadcast_buffers(self.model, self.group)
        total = steps.global_count(microbatches, self.device, self.group)
        # FSDP divides the sum over ranks by their number; we want the sum.
        divisor = self.update.divisor(total) / self.ranks
        self.used.clear()
        with pytorch_errors.refusals("FSDP"), self.lockstep.on_course("step"):
            loss_sum = steps.accumulate(self.model, self._loss, microbatches, divisor)
            self._refuse_unsent()
        used = Used(self.params, self.used, self.device, self.group)
        self.used_pending = [used.pending]
        for name in used.unused():
            self.params[name].grad = None
        return steps.global_mean(loss_sum, total, self.group)

    def step(self) -> None:
        grads = [p.grad for p in self.params.values() if p.grad is not None]
        self.update([shards.local(g) for g in grads], sharded_over=self.mesh.get_group(-1))
        steps.drop_gradients(self.params)
        for pending in self.used_pending:
            pending.wait()

    @torch.no_grad()
    def infer(self, function: base.Infer[base.T], batch: Batch) -> base.T:
        """``function(model, batch)`` without gradients. Every rank calls it, with rows or none."""
        with pytorch_errors.refusals("FSDP"), self.lockstep.on_course("evaluation"):
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
        self._refuse_unsent()
        return self.loss_fn(model, batch)

    def _arrived(self, name: str, whole: Tensor) -> None:
        model_checks.refuse_sparse(name, whole.grad)
        self.arrived[name] = whole
        self.used.add(name)

    def _refuse_unsent(self) -> None:
        """FSDP takes a gradient away from its parameter to send it. It ignores a gradient that
        comes later, without an error."""
        for name, whole in self.arrived.items():
            if whole.grad is not None:
                raise UsageError(
                    f"FSDP: it did not send the gradient of '{name}', or not all of it: re-entrant "
                    "checkpointing of what runs twice, or a model that returns something in which "
                    "it finds no tensor; use checkpoint(use_reentrant=False), and return tensors"
                )
        self.arrived.clear()


# ------------------------------------------------------------------ the twins


class PyTorchZero2(PyTorchFSDP):
    """PyTorch's own (FSDP2, SHARD_GRAD_OP): gradients and optimizer state sharded for good.

    Schedule, for n ranks, Ψ bytes of parameters and Ψ of gradients, each micro-batch:

        at construction     broadcast parameters and buffers from rank 0; shard each parameter
        before forward      broadcast buffers (if the model has any); all_reduce the target count
        forward             all_gather each block's parameters, prefetching the next       Ψ
        backward            reduce_scatter each block's gradients, freeing them, and its
                            parameters                                                    Ψ
        after the last      all_reduce which parameters got a gradient; all_reduce the loss
        step                update this rank's shards

    Cost: 2Ψ(n-1)/n on the wire per micro-batch; over Gloo 3Ψ(n-1)/n, whose reduce-scatter is an
    all-reduce.
    """

    RESHARD_AFTER_FORWARD = False


class PyTorchZero3(PyTorchFSDP):
    """PyTorch's own (FSDP2, FULL_SHARD): parameters, gradients and optimizer state sharded.

    Schedule, for n ranks, Ψ bytes of parameters and Ψ of gradients, each micro-batch:

        at construction     broadcast parameters and buffers from rank 0; shard each parameter
        before forward      broadcast buffers (if the model has any); all_reduce the target count
        forward             all_gather each block's parameters, prefetching the next;
                            free them after it                                            Ψ
        backward            all_gather each block's parameters again, prefetched          Ψ
                            reduce_scatter its gradients; free both                       Ψ
        after the last      all_reduce which parameters got a gradient; all_reduce the loss
        step                update this rank's shards

    Cost: 3Ψ(n-1)/n on the wire per micro-batch; over Gloo 4Ψ(n-1)/n, whose reduce-scatter is an
    all-reduce.
    """

    RESHARD_AFTER_FORWARD = True


class PyTorchHSDP(PyTorchFSDP):
    """PyTorch's own (FSDP2, HYBRID_SHARD): sharded over s ranks, replicated over n/s groups.

    Schedule, for Ψ bytes of parameters and Ψ of gradients, each micro-batch
    (* called by FSDP itself, not in our ledger):

        at construction     broadcast parameters and buffers from rank 0; shard each parameter
        before forward      broadcast buffers (if the model has any); all_reduce the target count
        forward             all_gather each block's parameters within the group; free them    Ψ
        backward            all_gather them again within the group                            Ψ
                            reduce_scatter its gradients within the group                     Ψ
                            all_reduce this rank's shard of them between the groups *        Ψ/s
        after the last      all_reduce which parameters got a gradient; all_reduce the loss
        step                update this rank's shards

    Cost: 3Ψ(s-1)/s inside a group, where links are fast, and only 2(Ψ/s)(g-1)/g between the
    g = n/s groups, where they are slow. Memory: one s-th, not one n-th.

    ``shards`` is s. By default it is the number of ranks on a node, but 2 where there is one node,
    or one rank on each.
    """

    RESHARD_AFTER_FORWARD = True

    def __init__(
        self,
        setup: base.Setup,
        *,
        comm_dtype: str = "fp32",
        shards: int | None = None,
    ) -> None:
        wanted = max(2, setup.ranks_per_node) if shards is None else shards
        self.per_group = min(wanted, setup.mesh.size())
        super().__init__(setup, comm_dtype=comm_dtype)

    def shard_mesh(self, mesh: DeviceMesh) -> DeviceMesh:
        """(groups, shards): neighbours are a row, "shard"; ranks of one place a column,
        "replicate"."""
        ranks, size = mesh.size(), self.per_group
        if size < 1 or ranks % size:
            raise UsageError(
                f"pytorch_hsdp: {ranks} ranks cannot form groups of {size}; "
                "set its option shards to a divisor"
            )
        if ranks != dist.get_world_size():
            raise UsageError("pytorch_hsdp makes process groups of its own: it needs every rank")
        assert dist.group.WORLD is not None
        made = _meshes.setdefault(dist.group.WORLD, {})
        key = (mesh.device_type, size)
        if key not in made:
            shape, names = (ranks // size, size), ("replicate", "shard")
            made[key] = init_device_mesh(mesh.device_type, shape, mesh_dim_names=names)
        return made[key]
