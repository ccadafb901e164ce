"""BatchNorm whose statistics are those of all ranks' samples: exact for any split of the batch.

PyTorch's own ``SyncBatchNorm`` runs on GPUs alone and wants rows on every rank. This one runs on
any backend, weighs each rank by its rows, and a rank may have none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shardlab import comm

_AXES = (0, 2, 3)  # all but the channels of (batch, channels, height, width)


class SyncBatchNorm2d(nn.BatchNorm2d):
    """Training takes two collectives for each layer and micro-batch, in forward and in backward.

    Without a group, or in a world of one, it is plain BatchNorm. In evaluation it is as well: the
    running statistics are the same on every rank.
    """

    group: comm.Group | None = None  # set by ``join``, when the ranks are known

    def forward(self, x: Tensor) -> Tensor:  # (batch, channels, height, width)
        if not self.training or self.group is None or self.group.size() == 1:
            return super().forward(x)
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        assert self.momentum is not None
        y, mean, variance, count = _Normalise.apply(  # type: ignore[no-untyped-call]
            x, self.weight, self.bias, self.eps, self.group
        )
        with torch.no_grad():
            # The running variance is that of the population: count / (count - 1), as PyTorch's.
            known = (count > 0).to(mean.dtype) * self.momentum  # 0: no rank had a row
            unbiased = variance * (count / (count - 1).clamp(min=1)).to(variance.dtype)
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), known)
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), known)
            self.num_batches_tracked.add_(1)
        out: Tensor = y
        return out


def join(model: nn.Module, group: comm.Group) -> None:
    """Tell the model's synchronised layers which ranks they are shared with."""
    for module in model.modules():
        if isinstance(module, SyncBatchNorm2d):
            module.group = group


class _Normalise(torch.autograd.Function):
    """(x - mean) / std * weight + bias, with mean and std over all ranks' rows."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, group: comm.Group
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        exact = torch.promote_types(x.dtype, torch.float32)  # bf16's sums would be too coarse
        mean, variance, count = _statistics(x.to(exact), group)
        inverse = torch.rsqrt(variance + eps)  # (channels,)
        normal = (x.to(exact) - _wide(mean)) * _wide(inverse)
        ctx.save_for_backward(normal.to(x.dtype), weight, inverse, count)
        ctx.group = group
        ctx.mark_non_differentiable(mean, variance, count)
        y = normal * _wide(weight.to(exact)) + _wide(bias.to(exact))
        return y.to(x.dtype), mean, variance, count

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        normal, weight, inverse, count = ctx.saved_tensors
        exact = inverse.dtype
        dy, normal = grads[0].to(exact), normal.to(exact)
        sums = torch.stack([dy.sum(_AXES), (dy * normal).sum(_AXES)])  # (2, channels), this rank's
        bias_grad, weight_grad = sums[0].clone(), sums[1].clone()
        comm.all_reduce(sums, ctx.group, label="batchnorm backward")
        means = sums / count.clamp(min=1)  # every row moves the mean and the variance of all
        dx = dy - _wide(means[0]) - normal * _wide(means[1])
        dx = dx * _wide(inverse * weight.to(exact))
        dtype = weight.dtype
        return dx.to(grads[0].dtype), weight_grad.to(dtype), bias_grad.to(dtype), None, None


def _statistics(x: Tensor, group: comm.Group) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and variance of each channel over all ranks: (channels,), and the number of values: ().

    Each rank's mean and squared distance from it are gathered and put together (Chan et al.). To
    add up x and x² instead would lose the variance of channels with a large mean.
    """
    channels, ranks = x.shape[1], group.size()
    rows = x.numel() // channels
    mean = x.mean(_AXES) if rows else x.new_zeros(channels)
    distance = (x - _wide(mean)).square().sum(_AXES)  # (channels,)
    mine = torch.cat([mean, distance, x.new_full((1,), rows)])  # (2 * channels + 1,)
    all_of_them = mine.new_empty(ranks * len(mine))
    comm.all_gather(all_of_them, mine, group, label="batchnorm statistics")
    table = all_of_them.view(ranks, -1)
    means, distances, counts = table[:, :channels], table[:, channels:-1], table[:, -1:]
    count = counts.sum()
    at_least_one = count.clamp(min=1)
    mean = (means * counts).sum(0) / at_least_one
    variance = (distances + counts * (means - mean).square()).sum(0) / at_least_one
    return mean, variance, count


def _wide(channels: Tensor) -> Tensor:
    return channels.view(1, -1, 1, 1)
