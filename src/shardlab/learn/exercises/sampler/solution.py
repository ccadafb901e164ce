"""In the package this is data/sampler.py, which can also read every sample just once."""

import torch


def indices(
    length: int, world: int, rank: int, epoch: int = 0, seed: int = 0, shuffle: bool = True
) -> list[int]:
    order = list(range(length))
    if shuffle:
        generator = torch.Generator().manual_seed(1_000_003 * seed + epoch)
        order = torch.randperm(length, generator=generator).tolist()
    each = -(-length // world)  # rounded up
    padded = [order[i % length] for i in range(each * world)]
    return padded[rank::world]
