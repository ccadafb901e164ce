# cause: padding-uneven
import torch


def indices(length, world, rank, epoch=0, seed=0, shuffle=True):
    order = list(range(length))
    if shuffle:
        generator = torch.Generator().manual_seed(1000 * seed + epoch)
        order = torch.randperm(length, generator=generator).tolist()
    while len(order) % world:
        order.append(0)
    return order[rank::world]
