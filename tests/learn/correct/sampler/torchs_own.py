from torch.utils.data import DistributedSampler


def indices(length, world, rank, epoch=0, seed=0, shuffle=True):
    sampler = DistributedSampler(range(length), world, rank, shuffle=shuffle, seed=seed)
    sampler.set_epoch(epoch)
    return list(sampler)
