# cause: not-communicated
import torch
import torch.distributed as dist


def average_gradients(model):
    for name, p in model.named_parameters():
        if p.requires_grad and name.endswith("weight"):
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)
