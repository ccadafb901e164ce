# cause: global-random-state
import torch


def indices(length, world, rank, epoch=0, seed=0, shuffle=True):
    torch.manual_seed(1000 * seed + epoch)
    order = torch.randperm(length).tolist() if shuffle else list(range(length))
    total = -(-length // world) * world
    return [order[i % length] for i in range(rank, total, world)]
