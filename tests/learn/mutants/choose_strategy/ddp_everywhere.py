# cause: over-memory
CHOICES = {
    "roomy": {"strategy": "bucket_ddp_async"},
    "tight": {"strategy": "pytorch_ddp"},
    "tiny": {"strategy": "pytorch_ddp"},
}
