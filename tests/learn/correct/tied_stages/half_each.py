"""Each stage counts half of the embedding's square; the embedding's own reduction comes last."""

import torch.distributed as dist


def begin(shared, tied):
    if shared is not None:
        dist.broadcast(shared.data, group_src=0, group=tied)


def reduce_gradients(params, shared, tied, data):
    replicas = dist.get_world_size(data)
    handles = []
    if shared is not None:
        handles.append(dist.all_reduce(shared.grad, group=tied, async_op=True))
    for p in params:
        if p is not shared:
            handles.append(dist.all_reduce(p.grad, group=data, async_op=True))
    for handle in handles:
        handle.wait()
    if shared is not None and replicas > 1:
        dist.all_reduce(shared.grad, group=data)
    for p in params:
        p.grad.div_(replicas)


def clip(params, shared, tied, pipe, max_norm):
    squares = sum((0.5 if p is shared else 1.0) * (p.grad**2).sum() for p in params)
    dist.all_reduce(squares, group=pipe)
    norm = squares.item() ** 0.5
    if norm > max_norm:
        for p in params:
            p.grad.mul_(max_norm / norm)
    return norm
