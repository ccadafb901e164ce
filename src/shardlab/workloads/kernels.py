"""Two operations of GPT-2 that pass over large tensors less often, for compiled models on a GPU.

``head_loss`` is the head and its loss. The logits are the largest tensor of a language model by
far, and backward reads and writes them again. Here they live for a few thousand rows at a time: a
kernel writes their gradient over them, from which the gradients of the input and of the weight are
computed at once. Backward only scales those two.

``linear_gelu`` is a layer and its GELU. Their backward computes the bias's gradient, a sum over all
rows, in the kernel that has the summands at hand.

The kernels are written in Triton; the same in PyTorch's words stands before each. On a CPU both
operations run with the latter, which the tests of the strategies use.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

HAS_TRITON = importlib.util.find_spec("triton") is not None
IGNORED = -100  # such a target counts for nothing, as in F.cross_entropy
TILE = 64  # GPU matrix products are fast on multiples of it, and GPT-2's vocabulary is odd
ROWS = 8192  # of the logits that exist at a time: 0.8 GB of GPT-2's in bf16
ROWS_EACH = 512  # that one program of GELU's backward takes


def is_fused(x: Tensor, weight: Tensor) -> bool:
    """Whether the operations serve this call: compiled, on a GPU, and with gradients to be made.

    Not in fp16, whose small gradients need the loss's scale, which only backward knows; nor in
    fp64, nor where Triton is missing.
    """
    return (
        torch.compiler.is_compiling()
        and x.is_cuda
        and torch.is_grad_enabled()
        and _dtype_of_products(x) in (torch.float32, torch.bfloat16)
        and weight.dtype == torch.float32
        and HAS_TRITON
    )


def _dtype_of_products(x: Tensor) -> torch.dtype:
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _refuse_second_derivative() -> None:
    if torch.is_grad_enabled():
        raise RuntimeError("gpt2's fused operations have no second derivative; do not compile it")


# ------------------------------------------------------------------ the head and its loss


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
    to_gradient = _triton_loss_to_gradient if hidden.is_cuda else loss_to_gradient
    for start in range(0, rows, ROWS):
        part = slice(start, start + ROWS)
        x = hidden[part]
        y = logits[: len(x)]
        torch.mm(x, padded.t(), out=y)
        to_gradient(y, targets[part], losses[part], vocab)
        torch.mm(y, padded, out=of_hidden[part])
        _add_product(of_weight, y.t(), x)
    return losses.sum(), of_hidden, of_weight[:vocab]


@_head_loss.register_fake
def _(hidden: Tensor, weight: Tensor, _targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return weight.new_empty(()), torch.empty_like(hidden), torch.empty_like(weight)


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:  # noqa: ARG001
    ctx.save_for_backward(*output[1:])
    ctx.set_materialize_grads(False)


def _scale(ctx: Any, gradient: Tensor, *_: None) -> tuple[Tensor, Tensor, None]:
    _refuse_second_derivative()
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
    real = _wide(logits[:, :vocab])
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
    """One program for each row. So many warps, because all rows that are under way should fit in
    the GPU's second-level cache (60 MB on an H200): each is read twice.
    """
    rows, columns = logits.shape
    block = 16384 if columns > 16384 else 1024  # columns at a time
    kernel = kernels()["loss_to_gradient"]
    sizes = logits.stride(0), vocab, columns, IGNORED, block
    kernel[(rows,)](logits, targets, losses, *sizes, num_warps=block // 512)


# ------------------------------------------------------------------ a layer and its GELU


def linear_gelu(x: Tensor, layer: nn.Module) -> Tensor:
    """GELU, in its tanh form, of the layer's output."""
    if not isinstance(layer, nn.Linear) or not is_fused(x, layer.weight):  # a part of a layer
        return F.gelu(layer(x), approximate="tanh")
    # Here the bias is a constant, and the gradient comes to it by the second way.
    y = F.linear(x, layer.weight, layer.bias.detach())
    out: Tensor = _GELU.apply(y, layer.bias)  # type: ignore[no-untyped-call]
    return out


