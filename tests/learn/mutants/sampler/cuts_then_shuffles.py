# cause: same-share-each-epoch
import torch


def indices(length, world, rank, epoch=0, seed=0, shuffle=True):
    total = -(-length // world) * world
    mine = [i % length for i in range(rank, total, world)]
    if shuffle:
        generator = torch.Generator().manual_seed(1000 * seed + epoch)
        mine = [mine[i] for i in torch.randperm(len(mine), generator=generator).tolist()]
    return mine
