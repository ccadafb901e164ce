# cause: not-averaged
import torch.distributed as dist


def install_hooks(model):
    for p in model.parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad) and None)
