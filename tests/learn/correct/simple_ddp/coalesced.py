import torch
import torch.distributed as dist


def average_gradients(model):
    """All in one call of torch's own manager."""
    params = [p for p in model.parameters() if p.requires_grad]
    for p in params:
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad / dist.get_world_size()
    with dist._coalescing_manager(async_ops=True) as manager:
        for p in params:
            dist.all_reduce(p.grad)
    manager.wait()
