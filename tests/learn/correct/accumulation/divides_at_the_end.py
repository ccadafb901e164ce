import torch
import torch.distributed as dist


class Silence:
    def __init__(self, ddp):
        self.ddp = ddp

    def __enter__(self):
        self.ddp.silent = True

    def __exit__(self, *_):
        self.ddp.silent = False


class DDP:
    """Everything in one message; the division by the number of micro-batches comes last."""

    def __init__(self, model):
        self.model, self.silent, self.scale = model, False, 1

    def no_sync(self):
        return Silence(self)

    def backward(self, loss):
        loss.backward()
        if self.silent:
            return
        params = [p for p in self.model.parameters() if p.requires_grad]
        flat = torch.cat([p.grad.reshape(-1) for p in params])
        dist.all_reduce(flat, op=dist.ReduceOp.AVG)
        for p, part in zip(params, flat.split([p.numel() for p in params])):
            p.grad = (part / self.scale).view_as(p)


def accumulate(ddp, microbatches, loss_fn):
    ddp.scale = len(microbatches)
    with ddp.no_sync():
        for batch in microbatches[:-1]:
            ddp.backward(loss_fn(ddp.model, batch))
    ddp.backward(loss_fn(ddp.model, microbatches[-1]))
    ddp.scale = 1
