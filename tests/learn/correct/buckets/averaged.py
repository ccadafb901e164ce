"""Plans by a function, packs by index, averages in the all-reduce, copies back in place."""

import torch
import torch.distributed as dist


def plan(params, limit):
    """The number of its bucket for each parameter, from the last to the first."""
    numbers, used, current = {}, 0, 0
    for p in reversed(params):
        size = p.nbytes
        if used and used + size > limit:
            current, used = current + 1, 0
        numbers[p] = current
        used += size
    return numbers


class BucketDDP:
    def __init__(self, model, bucket_bytes):
        self.is_last = False
        params = [p for p in model.parameters() if p.requires_grad]
        self.number = plan(params, bucket_bytes)
        self.count = max(self.number.values()) + 1
        self.reset()
        for p in params:
            p.register_post_accumulate_grad_hook(self.on_gradient)

    def reset(self):
        self.waiting_for = [
            {p for p in self.number if self.number[p] == i} for i in range(self.count)
        ]
        self.sent = []

    def members(self, i):
        return [p for p, number in self.number.items() if number == i]

    def on_gradient(self, p):
        if not self.is_last:
            return
        self.waiting_for[self.number[p]].discard(p)
        for i in range(len(self.sent), self.count):
            if self.waiting_for[i]:
                return
            self.send(i)

    def send(self, i):
        for p in self.members(i):
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        message = torch.cat([p.grad.reshape(-1) for p in self.members(i)])
        handle = dist.all_reduce(message, op=dist.ReduceOp.AVG, async_op=True)
        self.sent.append((handle, message))

    def finish(self):
        for i in range(len(self.sent), self.count):
            self.send(i)
        for i, (handle, message) in enumerate(self.sent):
            handle.wait()
            offset = 0
            for p in self.members(i):
                p.grad.copy_(message[offset : offset + p.numel()].reshape(p.shape))
                offset += p.numel()
        self.reset()
