"""The biases of the second layers are on rank 0 alone, and are part of its partial sum."""

import torch
import torch.distributed as dist
from torch.nn import functional as F


def cut(whole, rank, n):
    def outputs(tensor):
        each = len(tensor) // n
        return tensor[rank * each : (rank + 1) * each]

    dim = len(whole["out.bias"])
    part = {
        "up.weight": outputs(whole["up.weight"]),
        "up.bias": outputs(whole["up.bias"]),
        "down.weight": outputs(whole["down.weight"].T).T,
        "qkv.weight": outputs(whole["qkv.weight"].view(3, dim, dim).transpose(0, 1)),
        "qkv.bias": outputs(whole["qkv.bias"].view(3, dim).T),
        "out.weight": outputs(whole["out.weight"].T).T,
    }
    if rank == 0:
        part |= {name: whole[name] for name in ("down.bias", "out.bias")}
    return part


class Sum(torch.autograd.Function):
    """Forward or backward, asynchronously; the other way nothing."""

    @staticmethod
    def forward(ctx, x, in_forward):
        ctx.in_forward = in_forward
        return Sum.over(x) if in_forward else x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient if ctx.in_forward else Sum.over(gradient), None

    @staticmethod
    def over(x):
        x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x, async_op=True).wait()
        return x


def mlp(part, x):
    hidden = F.gelu(F.linear(Sum.apply(x, False), part["up.weight"], part["up.bias"]))
    return Sum.apply(F.linear(hidden, part["down.weight"], part.get("down.bias")), True)


def attention(part, x, heads):
    batch, seq, _ = x.shape
    entered = Sum.apply(x, False)
    q, k, v = (
        F.linear(entered, part["qkv.weight"][:, i], part["qkv.bias"][:, i])
        .view(batch, seq, heads // dist.get_world_size(), -1)
        .transpose(1, 2)
        for i in range(3)
    )
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    mixed = mixed.transpose(1, 2).flatten(2)
    return Sum.apply(F.linear(mixed, part["out.weight"], part.get("out.bias")), True)
