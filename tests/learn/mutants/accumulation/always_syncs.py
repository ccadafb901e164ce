# cause: communicates-each-micro-batch
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

    @contextmanager
    def no_sync(self):
        yield

    def backward(self, loss):
        loss.backward()
        average(self.model)


def accumulate(ddp, microbatches, loss_fn):
    for batch in microbatches:
        with ddp.no_sync():
            ddp.backward(loss_fn(ddp.model, batch) / len(microbatches))
