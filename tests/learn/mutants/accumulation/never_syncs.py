# cause: not-communicated
from contextlib import contextmanager

import torch.distributed as dist


def average(model):
    for p in model.parameters():
        if p.requires_grad:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


class DDP:
    def __init__(self, model):
        self.model, self.sync = model, True

    @contextmanager
    def no_sync(self):
        self.sync = False
        try:
            yield
        finally:
            self.sync = True

    def backward(self, loss):
        loss.backward()
        if self.sync:
            average(self.model)


def accumulate(ddp, microbatches, loss_fn):
    with ddp.no_sync():
        for batch in microbatches:
            ddp.backward(loss_fn(ddp.model, batch) / len(microbatches))
