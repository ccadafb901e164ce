"""Two operations of GPT-2 that pass over large tensors less often, for compiled models on a GPU.

``head_loss`` is the head and its loss. The logits are the largest tensor of a language model by
far, and backward reads and writes them again. Here they live for a few thousand rows at a time: a
kernel writes their gradient over them, from which the gradients of the input and of the weight are
computed at once. Backward only scales those two. On request its products are of float8.

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
FLOAT8_ROWS = 16384  # of the logits at a time where the products are of float8, which are faster
FLOAT8_TILE = 16  # GPUs multiply float8 in such multiples alone
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# A logit's gradient is in [-1, 1], and most of it is tiny: 1/50257 when training begins, and less
# later. Times this, e5m2 has it down to 2**-31; e4m3 would lose what is below 2**-18.
LIFT = 2.0**15


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


def no_float8(device: torch.device) -> str | None:
    """Why there is no float8 head on a device; None: there is."""
    if device.type != "cuda":
        return f"this run is on a {device.type.upper()}"
    if torch.cuda.get_device_capability(device) < (9, 0):
        return f"the {torch.cuda.get_device_name(device)} is older"
    if not HAS_TRITON:
        return "Triton is not installed"
    return None if hasattr(torch, "_scaled_mm") else "this PyTorch cannot multiply float8"


def _dtype_of_products(x: Tensor) -> torch.dtype:
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _refuse_second_derivative() -> None:
    if torch.is_grad_enabled():
        raise RuntimeError("gpt2's fused operations have no second derivative; do not compile it")


# ------------------------------------------------------------------ the head and its loss


def head_loss(hidden: Tensor, weight: Tensor, targets: Tensor, float8: bool = False) -> Tensor:
    """The summed cross-entropy of ``hidden @ weight.T``: ().

    ``hidden`` (rows, dim), ``weight`` (vocab, dim), ``targets`` (rows,). The products are computed
    as autocast says, or of float8; the weight's gradient is added up in the dtype of ``weight``.
    """
    operation = torch.ops.shardlab.float8_head_loss if float8 else torch.ops.shardlab.head_loss
    loss: Tensor = operation(hidden.to(_dtype_of_products(hidden)), weight, targets)[0]
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


@torch.library.custom_op("shardlab::float8_head_loss", mutates_args=())
def _float8_head_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """As ``_head_loss``, with operands of float8 in the three products.

    A GPU multiplies float8 only where both operands have the numbers that are summed side by side.
    So the hidden states, the weight and the logits' gradient are each written twice, in rows and in
    columns. (The gradient's columns cost less than its product in bf16.)
    """
    (rows, dim), vocab = hidden.shape, weight.shape[0]
    x, x_turned, x_scale = to_float8(_padded(hidden, FLOAT8_TILE))
    w, w_turned, w_scale = to_float8(_padded(weight, TILE))  # (columns, dim), (dim, columns)
    targets = F.pad(targets, (0, len(x) - rows), value=IGNORED)
    step = min(len(x), FLOAT8_ROWS)
    logits = hidden.new_empty(step, len(w))
    y = hidden.new_empty(step, len(w), dtype=E5M2)
    y_turned = logits.view(E5M2).view(-1)  # needed when the logits are not any more
    y_scale = x_scale.new_full((), 1 / LIFT)
    losses = torch.zeros(len(x), dtype=weight.dtype, device=weight.device)
    of_hidden = hidden.new_empty(len(x), dim)
    of_weight = weight.new_empty(len(w), dim)
    to_gradient = _triton_loss_to_gradient if hidden.is_cuda else loss_to_gradient
    for start in range(0, len(x), step):
        part = slice(start, start + step)
        n = len(x[part])
        _float8_product(x[part], w.t(), x_scale, w_scale, logits[:n], True)
        to_gradient(logits[:n], targets[part], losses[part], vocab, y[:n], LIFT)
        _float8_product(y[:n], w_turned.t(), y_scale, w_scale, of_hidden[part])
        turned = turn(y[:n], y_turned[: n * len(w)].view(len(w), n))
        more = of_weight if start == 0 else torch.empty_like(of_weight)
        _float8_product(turned, x_turned[:, part].t(), y_scale, x_scale, more)
        if start:
            of_weight += more
    return losses.sum(), of_hidden[:rows], of_weight[:vocab]


def _fake_loss(hidden: Tensor, weight: Tensor, _targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return weight.new_empty(()), torch.empty_like(hidden), torch.empty_like(weight)


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:  # noqa: ARG001
    ctx.save_for_backward(*output[1:])
    ctx.set_materialize_grads(False)


def _scale(ctx: Any, gradient: Tensor, *_: None) -> tuple[Tensor, Tensor, None]:
    _refuse_second_derivative()
    of_hidden, of_weight = ctx.saved_tensors
    return of_hidden * gradient, of_weight * gradient, None


for _operation in (_head_loss, _float8_head_loss):
    _operation.register_fake(_fake_loss)
    _operation.register_autograd(_scale, setup_context=_keep)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """``total += a @ b``, added up in the dtype of ``total``."""
    if total.dtype == a.dtype:
        torch.addmm(total, a, b, out=total)
    elif total.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:  # CPUs have no product of bf16 that gives fp32
        total.add_(a.mm(b))


def _padded(x: Tensor, multiple: int) -> Tensor:
    """With rows of zeros, up to a multiple that is not 0."""
    more = -len(x) % multiple if len(x) else multiple
    return F.pad(x, (0, 0, 0, more)) if more else x.contiguous()


def _float8_product(
    a: Tensor, b: Tensor, of_a: Tensor, of_b: Tensor, out: Tensor, is_fast: bool = False
) -> None:
    """``out = a @ b``, with the scales of ``a`` and ``b``. If fast, a GPU adds up in fewer bits
    than fp32's: enough for logits, but not for gradients, of which one summand is far larger than
    the rest."""
    if a.is_cuda:
        torch._scaled_mm(a, b, of_a, of_b, out_dtype=out.dtype, use_fast_accum=is_fast, out=out)
    else:
        out.copy_((a.float() @ b.float()) * (of_a * of_b))


def to_float8(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``x`` (rows, columns) in e4m3, its transpose, and the scale () that both are to be multiplied
    by: the largest number of ``x`` became e4m3's largest."""
    largest = torch.linalg.vector_norm(x, torch.inf).float().clamp(min=1e-30)
    scale = largest / torch.finfo(E4M3).max
    out = (x.float() / scale).to(E4M3)
    return out, turn(out, out.new_empty(out.t().shape)), scale


def turn(x: Tensor, out: Tensor) -> Tensor:
    """``out`` (columns, rows), after the transpose of ``x`` (rows, columns), of bytes, was written
    there."""
    if not x.is_cuda:
        return out.copy_(x.t())
    size = 128
    grid = -(-x.shape[0] // size), -(-x.shape[1] // size)
    flat = x.view(torch.uint8), out.view(torch.uint8)
    kernels()["turn"][grid](*flat, *x.shape, size, num_warps=8)
    return out


def loss_to_gradient(
    logits: Tensor,
    targets: Tensor,
    losses: Tensor,
    vocab: int,
    out: Tensor | None = None,
    lift: float = 1.0,
) -> None:
    """Write each row's loss to ``losses`` (rows,), and its gradient, times ``lift``, to ``out``
    (rows, columns), by default over ``logits``. Columns from ``vocab`` on are padding. A target
    outside of the vocabulary gives NaN.
    """
    out = logits if out is None else out
    real = _wide(logits[:, :vocab])
    counts = targets != IGNORED
    known = (targets >= 0) & (targets < vocab)
    at = torch.where(known, targets, 0)[:, None]  # (rows, 1)
    norms = torch.where(known, real.logsumexp(1), torch.nan)  # (rows,)
    losses.copy_((norms - real.gather(1, at)[:, 0]).where(counts, 0))
    gradient = torch.exp(real - norms[:, None])
    gradient.scatter_add_(1, at, -torch.ones_like(at, dtype=gradient.dtype))
    out[:, :vocab] = (lift * gradient).where(counts[:, None], 0).to(out.dtype)
    out[:, vocab:] = 0


def _triton_loss_to_gradient(
    logits: Tensor,
    targets: Tensor,
    losses: Tensor,
    vocab: int,
    out: Tensor | None = None,
    lift: float = 1.0,
) -> None:
    """One program for each row. So many warps, because all rows that are under way should fit in
    the GPU's second-level cache (60 MB on an H200): each is read twice.
    """
    rows, columns = logits.shape
    out = logits if out is None else out
    block = 16384 if columns > 16384 else 1024  # columns at a time
    kernel = kernels()["loss_to_gradient"]
    sizes = logits.stride(0), out.stride(0), vocab, columns, IGNORED, block, lift
    kernel[(rows,)](logits, targets, losses, out, *sizes, num_warps=block // 512)


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
        logits, targets, losses, out, stride, out_stride,
        vocab: tl.constexpr, columns: tl.constexpr, ignored: tl.constexpr, block: tl.constexpr,
        lift: tl.constexpr,
    ):  # fmt: skip
        number = tl.program_id(0).to(tl.int64)
        row = logits + number * stride
        out += number * out_stride
        target = tl.load(targets + number)
        full: tl.constexpr = vocab // block * block  # up to here no column needs a mask
        # A thread has 8 columns side by side: 16 bytes in bf16.
        strip = tl.arange(0, block // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]
        if target == ignored:
            for first in range(0, columns, block):
                zeros = tl.zeros((block // 8, 8), out.dtype.element_ty)
                tl.store(out + first + strip, zeros, mask=first + strip < columns)
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
                gradient = tl.exp2(x * log2_e - norm) * lift
                gradient = gradient.to(out.dtype.element_ty)
                tl.store(out + first + strip, gradient, eviction_policy="evict_first")
            x = tl.load(row + at, mask=at < columns, other=0.0, eviction_policy="evict_first")
            x = tl.where(at < vocab, x.to(tl.float32) * log2_e, -3e38)
            gradient = (tl.exp2(x - norm) * lift).to(out.dtype.element_ty)
            tl.store(out + at, gradient, mask=at < columns, eviction_policy="evict_first")
            tl.debug_barrier()  # two threads write the target's column, and this one is right
            own = (tl.exp2(own * log2_e - norm) - 1.0) * lift
            tl.store(out + target, own.to(out.dtype.element_ty), mask=known)

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

    @triton.jit  # type: ignore[untyped-decorator]
    def turn(inputs, outputs, rows, columns, size: tl.constexpr):  # type: ignore[no-untyped-def]
        row = tl.program_id(0).to(tl.int64) * size + tl.arange(0, size)
        column = tl.program_id(1).to(tl.int64) * size + tl.arange(0, size)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        tile = tl.load(inputs + row[:, None] * columns + column[None, :], mask=inside)
        at = column[:, None] * rows + row[None, :]
        tl.store(outputs + at, tl.trans(tile), mask=tl.trans(inside))

    return {"loss_to_gradient": loss_to_gradient, "gelu_gradient": gelu_gradient, "turn": turn}
