"""Tensor parallelism. In the package: strategies/tensor/tensor_parallel.py, which finds the layers
by name and cuts the embedding, the head and the loss as well."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F


def cut(whole: Mapping[str, Tensor], rank: int, n: int) -> dict[str, Tensor]:
    part = dict(whole)
    for name in ("up.weight", "up.bias"):
        part[name] = whole[name].chunk(n, 0)[rank]
    for name in ("qkv.weight", "qkv.bias"):
        q, k, v = whole[name].chunk(3, 0)
        part[name] = torch.cat([one.chunk(n, 0)[rank] for one in (q, k, v)])
    for name in ("down.weight", "out.weight"):
        part[name] = whole[name].chunk(n, 1)[rank]
    return part


class Enter(torch.autograd.Function):
    """Every rank uses x; each knows only its own part of x's gradient."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:
        total = gradient.clone()
        dist.all_reduce(total)
        return total


class Leave(torch.autograd.Function):
    """Each rank has a part of the sum; what came of the sum has one gradient, the same for all."""

    @staticmethod
    def forward(_ctx: Any, partial: Tensor) -> Tensor:
        total = partial.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def mlp(part: Mapping[str, Tensor], x: Tensor) -> Tensor:
    hidden = F.gelu(F.linear(Enter.apply(x), part["up.weight"], part["up.bias"]))
    return Leave.apply(F.linear(hidden, part["down.weight"])) + part["down.bias"]


def attention(part: Mapping[str, Tensor], x: Tensor, heads: int) -> Tensor:
    batch, seq, _ = x.shape
    mine = heads // dist.get_world_size()
    qkv = F.linear(Enter.apply(x), part["qkv.weight"], part["qkv.bias"])
    q, k, v = qkv.view(batch, seq, 3, mine, -1).permute(2, 0, 3, 1, 4)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    mixed = mixed.transpose(1, 2).reshape(batch, seq, -1)
    return Leave.apply(F.linear(mixed, part["out.weight"])) + part["out.bias"]
