# cause: not-reproducible
import random


def indices(length, world, rank, epoch=0, seed=0, shuffle=True):
    order = list(range(length))
    if shuffle:
        random.shuffle(order)
    total = -(-length // world) * world
    return [order[i % length] for i in range(rank, total, world)]
