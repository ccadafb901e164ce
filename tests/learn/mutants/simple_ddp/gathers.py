# cause: too-many-bytes
import torch
import torch.distributed as dist


def average_gradients(model):
    n = dist.get_world_size()
    for p in model.parameters():
        if p.requires_grad:
            mine = torch.zeros_like(p) if p.grad is None else p.grad
            parts = [torch.empty_like(mine) for _ in range(n)]
            dist.all_gather(parts, mine)
            p.grad = torch.stack(parts).mean(0)
