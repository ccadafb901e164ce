"""Gradients live in the buckets: nothing is unpacked."""

import torch
import torch.distributed as dist


class Bucket:
    def __init__(self, params):
        self.params = params
        self.flat = torch.zeros(sum(p.numel() for p in params), dtype=params[0].dtype)
        self.views = []
        start = 0
        for p in params:
            self.views.append(self.flat[start : start + p.numel()].view(p.shape))
            start += p.numel()
        self.work = None
        self.arrived = set()

    def complete(self):
        return len(self.arrived) == len(self.params)

    def send(self):
        for p, view in zip(self.params, self.views, strict=True):
            if p.grad is None:
                view.zero_()
            elif p.grad.data_ptr() != view.data_ptr():
                view.copy_(p.grad)
            p.grad = view
        self.flat.div_(dist.get_world_size())
        self.work = dist.all_reduce(self.flat, async_op=True)


class BucketDDP:
    def __init__(self, model, bucket_bytes):
        self.is_last = True
        trainable = [p for p in model.parameters() if p.requires_grad]
        groups, room = [], 0
        for p in trainable[::-1]:
            need = p.numel() * p.element_size()
            if need > room and (not groups or groups[-1]):
                groups.append([])
                room = bucket_bytes
            groups[-1].append(p)
            room -= need
        self.buckets = [Bucket(group) for group in groups]
        self.position = 0
        for bucket in self.buckets:
            for p in bucket.params:
                p.register_post_accumulate_grad_hook(lambda p, b=bucket: self.ready(b, p))

    def ready(self, bucket, p):
        if self.is_last:
            bucket.arrived.add(p)
            self.advance(force=False)

    def advance(self, force):
        while self.position < len(self.buckets):
            bucket = self.buckets[self.position]
            if not (force or bucket.complete()):
                break
            bucket.send()
            self.position += 1

    def finish(self):
        self.advance(force=True)
        for bucket in self.buckets:
            bucket.work.wait()
            bucket.arrived.clear()
        self.position = 0
