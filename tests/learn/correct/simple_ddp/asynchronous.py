import torch
import torch.distributed as dist


def average_gradients(model):
    """Agrees first on who has a gradient, then sends all at once and waits at the end."""
    params = [p for p in model.parameters() if p.requires_grad]
    used = torch.tensor([float(p.grad is not None) for p in params])
    dist.all_reduce(used, op=dist.ReduceOp.MAX)
    works = []
    for p, is_used in zip(params, used):
        if is_used:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            works.append((p, dist.all_reduce(p.grad, async_op=True)))
    for p, work in works:
        work.wait()
        p.grad.div_(dist.get_world_size())
