"""One message for all gradients, the embedding's parts gathered and added, torch's own norms."""

import torch
import torch.distributed as dist


def begin(shared, tied):
    if tied is None:
        return
    if dist.get_rank(tied) == 1:
        shared.data.zero_()
    dist.all_reduce(shared.data, group=tied)


def reduce_gradients(params, shared, tied, data):
    if tied is not None:
        both = [torch.empty_like(shared) for _ in range(2)]
        dist.all_gather(both, shared.grad, group=tied)
        shared.grad = both[0].detach() + both[1].detach()
    flat = torch.cat([p.grad.flatten() for p in params]) / dist.get_world_size(data)
    dist.all_reduce(flat, group=data, async_op=True).wait()
    for p, part in zip(params, flat.split([p.numel() for p in params]), strict=True):
        p.grad = part.view_as(p)


def clip(params, shared, tied, pipe, max_norm):
    counted = [p.grad for p in params if not (p is shared and dist.get_rank(tied) == 1)]
    norms = [torch.empty((), dtype=torch.float64) for _ in range(dist.get_world_size(pipe))]
    dist.all_gather(norms, torch.nn.utils.get_total_norm(counted), group=pipe)
    norm = torch.linalg.vector_norm(torch.stack(norms))
    torch.nn.utils.clip_grads_with_norm_(params, max_norm, norm)
    return norm
