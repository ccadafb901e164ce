# cause: shuffled-anyway
import torch


def indices(length, world, rank, epoch=0, seed=0, shuffle=True):
    generator = torch.Generator().manual_seed(1000 * seed + epoch)
    order = torch.randperm(length, generator=generator).tolist()
    total = -(-length // world) * world
    return [order[i % length] for i in range(rank, total, world)]
