# cause: weights-averaged
import torch.distributed as dist


def install_hooks(model):
    def average(grad):  # it is the parameter
        dist.all_reduce(grad.data)
        grad.data /= dist.get_world_size()

    for p in model.parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(average)
