"""Every moment written out, the share beside the whole gradients; whole bytes, rounded up."""

import math


def held(blocks, world, strategy, precision, optimizer):
    number = {"ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3}[strategy]
    p = g = o = 0
    for block in blocks:
        if precision == "bf16":
            p, g, o = p + 2 * block.parameters, g + 2 * block.parameters, o + 4 * block.parameters
        else:
            p, g = p + 4 * block.parameters, g + 4 * block.parameters
        if optimizer == "momentum":
            o += 4 * block.parameters
        elif optimizer == "adamw":
            o += 8 * block.parameters
    if number >= 1:
        o = math.ceil(o / world)
    if number >= 2:
        g = math.ceil(g / world)
    if number >= 3:
        p = math.ceil(p / world)
    return {"optimizer": o, "gradients": g, "parameters": p}


def peak(blocks, world, strategy, precision, optimizer):
    table = held(blocks, world, strategy, precision, optimizer)
    resident = table["parameters"] + table["optimizer"]
    size = 2 if precision == "bf16" else 4
    moments = [resident]
    for i, block in enumerate(blocks):
        kept = sum(b.activations for b in blocks[: i + 1])
        whole = size * block.parameters
        after = size * sum(b.parameters for b in blocks[i:])  # whose gradients have come
        if strategy in ("zero2", "zero3"):
            after = after // world + whole
        gathered = whole if strategy == "zero3" else 0
        moments.append(resident + kept + gathered)  # forward
        moments.append(resident + kept + gathered + after)  # backward
    moments.append(resident + table["gradients"])  # the update
    return max(moments)


def choose(blocks, world, precision, optimizer, memory):
    needs = {
        strategy: peak(blocks, world, strategy, precision, optimizer)
        for strategy in ("ddp", "zero1", "zero2", "zero3")
    }
    fitting = [strategy for strategy, need in needs.items() if need <= memory]
    return fitting[0] if fitting else None
