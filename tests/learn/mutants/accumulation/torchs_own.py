# cause: not-by-hand
from torch.nn.parallel import DistributedDataParallel


class DDP:
    def __init__(self, model):
        self.model = DistributedDataParallel(model)
        self.no_sync = self.model.no_sync

    def backward(self, loss):
        loss.backward()


def accumulate(ddp, microbatches, loss_fn):
    *head, last = microbatches
    with ddp.no_sync():
        for batch in head:
            ddp.backward(loss_fn(ddp.model, batch) / len(microbatches))
    ddp.backward(loss_fn(ddp.model, last) / len(microbatches))
