# cause: unequal
import torch


def indices(length, world, rank, epoch=0, seed=0, shuffle=True):
    order = list(range(length))
    if shuffle:
        generator = torch.Generator().manual_seed(1000 * seed + epoch)
        order = torch.randperm(length, generator=generator).tolist()
    missing = -(-length // world) * world - length
    order += order[:missing]  # too short where there are fewer samples than ranks
    return order[rank::world]
