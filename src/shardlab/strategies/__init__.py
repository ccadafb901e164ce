"""The ladder: every strategy by name, in order of difficulty.

A plain dict of import paths, not of classes, so that a name can be checked (and ``--help``
answered) without importing torch. A strategy of your own goes by its import path, in the
same notation: ``my_package.my_module:MyStrategy`` or ``path/to/file.py:MyStrategy``.
"""

STRATEGIES = {
    "single": "shardlab.strategies.single:Single",
    "simple_ddp": "shardlab.strategies.simple_ddp:SimpleDDP",
    "simple_ddp_ga": "shardlab.strategies.simple_ddp_ga:SimpleDDPGradientAccumulation",
    "simple_ddp_hook": "shardlab.strategies.simple_ddp_hook:SimpleDDPHook",
    "simple_ddp_async": "shardlab.strategies.simple_ddp_async:SimpleDDPAsync",
    "bucket_ddp_async": "shardlab.strategies.bucket_ddp_async:BucketDDPAsync",
    "zero1": "shardlab.strategies.zero1:Zero1",
    "zero2": "shardlab.strategies.zero2:Zero2",
    "zero3": "shardlab.strategies.zero3:Zero3",
    "pytorch_ddp": "shardlab.strategies.pytorch_ddp:PyTorchDDP",
    "pytorch_zero1": "shardlab.strategies.pytorch_zero1:PyTorchZero1",
    "pytorch_zero2": "shardlab.strategies.pytorch_zero2:PyTorchZero2",
    "pytorch_zero3": "shardlab.strategies.pytorch_zero3:PyTorchZero3",
    "pytorch_hsdp": "shardlab.strategies.pytorch_hsdp:PyTorchHSDP",
}

# The words of PyTorch's first FSDP, for those who know them.
ALIASES = {
    "NO_SHARD": "pytorch_ddp",
    "SHARD_GRAD_OP": "pytorch_zero2",
    "FULL_SHARD": "pytorch_zero3",
    "HYBRID_SHARD": "pytorch_hsdp",
}
