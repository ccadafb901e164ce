"""PyTorch's hybrid: fully_shard inside groups of ranks, replicas between the groups."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardlab.errors import UsageError
from shardlab.strategies import base
from shardlab.strategies.pytorch_fsdp import PyTorchFSDP

# The meshes of each world. A process group lives as long as its world, with threads and sockets of
# its own: a second strategy in the same process uses the groups of the first.
_meshes: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[str, int], DeviceMesh]] = (
    WeakKeyDictionary()
)


class PyTorchHSDP(PyTorchFSDP):
    """PyTorch's own (FSDP2, HYBRID_SHARD): sharded over s ranks, replicated over n/s groups.

    Schedule, for Ψ bytes of parameters and as many of gradients, each micro-batch
    (* called by PyTorch, not in our ledger):

        at construction     broadcast parameters and buffers from rank 0; shard each parameter
        before forward      broadcast buffers (if the model has any); all_reduce the target count
        forward             all_gather each block's parameters within the group; free them *  Ψ
        backward            all_gather them again within the group *                          Ψ
                            reduce_scatter its gradients within the group *                   Ψ
                            all_reduce this rank's shard of them between the groups *        Ψ/s
        after the last      all_reduce which parameters got a gradient, and the loss
        step                update this rank's shards

    Cost: 3Ψ(s-1)/s inside a group, where links are fast, and only 2(Ψ/s)(g-1)/g between the
    g = n/s groups, where they are slow. Memory: one s-th, not one n-th.
    """

    RESHARD_AFTER_FORWARD = True

    def __init__(
        self,
        setup: base.Setup,
        *,
        comm_dtype: str = "fp32",
        shards: int = 2,
    ) -> None:
        self.shards = min(shards, setup.mesh.size())
        super().__init__(setup, comm_dtype=comm_dtype)

    def shard_mesh(self, mesh: DeviceMesh) -> DeviceMesh:
        """(groups, shards): neighbours shard, as ranks of one host are neighbours."""
        if self.shards < 1 or mesh.size() % self.shards:
            raise UsageError(
                f"pytorch_hsdp: {mesh.size()} ranks cannot form groups of {self.shards}; "
                "set its option shards to a divisor"
            )
        if mesh.size() != dist.get_world_size():
            raise UsageError("pytorch_hsdp makes process groups of its own: it needs every rank")
        assert dist.group.WORLD is not None
        made = _meshes.setdefault(dist.group.WORLD, {})
        key = (mesh.device_type, self.shards)
        if key not in made:
            shape = (mesh.size() // self.shards, self.shards)
            names = ("replicate", "shard")
            made[key] = init_device_mesh(mesh.device_type, shape, mesh_dim_names=names)
        return made[key]
