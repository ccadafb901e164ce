# cause: not-waited
import time

import torch.distributed as dist


def install_hooks(model):
    def average(p):
        p.grad /= dist.get_world_size()
        dist.all_reduce(p.grad, async_op=True)
        time.sleep(0.05)  # long enough, today

    for p in model.parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(average)
