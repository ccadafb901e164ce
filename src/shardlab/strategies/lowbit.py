"""Tensors in few bits: whole numbers of 16, 8 or 4 bits, with a scale for each block.

A tensor is cut into blocks of 128 elements. The largest element of a block, without its sign, is
the largest number that the bits can hold (32767, 127 or 7); the others are rounded to the nearest
whole number of that scale. So an element is off by at most half a scale, which is 1/14 of the
block's largest at 4 bits. Zero stays zero. What is not finite makes its block NaN.

Whoever decodes a message gets the same values, bit for bit. Whole numbers of different blocks, or
of different workers, have different scales: they are decoded first, and added then.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

BLOCK = 128  # elements with one scale: at 4 bits it adds a sixteenth to the bytes
SCALE = torch.float32
_WHOLE = {16: torch.int16, 8: torch.int8, 4: torch.uint8}


def encode(tensors: Sequence[Tensor], bits: int) -> Tensor:
    """One message: the scales of all tensors, then their whole numbers. (bytes,) uint8."""
    scales, numbers = [], []
    for tensor in tensors:
        blocks = _blocks(tensor)  # (blocks, BLOCK)
        largest = blocks.abs().amax(1, keepdim=True)  # (blocks, 1)
        scale = (largest / top(bits)).to(SCALE)
        divisor = torch.where(scale == 0, 1.0, scale).to(blocks.dtype)
        whole = (blocks / divisor).round_().clamp_(-top(bits), top(bits))
        scales.append(scale.view(-1).view(torch.uint8))
        numbers.append(_packed(whole.view(-1)[: _real(tensor).numel()], bits))
    return torch.cat([*scales, *numbers])


def decode(message: Tensor, like: Sequence[Tensor], bits: int) -> list[Tensor]:
    """The tensors of a message, which have the shapes and types of ``like``."""
    counts = [_real(tensor).numel() for tensor in like]
    sizes = [SCALE.itemsize * -(-n // BLOCK) for n in counts] + [-(-n * bits // 8) for n in counts]
    parts = message.split(sizes)
    found = []
    for tensor, count, scales, numbers in zip(
        like, counts, parts[: len(like)], parts[len(like) :], strict=True
    ):
        whole = _unpacked(numbers, count, bits)
        blocks = torch.nn.functional.pad(whole.to(_wide(tensor)), (0, -count % BLOCK))
        scale = scales.clone().view(SCALE)  # a part of a message may lie at any byte
        values = (blocks.view(-1, BLOCK) * scale.to(blocks.dtype)[:, None]).view(-1)[:count]
        result = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        _real(result).copy_(values.view(_real(result).shape))
        found.append(result)
    return found


def top(bits: int) -> int:
    return int(2 ** (bits - 1)) - 1


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _wide(tensor: Tensor) -> torch.dtype:
    """At least float32: halves have no room for a quotient of 16 bits."""
    return torch.promote_types(_real(tensor).dtype, SCALE)


def _blocks(tensor: Tensor) -> Tensor:
    flat = _real(tensor).to(_wide(tensor)).reshape(-1)
    return torch.nn.functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)


def _packed(whole: Tensor, bits: int) -> Tensor:
    """Whole numbers as bytes. At 4 bits two share a byte, the first in its lower half."""
    if bits != 4:
        return whole.to(_WHOLE[bits]).view(torch.uint8)
    halves = torch.nn.functional.pad((whole + 8).to(torch.uint8), (0, len(whole) % 2)).view(-1, 2)
    return halves[:, 0] | halves[:, 1] << 4


def _unpacked(packed: Tensor, count: int, bits: int) -> Tensor:
    if bits != 4:
        return packed.clone().view(_WHOLE[bits])
    halves = torch.stack([packed & 15, packed >> 4], 1).view(-1)[:count]
    return halves.to(torch.int8) - 8
