# cause: over-memory
CHOICES = {
    "roomy": {"strategy": "bucket_ddp_async"},
    "tight": {"strategy": "zero1"},
    "tiny": {"strategy": "zero3"},
}
