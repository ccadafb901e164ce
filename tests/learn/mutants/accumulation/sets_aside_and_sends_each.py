# cause: communicates-each-micro-batch
from contextlib import contextmanager

import torch.distributed as dist


def average(model):
    for p in model.parameters():
        if p.requires_grad:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


class DDP:
    """The numbers are right; the bytes are k times as many."""

    def __init__(self, model):
        self.model = model

    @contextmanager
    def no_sync(self):
        yield

    def backward(self, loss):
        params = [p for p in self.model.parameters() if p.requires_grad]
        before = [p.grad for p in params]
        for p in params:
            p.grad = None
        loss.backward()
        average(self.model)
        for p, g in zip(params, before):
            if g is not None:
                p.grad = p.grad + g


def accumulate(ddp, microbatches, loss_fn):
    for batch in microbatches:
        ddp.backward(loss_fn(ddp.model, batch) / len(microbatches))
