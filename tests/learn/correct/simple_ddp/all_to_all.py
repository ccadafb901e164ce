import contextlib

import torch
import torch.distributed as dist


def average_gradients(model):
    """A true reduce-scatter by all_to_all, then all_gather: as many bytes as an all-reduce."""
    n = dist.get_world_size()
    params = [p for p in model.parameters() if p.requires_grad]
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
    flat = torch.cat([g.reshape(-1) for g in grads])
    padded = torch.nn.functional.pad(flat, (0, -len(flat) % n))
    parts = torch.empty_like(padded)
    dist.all_to_all_single(parts, padded)
    mine = parts.view(n, -1).mean(0)
    shards = [torch.empty_like(mine) for _ in range(n)]
    dist.all_gather(shards, mine)
    whole = torch.cat(shards)[: len(flat)]
    for p, part in zip(params, whole.split([p.numel() for p in params])):
        p.grad = part.view_as(p).clone()


class DDP:
    """no_sync replaces backward itself, and an average by torch's own ReduceOp.AVG."""

    def __init__(self, model):
        self.model = model

    @contextlib.contextmanager
    def no_sync(self):
        self.backward = torch.Tensor.backward
        with contextlib.ExitStack() as stack:
            stack.callback(self.__dict__.pop, "backward")
            yield

    def backward(self, loss):
        loss.backward()
        for p in reversed([p for p in self.model.parameters() if p.requires_grad]):
            dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)


def accumulate(ddp, microbatches, loss_fn):
    losses = (loss_fn(ddp.model, batch) / len(microbatches) for batch in microbatches)
    with ddp.no_sync():
        for _ in microbatches[1:]:
            ddp.backward(next(losses))
    ddp.backward(next(losses))
