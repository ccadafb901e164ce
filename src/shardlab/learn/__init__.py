"""Exercises for the rungs of the ladder, and a grader that says what is wrong, not only that it is.

Importing this costs nothing. What an exercise is: ``exercise.py``; how a file is graded:
``grade.py``.
"""

ORDER = (
    "sampler",
    "token_shards",
    "broadcast",
    "simple_ddp",
    "global_loss",
    "hooks",
    "buckets",
    "ring_allreduce",
    "zero1",
    "zero2",
    "zero3",
    "fsdp",
    "diloco",
    "tensor_split",
    "one_f_one_b",
    "mixed_precision",
    "checkpoint",
    "trainer",
    "throughput",
    "read_trace",
    "memory_estimate",
)
