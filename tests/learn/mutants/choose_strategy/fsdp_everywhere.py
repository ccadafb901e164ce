# cause: sends-more
CHOICES = {
    "roomy": {"strategy": "zero3"},
    "tight": {"strategy": "zero3"},
    "tiny": {"strategy": "zero3", "activation_checkpointing": True},
}
