import numpy as np


def indices(length, world, rank, epoch=0, seed=0, shuffle=True):
    """Contiguous blocks, numpy's generator, an array."""
    order = (
        np.random.default_rng([seed, epoch]).permutation(length) if shuffle else np.arange(length)
    )
    each = (length + world - 1) // world
    return np.resize(order, each * world)[rank * each : (rank + 1) * each]
