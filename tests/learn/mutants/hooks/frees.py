# cause: no-gradient
import torch.distributed as dist


def install_hooks(model):
    def average(p):
        dist.all_reduce(p.grad)
        p.grad = None  # meant to free memory

    for p in model.parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(average)
