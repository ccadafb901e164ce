# cause: too-many-bytes
import torch.distributed as dist


def average(p):
    dist.all_reduce(p.grad)
    p.grad /= dist.get_world_size()


def install_hooks(model):
    for module in model.modules():
        for p in module.parameters():  # of the module and of all below it: each one again
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(average)
