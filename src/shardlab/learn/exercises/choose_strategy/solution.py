"""The least that fits; the formulas behind it are in the package: plan/claims.py.

roomy: everything fits, so shard nothing and overlap. tight: Adam's state is two of the four parts,
and sharding it costs no more communication than an all-reduce. tiny: everything must be sharded,
and the activations must go, too.
"""

CHOICES = {
    "roomy": {"strategy": "bucket_ddp_async"},
    "tight": {"strategy": "zero1"},
    "tiny": {"strategy": "zero3", "activation_checkpointing": True},
}
