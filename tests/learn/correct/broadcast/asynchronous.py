import torch
import torch.distributed as dist


@torch.no_grad()
def broadcast_model(model, src=0):
    """Asynchronous, all at once."""
    tensors = list(model.parameters()) + list(model.buffers())
    works = [dist.broadcast(t.data, src=src, async_op=True) for t in tensors]
    for work in works:
        work.wait()
