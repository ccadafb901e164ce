"""Without a loop: running sums."""

import numpy as np


def held(blocks, world, strategy, precision, optimizer):
    elements = sum(b.parameters for b in blocks)
    low = {"fp32": 4, "bf16": 2}[precision]
    high = 4 * ["sgd", "momentum", "adamw"].index(optimizer) + (4 if precision == "bf16" else 0)
    rung = ["ddp", "zero1", "zero2", "zero3"].index(strategy)
    sizes = [low, low, high]
    return {
        name: float(elements * size / (world if rung > 2 - i else 1))
        for i, (name, size) in enumerate(
            zip(["parameters", "gradients", "optimizer"], sizes, strict=True)
        )
    }


def peak(blocks, world, strategy, precision, optimizer):
    table = held(blocks, world, strategy, precision, optimizer)
    size = 4 if precision == "fp32" else 2
    whole = size * np.array([b.parameters for b in blocks], float)
    activations = np.cumsum([b.activations for b in blocks])
    later = whole[::-1].cumsum()[::-1] - whole  # gradients of the blocks that are done
    if strategy in ("zero2", "zero3"):
        later /= world
    now = activations + whole + later + (whole if strategy == "zero3" else 0)
    return float(now.max()) + table["parameters"] + table["optimizer"]


def choose(blocks, world, precision, optimizer, memory):
    rungs = ["ddp", "zero1", "zero2", "zero3"]
    fits = [memory >= peak(blocks, world, rung, precision, optimizer) for rung in rungs]
    return rungs[fits.index(True)] if any(fits) else None
