# cause: ranks-shuffle-differently
import torch


def indices(length, world, rank, epoch=0, seed=0, shuffle=True):
    order = list(range(length))
    if shuffle:
        generator = torch.Generator().manual_seed(1000 * seed + 10 * epoch + rank)
        order = torch.randperm(length, generator=generator).tolist()
    total = -(-length // world) * world
    return [order[i % length] for i in range(rank, total, world)]
