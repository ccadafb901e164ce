# cause: not-communicated
import torch.distributed as dist


def install_hooks(model):
    for p in [p for p in model.parameters() if p.requires_grad]:

        def average(_):
            dist.all_reduce(p.grad)  # the loop's last parameter, for every hook
            p.grad /= dist.get_world_size()

        p.register_post_accumulate_grad_hook(average)
