from contextlib import contextmanager

import torch.distributed as dist


def average(model):
    for p in model.parameters():
        if p.requires_grad:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


class DDP:
    def __init__(self, model):
        self.model = model
        self.quiet = 0

    @contextmanager
    def no_sync(self):
        self.quiet += 1
        try:
            yield self
        finally:
            self.quiet -= 1

    def backward(self, loss):
        loss.backward()
        if not self.quiet:
            average(self.model)


def accumulate(ddp, microbatches, loss_fn):
    k = len(microbatches)
    for i, batch in enumerate(microbatches, start=1):
        if i == k:
            ddp.backward(loss_fn(ddp.model, batch) / k)
        else:
            with ddp.no_sync():
                ddp.backward(loss_fn(ddp.model, batch) / k)
