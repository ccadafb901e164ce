"""What can be trained: every workload by name. Import paths for the reason told in ``strategies``."""

WORKLOADS = {
    "gpt2": "shardlab.workloads.gpt2:gpt2",
}
