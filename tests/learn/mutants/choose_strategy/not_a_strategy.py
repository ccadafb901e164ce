# cause: refused
CHOICES = {
    "roomy": {"strategy": "zero_1"},
    "tight": {"strategy": "zero1"},
    "tiny": {"strategy": "zero3", "activation_checkpointing": True},
}
