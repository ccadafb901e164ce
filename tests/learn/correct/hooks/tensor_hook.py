import torch.distributed as dist


def install_hooks(model):
    """The older kind of hook: gets the gradient before it is stored, and returns another."""

    def average(grad):
        grad = grad / dist.get_world_size()
        dist.all_reduce(grad)
        return grad

    for p in model.parameters():
        if p.requires_grad:
            p.register_hook(average)
