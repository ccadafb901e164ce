"""PyTorch's ZeRO-3: fully_shard that frees parameters after forward."""

from __future__ import annotations

from shardlab.strategies.pytorch_fsdp import PyTorchFSDP


class PyTorchZero3(PyTorchFSDP):
    """PyTorch's own (FSDP2, FULL_SHARD): parameters, gradients and optimizer state sharded.

    Schedule, for n ranks, Ψ bytes of parameters and as many of gradients, each micro-batch
    (* called by PyTorch, not in our ledger):

        at construction     broadcast parameters and buffers from rank 0; shard each parameter
        before forward      broadcast buffers (if the model has any); all_reduce the target count
        forward             all_gather each block's parameters, prefetching the next;
                            free them after it *                                          Ψ
        backward            all_gather each block's parameters again, prefetched *        Ψ
                            reduce_scatter its gradients; free both *                     Ψ
        after the last      all_reduce which parameters got a gradient, and the loss
        step                update this rank's shards

    Cost: 3Ψ(n-1)/n on the wire per micro-batch; over Gloo 4Ψ(n-1)/n, whose reduce-scatter is an
    all-reduce.
    """

    RESHARD_AFTER_FORWARD = True
