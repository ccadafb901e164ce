import torch
import torch.distributed as dist


def average_gradients(model):
    """One message for all of them."""
    params = [p for p in model.parameters() if p.requires_grad]
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
    flat = torch.cat([g.flatten() for g in grads]) / dist.get_world_size()
    dist.all_reduce(flat)
    for p, part in zip(params, flat.split([p.numel() for p in params])):
        p.grad = part.view_as(p)
