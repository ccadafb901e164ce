import itertools
import math
import random


def indices(length, world, rank, epoch=0, seed=0, shuffle=True):
    order = list(range(length))
    if shuffle:
        random.Random(f"{seed}/{epoch}").shuffle(order)
    places = math.ceil(length / world) * world
    return list(itertools.islice(itertools.cycle(order), rank, places, world))
