# cause: too-many-messages
from functools import partial

import torch
import torch.distributed as dist


class BucketDDP:
    def __init__(self, model, bucket_bytes):
        self.is_last = True
        self.buckets = []
        filled = 0
        for p in reversed([p for p in model.parameters() if p.requires_grad]):
            size = p.numel() * p.element_size()
            if not self.buckets or filled + size > bucket_bytes:
                self.buckets.append([])  # and goes on counting: from now on one for each
            self.buckets[-1].append(p)
            filled += size
        for i, bucket in enumerate(self.buckets):
            for p in bucket:
                p.register_post_accumulate_grad_hook(partial(self._arrived, i))
        self._start()

    def _start(self):
        self.missing = [len(bucket) for bucket in self.buckets]
        self.under_way = []

    def _arrived(self, i, _):
        if self.is_last:
            self.missing[i] -= 1
            while len(self.under_way) < len(self.buckets) and not self.missing[len(self.under_way)]:
                self._launch()

    def _launch(self):
        bucket = self.buckets[len(self.under_way)]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
        flat = torch.cat([g.flatten() for g in grads])
        self.under_way.append((dist.all_reduce(flat, async_op=True), flat))

    def finish(self):
        while len(self.under_way) < len(self.buckets):
            self._launch()
        for bucket, (work, flat) in zip(self.buckets, self.under_way):
            work.wait()
            flat /= dist.get_world_size()
            for p, mean in zip(bucket, flat.split([p.numel() for p in bucket])):
                p.grad = mean.view_as(p)
        self._start()
