# cause: refused
# The global batch is given: a smaller one would fit anywhere.
CHOICES = {
    "roomy": {"strategy": "zero3", "global_batch": 2},
    "tight": {"strategy": "zero1"},
    "tiny": {"strategy": "zero3", "activation_checkpointing": True},
}
