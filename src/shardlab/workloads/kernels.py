"""The head and its loss in one operation, for compiled models on a GPU.

The logits are the largest tensor of a language model by far, and backward reads and writes them
again. Here they live for a few thousand rows at a time: a kernel reads them, and writes the
gradient over them, from which the gradients of the input and of the weight are computed at once.
Backward only scales those two.

The kernel is written in Triton; the same in PyTorch's words stands beside it. The operation runs
on CPUs as well, with the latter, which is what the tests of the strategies use.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

HAS_TRITON = importlib.util.find_spec("triton") is not None
IGNORED = -100  # such a target counts for nothing, as in F.cross_entropy
TILE = 64  # GPU matrix products are fast on multiples of it, and GPT-2's vocabulary is odd
ROWS = 8192  # of the logits that exist at a time: 0.8 GB of GPT-2's in bf16
BLOCK, WARPS = 8192, 8  # columns that the kernel takes at a time, and by how many warps


def is_fused(hidden: Tensor, weight: Tensor) -> bool:
    """Whether the operation serves this call: compiled, on a GPU, and with gradients to be made.

    Not in fp16, whose small gradients need the loss's scale, which only backward knows; nor in
    fp64, nor where Triton is missing.
    """
    return (
        torch.compiler.is_compiling()
        and hidden.is_cuda
        and torch.is_grad_enabled()
        and _dtype_of_products(hidden) in (torch.float32, torch.bfloat16)
        and weight.dtype == torch.float32
        and HAS_TRITON
    )


def _dtype_of_products(x: Tensor) -> torch.dtype:
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def head_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The summed cross-entropy of ``hidden @ weight.T``: ().

    ``hidden`` (rows, dim), ``weight`` (vocab, dim), ``targets`` (rows,). The products are computed
    as autocast says; the weight's gradient is added up in the dtype of ``weight``.
    """
    hidden = hidden.to(_dtype_of_products(hidden))
    loss: Tensor = torch.ops.shardlab.head_loss(hidden, weight, targets)[0]
    return loss


