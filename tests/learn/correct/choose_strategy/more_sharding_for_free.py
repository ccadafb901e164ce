"""ZeRO-2 sends no more than DDP as long as there is one micro-batch; by FSDP's old names."""

CHOICES = {
    "roomy": {"strategy": "NO_SHARD", "options": {"bucket_mb": 4}},
    "tight": {"strategy": "SHARD_GRAD_OP", "activation_checkpointing": False},
    "tiny": {"strategy": "zero3", "activation_checkpointing": True, "accumulate": 1},
}
