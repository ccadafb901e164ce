# cause: averaged-twice
import torch
import torch.distributed as dist


def average_gradients(model):
    n = dist.get_world_size()
    for p in model.parameters():
        if p.requires_grad:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad / n
            dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)
            p.grad /= n
