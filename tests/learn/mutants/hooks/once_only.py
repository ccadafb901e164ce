# cause: first-step-only
import torch.distributed as dist


def install_hooks(model):
    for p in model.parameters():
        if p.requires_grad:
            handles = []

            def average(p, handles=handles):
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()
                handles[0].remove()

            handles.append(p.register_post_accumulate_grad_hook(average))
