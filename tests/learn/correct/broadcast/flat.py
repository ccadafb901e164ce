from collections import defaultdict

import torch
import torch.distributed as dist


@torch.no_grad()
def broadcast_model(model, src=0):
    """One message per type of number."""
    by_type = defaultdict(list)
    for t in [*model.parameters(), *model.buffers()]:
        by_type[t.dtype].append(t)
    for tensors in by_type.values():
        flat = torch.cat([t.reshape(-1) for t in tensors])
        dist.broadcast(flat, src)
        for t, part in zip(tensors, flat.split([t.numel() for t in tensors])):
            t.copy_(part.view(t.shape))
