# cause: too-many
import torch


def indices(length, world, rank, epoch=0, seed=0, shuffle=True):
    """Every rank reads everything: N times the work for the result of one."""
    order = list(range(length))
    if shuffle:
        generator = torch.Generator().manual_seed(1000 * seed + epoch)
        order = torch.randperm(length, generator=generator).tolist()
    return order
