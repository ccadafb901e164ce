"""A mean of means that is weighted: each rank's mean with its share of the targets."""

import torch
import torch.distributed as dist
from torch.nn import functional as F


def global_loss(microbatches):
    own = torch.tensor(
        [
            [
                F.cross_entropy(x.detach().float(), y, reduction="none").sum().item(),
                y.ne(-100).sum().item(),
            ]
            for x, y in microbatches
        ]
        + [[0.0, 0.0]],
        dtype=torch.float64,
    ).sum(dim=0)  # (2,)
    count = own[1].clone()
    dist.all_reduce(count)
    mean = own[0] / own[1].clamp(min=1)
    share = mean * own[1] / count.clamp(min=1)
    dist.all_reduce(share, op=dist.ReduceOp.SUM)
    return share
