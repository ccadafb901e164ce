"""Buckets. In the package: strategies/data_parallel/bucket_ddp_async.py (the order: ready.py)."""

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
        self.under_way: list[tuple[dist.Work, Tensor]] = []  # of buckets 0, 1, 2 …

    def _arrived(self, i: int, _p: nn.Parameter) -> None:
        if not self.is_last:
            return
        self.missing[i] -= 1
        while len(self.under_way) < len(self.buckets) and not self.missing[len(self.under_way)]:
            self._launch_next()  # never out of order: ranks pair their collectives by order alone

    def _launch_next(self) -> None:
        bucket = self.buckets[len(self.under_way)]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
        flat = torch.cat([g.flatten() for g in grads])  # (elements of the bucket,)
        self.under_way.append((dist.all_reduce(flat, async_op=True), flat))

    def finish(self) -> None:
        while len(self.under_way) < len(self.buckets):
            self._launch_next()  # a parameter that was not used here held them back
        for bucket, (work, flat) in zip(self.buckets, self.under_way, strict=True):
            work.wait()
            flat /= dist.get_world_size()
            for p, mean in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                p.grad = mean.view_as(p)
        self._start()
