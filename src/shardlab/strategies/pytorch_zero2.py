"""PyTorch's ZeRO-2: fully_shard that keeps parameters between forward and backward."""

from __future__ import annotations

from shardlab.strategies.pytorch_fsdp import PyTorchFSDP


class PyTorchZero2(PyTorchFSDP):
    """PyTorch's own (FSDP2, SHARD_GRAD_OP): gradients and optimizer state sharded for good.

    Schedule, for n ranks, Ψ bytes of parameters and as many of gradients, each micro-batch
    (* called by PyTorch, not in our ledger):

        at construction     broadcast parameters and buffers from rank 0; shard each parameter
        before forward      broadcast buffers (if the model has any); all_reduce the target count
        forward             all_gather each block's parameters, prefetching the next *     Ψ
        backward            reduce_scatter each block's gradients, freeing them, and its
                            parameters *                                                  Ψ
        after the last      all_reduce which parameters got a gradient, and the loss
        step                update this rank's shards

    Cost: 2Ψ(n-1)/n on the wire per micro-batch; over Gloo 3Ψ(n-1)/n, whose reduce-scatter is an
    all-reduce.
    """

    RESHARD_AFTER_FORWARD = False
