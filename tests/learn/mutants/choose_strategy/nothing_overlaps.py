# cause: not-overlapped
CHOICES = {
    "roomy": {"strategy": "simple_ddp_ga"},
    "tight": {"strategy": "zero1"},
    "tiny": {"strategy": "zero3", "activation_checkpointing": True},
}
