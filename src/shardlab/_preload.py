"""What the fork server imports once, so that each rank it forks starts with it."""

import os

# Kineto, PyTorch's profiler, writes a line to stderr at each start and stop below this level.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import torch
import torch._dynamo
import torch.distributed
import torch.distributed.device_mesh
import torch.nn.parallel  # noqa: F401

import shardlab.train  # noqa: F401
