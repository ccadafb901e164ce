# cause: same-each-epoch
import torch


def indices(length, world, rank, epoch=0, seed=0, shuffle=True):
    order = list(range(length))
    if shuffle:
        order = torch.randperm(length, generator=torch.Generator().manual_seed(seed)).tolist()
    total = -(-length // world) * world
    return [order[i % length] for i in range(rank, total, world)]
