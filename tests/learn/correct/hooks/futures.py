"""Divides in a callback of the all-reduce; finish() waits for the callbacks."""

import torch
from torch.distributed import all_reduce, get_world_size


class AsyncDDP:
    def __init__(self, model):
        self.is_last = True
        self.futures = []
        for p in model.parameters():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(self.launch)

    def launch(self, p):
        if self.is_last:
            future = all_reduce(p.grad, async_op=True).get_future()
            self.futures.append(future.then(lambda done: done.value()[0].div_(get_world_size())))

    def finish(self):
        torch.futures.wait_all(self.futures)
        self.futures = []
