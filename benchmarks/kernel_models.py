"""Models of one kind of layer each: how far is the memory estimate off where a kernel of the CPU
takes memory for itself? For ``memory_estimate.py --kernels``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardlab.workloads.base import Batch, Workload

WIDTH, LENGTH, TOKENS = 256, 128, 5000
SEQUENCE, SERIES, IMAGE, VOLUME = (LENGTH, WIDTH), (16, 2048), (16, 48, 48), (16, 8, 20, 20)


class Data:
    def __init__(self, shape: Sequence[int], of_tokens: bool) -> None:
        self.shape, self.of_tokens = tuple(shape), of_tokens

    def __len__(self) -> int:
        return 256

    def batch(self, ids: Sequence[int]) -> Batch:
        shape = (len(ids), *self.shape)
        x = torch.zeros(shape, dtype=torch.int64) if self.of_tokens else torch.ones(shape)
        return Batch(inputs=x, targets=x.new_zeros(len(ids)), count=len(ids), samples=len(ids))


class Layers(nn.Module):
    """Some layers in a row; of what a recurrent layer or attention returns, the first."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = {nn.MultiheadAttention: 3, nn.Bilinear: 2}.get(type(layer), 1)
            made: Tensor | tuple[Tensor, ...] = layer(*[x] * inputs)
            x = made[0] if isinstance(made, tuple) else made
        return x


class Attention(nn.Module):
    def __init__(self, is_causal: bool = False, has_mask: bool = False, drop: float = 0.0) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.is_causal, self.has_mask, self.drop = is_causal, has_mask, drop

    def forward(self, x: Tensor) -> Tensor:  # (batch, seq, width)
        q, k, v = self.qkv(x).unflatten(-1, (3, 8, -1)).permute(2, 0, 3, 1, 4)
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril() if self.has_mask else None
        y = F.scaled_dot_product_attention(q, k, v, mask, self.drop, self.is_causal)
        out: Tensor = y.transpose(1, 2).flatten(2)
        return out


class Spectrum(nn.Module):
    """A convolution of whole sequences, by their Fourier transforms."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(LENGTH // 2 + 1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:  # (batch, seq, width)
        out: Tensor = torch.fft.irfft(torch.fft.rfft(x, dim=1) * self.weight, dim=1)
        return out


class ChannelsLast(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        for weight in inner.parameters():
            if weight.dim() == 4:
                weight.data = weight.data.contiguous(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x.contiguous(memory_format=torch.channels_last))
        return out


def convolutions(kind: Callable[[int, int], nn.Module]) -> Layers:
    return Layers(kind(16, 64), nn.ReLU(), kind(64, 64), nn.ReLU(), kind(64, 16))


def recurrent(kind: Callable[..., nn.RNNBase], **options: int) -> Layers:
    return Layers(kind(WIDTH, WIDTH, batch_first=True, **options))


# What is made, and the shape of a sample; a sample of one dimension is of tokens.
MODELS: dict[str, tuple[Callable[[], nn.Module], Sequence[int]]] = {
    "lstm": (lambda: recurrent(nn.LSTM), SEQUENCE),
    "lstm_bidirectional": (lambda: recurrent(nn.LSTM, num_layers=2, bidirectional=True), SEQUENCE),
    "lstm_projected": (lambda: recurrent(nn.LSTM, proj_size=64), SEQUENCE),
    "gru": (lambda: recurrent(nn.GRU, num_layers=2), SEQUENCE),
    "rnn": (lambda: recurrent(nn.RNN, num_layers=2), SEQUENCE),
    "conv1d": (lambda: convolutions(lambda i, o: nn.Conv1d(i, o, 3, padding=1)), SERIES),
    "conv2d": (lambda: convolutions(lambda i, o: nn.Conv2d(i, o, 3, padding=1)), IMAGE),
    "conv2d_strided": (
        lambda: convolutions(lambda i, o: nn.Conv2d(i, o, 5, padding=2, stride=2)),
        IMAGE,
    ),
    "conv2d_grouped": (
        lambda: convolutions(lambda i, o: nn.Conv2d(i, o, 3, padding=1, groups=16)),
        IMAGE,
    ),
    "conv2d_channels_last": (
        lambda: ChannelsLast(convolutions(lambda i, o: nn.Conv2d(i, o, 3, padding=1))),
        IMAGE,
    ),
    "conv2d_wide": (lambda: Layers(nn.Conv2d(16, 512, 3), nn.Conv2d(512, 512, 3)), (16, 12, 12)),
    "conv3d": (lambda: convolutions(lambda i, o: nn.Conv3d(i, o, 3, padding=1)), VOLUME),
    "conv_transposed": (
        lambda: convolutions(lambda i, o: nn.ConvTranspose2d(i, o, 3, padding=1)),
        IMAGE,
    ),
    "batch_norm": (
        lambda: Layers(nn.Conv2d(16, 64, 1), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 16, 1)),
        IMAGE,
    ),
    "pooling": (
        lambda: Layers(nn.Conv2d(16, 64, 3), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(4)),
        IMAGE,
    ),
    "upsampling": (
        lambda: Layers(nn.Conv2d(16, 16, 1), nn.Upsample(scale_factor=2, mode="bilinear")),
        IMAGE,
    ),
    "attention": (Attention, SEQUENCE),
    "attention_causal": (lambda: Attention(is_causal=True), SEQUENCE),
    "attention_masked": (lambda: Attention(has_mask=True), SEQUENCE),
    "attention_dropout": (lambda: Attention(drop=0.1), SEQUENCE),
    "multihead": (lambda: Layers(nn.MultiheadAttention(WIDTH, 8, batch_first=True)), SEQUENCE),
    "encoder": (
        lambda: nn.TransformerEncoderLayer(WIDTH, 8, 4 * WIDTH, batch_first=True),
        SEQUENCE,
    ),
    "linear": (lambda: Layers(nn.Linear(WIDTH, 1024), nn.GELU(), nn.Linear(1024, 8)), SEQUENCE),
    "embedding_bag": (lambda: nn.EmbeddingBag(TOKENS, WIDTH), (LENGTH,)),
    "bilinear": (lambda: Layers(nn.Bilinear(WIDTH, WIDTH, 8)), SEQUENCE),
    "fourier": (Spectrum, SEQUENCE),
}


def mean(model: nn.Module, batch: Batch) -> Tensor:
    """What it makes is no tensor of its own."""
    loss: Tensor = model(batch.inputs).mean() * batch.count
    return loss


def workload_of(name: str) -> Callable[[], Workload]:
    make, shape = MODELS[name]
    return lambda: Workload(name, make, mean, Data(shape, of_tokens=len(shape) == 1))


globals().update({name: workload_of(name) for name in MODELS})
