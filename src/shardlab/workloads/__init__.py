"""What can be trained: every workload by name. Import paths, as in ``shardlab.strategies``."""

WORKLOADS = {
    "gpt2": "shardlab.workloads.gpt2:gpt2",
}
