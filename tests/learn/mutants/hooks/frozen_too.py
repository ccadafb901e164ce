# cause: raised
import torch.distributed as dist


def average(p):
    dist.all_reduce(p.grad)
    p.grad /= dist.get_world_size()


def install_hooks(model):
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(average)
