# cause: computes-twice
CHOICES = {
    "roomy": {"strategy": "bucket_ddp_async", "activation_checkpointing": True},
    "tight": {"strategy": "zero1"},
    "tiny": {"strategy": "zero3", "activation_checkpointing": True},
}
