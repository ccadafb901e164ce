"""PyTorch's hybrid: fully_shard inside groups of ranks, replicas between the groups."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from shardlab.strategies import base, groups
from shardlab.strategies.pytorch_fsdp import PyTorchFSDP


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
        self.shards = min(wanted, setup.mesh.size())
        super().__init__(setup, comm_dtype=comm_dtype)

    def shard_mesh(self, mesh: DeviceMesh) -> DeviceMesh:
        return groups.grid(mesh, self.shards, "pytorch_hsdp")
