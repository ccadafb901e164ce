# cause: not-averaged
from contextlib import contextmanager

import torch.distributed as dist


class DDP:
    def __init__(self, model):
        self.model, self.sync = model, True

    @contextmanager
    def no_sync(self):
        before, self.sync = self.sync, False
        try:
            yield
        finally:
            self.sync = before

    def backward(self, loss):
        loss.backward()
        if self.sync:
            for p in self.model.parameters():
                if p.requires_grad:
                    dist.all_reduce(p.grad)


def accumulate(ddp, microbatches, loss_fn):
    *head, last = microbatches
    with ddp.no_sync():
        for batch in head:
            ddp.backward(loss_fn(ddp.model, batch) / len(microbatches))
    ddp.backward(loss_fn(ddp.model, last) / len(microbatches))
