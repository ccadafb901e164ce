"""What the fork server imports once, so that each rank it forks starts with it."""

import torch
import torch._dynamo
import torch.distributed
import torch.distributed.device_mesh
import torch.nn.parallel

import shardlab.train  # noqa: F401
