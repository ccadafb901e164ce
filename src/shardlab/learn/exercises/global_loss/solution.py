"""In the package this is strategies/steps.py: local_count, global_count and global_mean."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

IGNORED = -100


@torch.no_grad()
def global_loss(microbatches: Sequence[tuple[Tensor, Tensor]]) -> float | Tensor:
    both = torch.zeros(2, dtype=torch.float64)  # the sum of losses, the number of targets
    for logits, targets in microbatches:
        loss = F.cross_entropy(logits.float(), targets, ignore_index=IGNORED, reduction="sum")
        both[0] += loss
        both[1] += (targets != IGNORED).sum()
    dist.all_reduce(both)  # one message; a rank without micro-batches brings zeros
    return (both[0] / both[1].clamp(min=1)).item()
