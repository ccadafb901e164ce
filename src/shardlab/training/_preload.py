"""What the fork server imports once, so that each rank it forks starts with it."""

import os
import signal

# Kineto, PyTorch's profiler, writes a line to stderr at each start and stop below this level.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import torch
import torch._dynamo
import torch.distributed
import torch.distributed.device_mesh
import torch.nn.parallel  # noqa: F401

import shardlab.training.run  # noqa: F401

# Slurm sends SIGTERM to every process of a job. The ranks then stop in order, and must not lose the
# server that reports how they ended: it ignores the signal, and leaves when its parent has left.
# What it forks does not.
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))
