# cause: order-differs
"""Sends buckets in the order in which they happen to be ready."""

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn


class BucketDDP:
    def __init__(self, model: nn.Module, bucket_bytes: int) -> None:
        self.is_last = True
        self.buckets: list[list[nn.Parameter]] = []
        filled = 0
        for p in reversed([p for p in model.parameters() if p.requires_grad]):
            size = p.numel() * p.element_size()
            if not self.buckets or filled + size > bucket_bytes:
                self.buckets.append([])
                filled = 0
            self.buckets[-1].append(p)
            filled += size
        for i, bucket in enumerate(self.buckets):
            for p in bucket:
                p.register_post_accumulate_grad_hook(partial(self._arrived, i))
        self._start()

    def _start(self) -> None:
        self.missing = [len(bucket) for bucket in self.buckets]
        self.under_way: dict[int, tuple[dist.Work, Tensor]] = {}

    def _arrived(self, i: int, _p: nn.Parameter) -> None:
        if not self.is_last:
            return
        self.missing[i] -= 1
        if not self.missing[i]:
            self._launch(i)

    def _launch(self, i: int) -> None:
        bucket = self.buckets[i]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
        flat = torch.cat([g.flatten() for g in grads])  # (elements of the bucket,)
        self.under_way[i] = (dist.all_reduce(flat, async_op=True), flat)

    def finish(self) -> None:
        for i in range(len(self.buckets)):
            if i not in self.under_way:
                self._launch(i)
        for i, bucket in enumerate(self.buckets):
            work, flat = self.under_way[i]
            work.wait()
            flat /= dist.get_world_size()
            for p, mean in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                p.grad = mean.view_as(p)
        self._start()
