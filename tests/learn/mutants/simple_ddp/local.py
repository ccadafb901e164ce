# cause: not-communicated
import torch
import torch.distributed as dist


def average_gradients(model):
    for p in model.parameters():
        if p.requires_grad:
            mean = torch.zeros_like(p) if p.grad is None else p.grad.clone()
            dist.all_reduce(mean)  # and nobody writes it back
            mean /= dist.get_world_size()