@torch.library.custom_op("shardlab::head_loss", mutates_args=())
def _head_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, and its gradients by ``hidden`` and by ``weight``."""
    (rows, dim), vocab = hidden.shape, weight.shape[0]
    columns = vocab + -vocab % TILE
    padded = F.pad(weight.to(hidden.dtype), (0, 0, 0, columns - vocab))  # (columns, dim)
    logits = hidden.new_empty(min(rows, ROWS), columns)
    losses = torch.zeros(rows, dtype=weight.dtype, device=weight.device)
    of_hidden = torch.empty_like(hidden)
    of_weight = weight.new_zeros(columns, dim)
    parts = (tensor.split(ROWS) for tensor in (hidden, targets, losses, of_hidden))
    for x, target, loss, of_x in zip(*parts, strict=True) if rows else ():
        y = logits[: len(x)]
        torch.mm(x, padded.t(), out=y)
        if y.is_cuda:
            _triton_loss_to_gradient(y, target, loss, vocab)
        else:
            loss_to_gradient(y, target, loss, vocab)
        torch.mm(y, padded, out=of_x)
        _add_product(of_weight, y.t(), x)
    return losses.sum(), of_hidden, of_weight[:vocab]


@_head_loss.register_fake
def _(hidden: Tensor, weight: Tensor, _targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return weight.new_empty(()), torch.empty_like(hidden), torch.empty_like(weight)


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output[1:])
    ctx.set_materialize_grads(False)


def _scale(ctx: Any, gradient: Tensor, *_: None) -> tuple[Tensor, Tensor, None]:
    if torch.is_grad_enabled():
        raise RuntimeError("the fused head has no second derivative; use training.compile: none")
    of_hidden, of_weight = ctx.saved_tensors
    return of_hidden * gradient, of_weight * gradient, None


_head_loss.register_autograd(_scale, setup_context=_keep)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """``total += a @ b``, added up in the dtype of ``total``."""
    if total.dtype == a.dtype:
        torch.addmm(total, a, b, out=total)
    elif total.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:  # CPUs have no product of bf16 that gives fp32
        total.add_(a.mm(b))


def loss_to_gradient(logits: Tensor, targets: Tensor, losses: Tensor, vocab: int) -> None:
    """Write each row's loss to ``losses`` (rows,), and its gradient over ``logits`` (rows,
    columns). Columns from ``vocab`` on are padding. A target outside of the vocabulary gives NaN.
    """
    real = logits[:, :vocab].to(torch.promote_types(logits.dtype, torch.float32))
    counts = targets != IGNORED
    known = (targets >= 0) & (targets < vocab)
    at = torch.where(known, targets, 0)[:, None]  # (rows, 1)
    norms = torch.where(known, real.logsumexp(1), torch.nan)  # (rows,)
    losses.copy_((norms - real.gather(1, at)[:, 0]).where(counts, 0))
    gradient = torch.exp(real - norms[:, None])
    gradient.scatter_add_(1, at, -torch.ones_like(at, dtype=gradient.dtype))
    logits[:, :vocab] = gradient.where(counts[:, None], 0).to(logits.dtype)
    logits[:, vocab:] = 0


def _triton_loss_to_gradient(logits: Tensor, targets: Tensor, losses: Tensor, vocab: int) -> None:
    """``loss_to_gradient`` by the kernel: one program for each row."""
    rows, columns = logits.shape
    sizes = logits.stride(0), vocab, columns
    kernel()[(rows,)](logits, targets, losses, *sizes, IGNORED, BLOCK, num_warps=WARPS)


@functools.cache
def kernel() -> Any:
    import triton
    import triton.language as tl

    @triton.jit
    def loss_to_gradient_kernel(  # type: ignore[no-untyped-def]
        logits, targets, losses, stride,
        vocab: tl.constexpr, columns: tl.constexpr, ignored: tl.constexpr, block: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64)
        logits += row * stride
        target = tl.load(targets + row)
        if target == ignored:
            for first in range(0, columns, block):
                at = first + tl.arange(0, block)
                tl.store(logits + at, 0.0, mask=at < columns)
            tl.store(losses + row, 0.0)
        else:
            known = (target >= 0) & (target < vocab)
            own = tl.load(logits + tl.where(known, target, 0)).to(tl.float32)
            top, total = -float("inf"), 0.0  # of the columns so far: the largest, the sum of exp
            for first in range(0, vocab, block):
                at = first + tl.arange(0, block)
                x = tl.load(logits + at, mask=at < columns, other=0.0).to(tl.float32)
                x = tl.where(at < vocab, x, -float("inf"))
                higher = tl.maximum(top, tl.max(x, 0))
                total = total * tl.exp(top - higher) + tl.sum(tl.exp(x - higher), 0)
                top = higher
            norm = tl.where(known, top + tl.log(total), float("nan"))
            tl.store(losses + row, norm - own)
            tl.debug_barrier()  # every warp has read its own before any of them writes over it
            for first in range(0, columns, block):  # these come from the cache
                at = first + tl.arange(0, block)
                x = tl.load(logits + at, mask=at < columns, other=0.0).to(tl.float32)
                x = tl.where(at < vocab, x, -float("inf"))
                gradient = tl.exp(x - norm) - tl.where(at == target, 1.0, 0.0)
                tl.store(logits + at, gradient, mask=at < columns)

    return loss_to_gradient_kernel


def gelu(x: Tensor) -> Tensor:
    """GELU in its tanh form. Compiled for a GPU it is written as x·sigmoid(2u), which is the same
    and spares the slow tanh."""
    if not (torch.compiler.is_compiling() and x.is_cuda):
        return F.gelu(x, approximate="tanh")
    return gelu_by_sigmoid(x)


def gelu_by_sigmoid(x: Tensor) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    doubled = 1.5957691216057308 * (wide + 0.044715 * wide * wide * wide)  # 2·√(2/π)·(…)
    return (wide * torch.sigmoid(doubled)).to(x.dtype)