class _GELU(torch.autograd.Function):
    """GELU of ``x`` (..., columns), to which ``bias`` (columns,) was added before."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:  # noqa: ARG004
        ctx.save_for_backward(x)
        return gelu(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        _refuse_second_derivative()
        (x,) = ctx.saved_tensors
        of_x, of_bias = torch.ops.shardlab.gelu_backward(gradient.contiguous(), x.contiguous())
        return of_x, of_bias


SCALE, CUBIC = 1.5957691216057308, 0.044715  # 2·√(2/π), and GELU's own constant


def gelu(x: Tensor) -> Tensor:
    """x·sigmoid(2u), where its usual form is x·(1 + tanh(u))/2: the same, without the slow tanh."""
    z = _wide(x)
    out = z * torch.sigmoid(SCALE * (z + CUBIC * z * z * z))
    # Compiled by torch 2.11, a Function that ends with a cast to the same dtype gets no gradient.
    return out if out.dtype == x.dtype else out.to(x.dtype)


def gelu_gradient(gradient: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """By ``x`` (rows, columns), and that of a bias in it: its sum over the rows, not rounded."""
    z = _wide(x)
    sigmoid = torch.sigmoid(SCALE * (z + CUBIC * z * z * z))
    slope = SCALE * (1 + 3 * CUBIC * z * z)
    of_x = gradient * sigmoid * (1 + z * (1 - sigmoid) * slope)
    return of_x.to(x.dtype), of_x.sum(0)


@torch.library.custom_op("shardlab::gelu_backward", mutates_args=())
def _gelu_backward(gradient: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    columns = x.shape[-1]
    flat = gradient.view(-1, columns), x.view(-1, columns)
    if not x.is_cuda:
        of_x, of_bias = gelu_gradient(*flat)
        return of_x.view_as(x), of_bias
    of_x, rows = torch.empty_like(x), len(flat[0])
    sums = _wide(x.new_empty(0)).new_empty(-(-rows // ROWS_EACH), columns)
    grid = -(-columns // 128), len(sums)
    if rows:
        kernel = kernels()["gelu_gradient"]
        kernel[grid](*flat, of_x, sums, rows, columns, ROWS_EACH, 16, 128, SCALE, CUBIC)
    return of_x, sums.sum(0)


@_gelu_backward.register_fake
def _(_gradient: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), _wide(x.new_empty(0)).new_empty(x.shape[-1])


# ------------------------------------------------------------------ in Triton


@functools.cache
def kernels() -> dict[str, Any]:
    """By the names of the functions above that say the same. Triton is imported here: it takes
    time, and is not everywhere."""
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator]
    def loss_to_gradient(  # type: ignore[no-untyped-def]
        logits, targets, losses, stride,
        vocab: tl.constexpr, columns: tl.constexpr, ignored: tl.constexpr, block: tl.constexpr,
    ):  # fmt: skip
        number = tl.program_id(0).to(tl.int64)
        row = logits + number * stride
        target = tl.load(targets + number)
        full: tl.constexpr = vocab // block * block  # up to here no column needs a mask
        # A thread has 8 columns side by side: 16 bytes in bf16.
        strip = tl.arange(0, block // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]
        if target == ignored:
            for first in range(0, columns, block):
                tl.store(row + first + strip, 0.0, mask=first + strip < columns)
            tl.store(losses + number, 0.0)
        else:
            known = (target >= 0) & (target < vocab)
            own = tl.load(row + tl.where(known, target, 0)).to(tl.float32)
            # In powers of two, which is what the GPU computes. Each thread has a largest value and
            # a sum of its own: none waits for another.
            log2_e: tl.constexpr = 1.4426950408889634
            top = tl.full((block // 8,), -3e38, tl.float32)
            total = tl.zeros((block // 8,), tl.float32)
            for first in range(0, full, block):
                x = tl.load(row + first + strip, eviction_policy="evict_last").to(tl.float32)
                x = x * log2_e
                higher = tl.maximum(top, tl.max(x, 1))
                powers = tl.exp2(x - higher[:, None])
                total = total * tl.exp2(top - higher) + tl.sum(powers, 1)
                top = higher
            # The last columns. Masked where the padding ends, at a multiple of TILE, so that
            # loads stay wide.
            at = full + strip
            x = tl.load(row + at, mask=at < columns, other=0.0, eviction_policy="evict_last")
            x = tl.where(at < vocab, x.to(tl.float32) * log2_e, -3e38)
            higher = tl.maximum(top, tl.max(x, 1))
            powers = tl.exp2(x - higher[:, None])
            total = total * tl.exp2(top - higher) + tl.sum(powers, 1)
            highest = tl.max(higher, 0)
            norm = highest + tl.log2(tl.sum(total * tl.exp2(higher - highest), 0))
            norm = tl.where(known, norm, float("nan"))
            tl.store(losses + number, norm / log2_e - own)
            for first in range(0, full, block):
                x = tl.load(row + first + strip, eviction_policy="evict_first").to(tl.float32)
                gradient = tl.exp2(x * log2_e - norm)
                tl.store(row + first + strip, gradient, eviction_policy="evict_first")
            x = tl.load(row + at, mask=at < columns, other=0.0, eviction_policy="evict_first")
            x = tl.where(at < vocab, x.to(tl.float32) * log2_e, -3e38)
            gradient = tl.exp2(x - norm)
            tl.store(row + at, gradient, mask=at < columns, eviction_policy="evict_first")
            tl.debug_barrier()  # two threads write the target's column, and this one is right
            tl.store(row + target, tl.exp2(own * log2_e - norm) - 1.0, mask=known)

    @triton.jit  # type: ignore[untyped-decorator]
    def gelu_gradient(  # type: ignore[no-untyped-def]
        gradients, inputs, outputs, sums, rows,
        columns: tl.constexpr, rows_each: tl.constexpr, high: tl.constexpr, wide: tl.constexpr,
        scale: tl.constexpr, cubic: tl.constexpr,
    ):  # fmt: skip
        column = tl.program_id(0) * wide + tl.arange(0, wide)[None, :]
        total = tl.zeros((high, wide), tl.float32)
        for first in range(0, rows_each, high):
            row = tl.program_id(1) * rows_each + first + tl.arange(0, high)[:, None]
            at = row.to(tl.int64) * columns + column
            inside = (row < rows) & (column < columns)
            gradient = tl.load(gradients + at, mask=inside, other=0.0).to(tl.float32)
            z = tl.load(inputs + at, mask=inside, other=0.0).to(tl.float32)
            doubled = scale * (z + cubic * z * z * z)
            sigmoid = 1.0 / (1.0 + tl.exp2(doubled * -1.4426950408889634))
            slope = scale * (1.0 + 3.0 * cubic * z * z)
            result = gradient * sigmoid * (1.0 + z * (1.0 - sigmoid) * slope)
            tl.store(outputs + at, result, mask=inside)
            total += result
        sums += tl.program_id(1) * columns
        tl.store(sums + column, tl.sum(total, 0)[None, :], mask=column < columns)

    return {"loss_to_gradient": loss_to_gradient, "gelu_gradient": gelu_gradient}
