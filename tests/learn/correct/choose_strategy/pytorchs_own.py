"""Written out in full; PyTorch's own for the tightest."""

PLAIN = {"options": {}, "accumulate": 1, "activation_checkpointing": False}
CHOICES = {
    "roomy": {"strategy": "zero1", **PLAIN},
    "tight": {"strategy": "zero2", **PLAIN},
    "tiny": {**PLAIN, "strategy": "pytorch_zero3", "activation_checkpointing": True},
}
