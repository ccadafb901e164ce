# cause: not-waited
import time

import torch
import torch.distributed as dist


def average_gradients(model):
    for p in model.parameters():
        if p.requires_grad:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad / dist.get_world_size()
            dist.all_reduce(p.grad, async_op=True)
    time.sleep(0.3)  # the numbers come out right, by luck
