"""What some kernels of the CPU take beside their results: workspaces, reordered tensors.

oneDNN copies tensors into the order that its kernels like, and its recurrent layers keep a
workspace from forward to backward. PyTorch's fake tensors know nothing of it, and it depends on the
processor. So each such kernel runs here for real, once for each shape; a large batch follows in a
line from two smaller ones. What cuDNN takes is not known here: its kernels are named as uncounted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from shardlab.measure import memory

ENOUGH = 16 * 2**20  # bytes of arguments: of more samples nothing is run
_aten = torch.ops.aten
# By the place of an argument: which of its dimensions has the samples.
_LAYER = {0: -2, 5: -2, 6: -2}  # input, hx, cx; the rest is weights
_BATCHES: dict[Any, dict[int, int]] = {
    _aten.convolution: {0: 0},
    _aten.convolution_backward: {0: 0, 1: 0},
    _aten.mkldnn_rnn_layer: _LAYER,
    _aten.mkldnn_rnn_layer_backward: _LAYER | dict.fromkeys(range(7, 13), -2),
    _aten.native_batch_norm_backward: {0: 0, 1: 0},
    _aten.upsample_bilinear2d: {0: 0},
    _aten._euclidean_dist: {0: 0, 1: 0},
    _aten._trilinear: {0: 0, 2: 0},
    _aten._fft_c2c: {0: 0},
    _aten._fft_r2c: {0: 0},
    _aten.mean: {0: 0},
    _aten.bmm: {0: 0, 1: 0},
}
_IN_16_BITS = {_aten.mean, _aten.bmm}  # in others they take nothing
# On a GPU they are cuDNN's; recurrent layers are found before they are operators.
_CUDNN = {_aten.convolution, _aten.convolution_backward}
_WORKSPACE = 22  # an argument of the recurrent layer's backward, the last that there is

Sizes = list[int]  # bytes: beside the results, then of each result
_known: dict[str, Sizes | None] = {}  # by operator and shapes: the blocks of a model are alike


class Kernels:
    """Asked of every operator. ``uncounted``: those whose workspaces the estimate lacks."""

    def __init__(self, device: str) -> None:
        self.device = device  # that the estimate is for
        self.uncounted: dict[str, None] = {}

    def unknown_on_gpu(self, name: str) -> None:
        if self.device != "cpu":
            self.uncounted[name] = None

    def taken(self, func: Any, args: Sequence[Any]) -> Sizes | None:
        """None if the results are all that this operator takes, or nobody knows more."""
        packet = func.overloadpacket
        if packet not in _BATCHES:
            return None
        if self.device != "cpu":
            if packet in _CUDNN:
                self.unknown_on_gpu("convolution")
            return None
        if packet in _IN_16_BITS and args[0].dtype.itemsize != 2:
            return None
        batches = _BATCHES[packet]
        if not args[0].dim():
            return None
        samples: int = args[0].shape[batches[0]]
        size = sum(a.numel() * a.element_size() for a in args if isinstance(a, Tensor))
        most = max(2, samples * ENOUGH // max(1, size))
        sizes = (samples,) if most >= samples else (most // 2, most)
        found = [_tried(func, args, batches, count, samples) for count in sizes]
        known = [one for one in found if one is not None]
        if len(known) < len(found):
            self.uncounted[packet.__name__] = None
            return None
        beyond = (samples - sizes[0]) / max(1, sizes[-1] - sizes[0])
        return [
            round(few + (many - few) * beyond)
            for few, many in zip(known[0], known[-1], strict=True)
        ]


def _tried(
    func: Any, args: Sequence[Any], batches: dict[int, int], count: int, samples: int
) -> Sizes | None:
    """None: it cannot run."""
    shapes = [
        _smaller(arg, batches.get(i), count, samples) if isinstance(arg, Tensor) else arg
        for i, arg in enumerate(args[:_WORKSPACE])
    ]
    key = f"{func} {shapes}"
    if key not in _known:
        with _disable_current_modes(), torch.enable_grad():  # else it keeps nothing
            try:
                _known[key] = _run(func, [_real(shape) for shape in shapes])
            except RuntimeError:  # no memory for it
                _known[key] = None
    return _known[key]


def _smaller(
    tensor: Tensor, dim: int | None, count: int, samples: int
) -> tuple[torch.dtype, list[int], list[int]]:
    """Its type, shape and strides, with fewer samples."""
    shape, strides = list(tensor.shape), list(tensor.stride())
    if dim is not None and shape[dim] == samples != count:
        shape[dim] = count
        strides = [s * count // samples if s > strides[dim] else s for s in strides]
    return tensor.dtype, shape, strides


def _real(arg: Any) -> Any:
    if isinstance(arg, tuple) and len(arg) == 3 and isinstance(arg[0], torch.dtype):
        dtype, shape, strides = arg
        return torch.empty_strided(shape, strides, dtype=dtype).zero_()
    return arg


def _run(func: Any, args: list[Any]) -> Sizes:
    if func.overloadpacket is _aten.mkldnn_rnn_layer_backward:
        # What backward is given is what forward made. (input, weights, hx, cx, reverse, batch
        # sizes, mode, hidden, layers, biases, both ways, batch first, train)
        order = [*range(7), 13, 20, 14, 15, 16, 17, 19, 21, 18]
        forward = _aten.mkldnn_rnn_layer.default
        args.append(forward(*(args[i] for i in order))[3])
    result, allocations = memory.on_cpu(lambda: func(*args))
    results = [
        0 if t is None else t.untyped_storage().nbytes()
        for t in (result if isinstance(result, tuple) else (result,))
    ]
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in tree_leaves(result)
        if isinstance(t, Tensor)
    }
    peak = sum(a.size for a in memory.at_peak(allocations))
    return [max(0, peak - sum(storages.values())), *results]
