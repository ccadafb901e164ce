"""ZeRO and FSDP: every rank holds a shard of the training state."""
