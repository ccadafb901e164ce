"""Exercise: tensor parallelism. Two layers are cut so that one message each way is enough.

The contract. Every rank has the same input x, (batch, seq, dim), and computes with its part of the
weights. The grader does:

    part = cut(whole, rank, n)                       # once
    x = x + attention(part, x, heads)                # the same on every rank afterwards
    x = x + mlp(part, x)
    x.backward(...)                                  # the same gradient comes in on every rank

- cut(whole, rank, n) gives this rank's part of each tensor, by the same names:
      up.weight (hidden, dim)   up.bias (hidden)     columns: a part of the outputs
      down.weight (dim, hidden) down.bias (dim)      rows: a part of the inputs
      qkv.weight (3 * dim, dim) qkv.bias (3 * dim)   columns, whole heads: q of all heads comes
                                                     first, then k of all heads, then v
      out.weight (dim, dim)     out.bias (dim)       rows
  It holds the values of the whole, unchanged: a bias that is added after the sum stays whole. n
  divides hidden and heads. A rank may leave out a bias of ``down`` and ``out`` that another adds.
- mlp and attention return, on every rank, what one process would. In backward every rank gets the
  whole gradient of x, and for its part what one process has for those elements.
- Each sends one all-reduce of x's size in forward and one in backward, and nothing else.

You need: torch.autograd.Function, whose backward need not be the derivative of its forward;
dist.all_reduce, which works in place (on a clone, here).

Check with:  shardlab learn check tensor_split
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F


def cut(whole: Mapping[str, Tensor], rank: int, n: int) -> dict[str, Tensor]:
    # TODO 1: which elements this rank holds.
    raise NotImplementedError("TODO 1: cut()")


# TODO 2: what must happen where x enters a half block, and where the partial sums leave it?
# One of the two communicates in forward, the other in backward.


def mlp(part: Mapping[str, Tensor], x: Tensor) -> Tensor:  # (batch, seq, dim)
    # TODO 3: this is one process's.
    hidden = F.gelu(F.linear(x, part["up.weight"], part["up.bias"]))  # (batch, seq, hidden)
    return F.linear(hidden, part["down.weight"], part["down.bias"])


def attention(part: Mapping[str, Tensor], x: Tensor, heads: int) -> Tensor:
    # TODO 4: this is one process's; ``heads`` are those of the whole.
    batch, seq, _ = x.shape
    qkv = F.linear(x, part["qkv.weight"], part["qkv.bias"])
    q, k, v = qkv.view(batch, seq, 3, heads, -1).permute(2, 0, 3, 1, 4)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (batch, heads, seq, size)
    return F.linear(
        mixed.transpose(1, 2).reshape(batch, seq, -1), part["out.weight"], part["out.bias"]
    )
