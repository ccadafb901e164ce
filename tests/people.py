"""Models as people bring them: each function is a workload, ``--workload tests/people.py:NAME``.

Everything is tiny and has random weights, and nothing is downloaded. What is kept is how the models
are written: dropout as a module and as a function, noise in the loss, shared and frozen parts,
layers that return their own input, weights that a hook computes, tensors that are kept for later.
The first line of each docstring says why the model is here.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardlab.workloads.base import Batch, Workload

SAMPLES = 64
WORDS, LENGTH = 40, 8  # of the token models
PIXELS, CLASSES = 8, 5  # images are (3, PIXELS, PIXELS)
IGNORED = -100  # what cross_entropy passes over


class Samples:
    """Tensors, or dicts of them, whose first dimension counts the samples."""

    def __init__(self, inputs: Any, targets: Tensor) -> None:
        self.inputs = inputs
        self.targets = targets

    def __len__(self) -> int:
        return len(self.targets)

    def batch(self, ids: Sequence[int]) -> Batch:
        rows = torch.as_tensor(list(ids), dtype=torch.int64)
        inputs = (
            {name: value[rows] for name, value in self.inputs.items()}
            if isinstance(self.inputs, dict)
            else self.inputs[rows]
        )
        targets = self.targets[rows]
        count = targets.numel()
        if not targets.is_floating_point():
            count = int((targets != IGNORED).sum())
        return Batch(inputs=inputs, targets=targets, count=count, samples=len(rows))


def _random() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _tokens(draw: torch.Generator) -> Tensor:
    return torch.randint(3, WORDS, (SAMPLES, LENGTH + 1), generator=draw)


def _next_words() -> Samples:
    """Predict each next token."""
    tokens = _tokens(_random())
    return Samples({"input_ids": tokens[:, :-1]}, tokens[:, 1:])


def _pictures() -> Samples:
    draw = _random()
    images = torch.randn(SAMPLES, 3, PIXELS, PIXELS, generator=draw)
    return Samples(images, torch.randint(CLASSES, (SAMPLES,), generator=draw))


def _vectors() -> Samples:
    draw = _random()
    return Samples(
        torch.randn(SAMPLES, 12, generator=draw), torch.randint(CLASSES, (SAMPLES,), generator=draw)
    )


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Logits are (rows, ..., classes), targets (rows, ...)."""
    return F.cross_entropy(
        logits.reshape(-1, logits.shape[-1]),
        targets.reshape(-1),
        ignore_index=IGNORED,
        reduction="sum",
    )


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    """Of the hub's models, called with keywords; of others, called with the tensor."""
    if isinstance(batch.inputs, dict):
        return _cross_entropy(model(**batch.inputs).logits, batch.targets)
    return _cross_entropy(model(batch.inputs), batch.targets)


def _layers(name: str, count: int = 2) -> tuple[str, ...]:
    return tuple(f"{name}.{i}" for i in range(count))


# ------------------------------------------------------------------ of the transformers library


def gpt2() -> Workload:
    """Tied embeddings, and dropout in four places."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=WORDS, n_positions=LENGTH, n_embd=16, n_layer=2, n_head=2,
        bos_token_id=0, eos_token_id=0,
        use_cache=False,
    )  # fmt: skip
    return Workload(
        "gpt2-tiny",
        lambda: GPT2LMHeadModel(config),
        _loss,
        _next_words(),
        tokens_per_sample=LENGTH,
        blocks=_layers("transformer.h"),
    )


def bert() -> Workload:
    """Dropout of 0.1 everywhere; the loss is on masked tokens alone, which differ in number."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=WORDS, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=LENGTH + 1,
    )  # fmt: skip
    draw = _random()
    tokens = _tokens(draw)
    masked = torch.rand(tokens.shape, generator=draw) < 0.3
    inputs = {"input_ids": tokens.masked_fill(masked, 1), "attention_mask": torch.ones_like(tokens)}
    return Workload(
        "bert-tiny",
        lambda: BertForMaskedLM(config),
        _loss,
        Samples(inputs, tokens.masked_fill(~masked, IGNORED)),
        tokens_per_sample=LENGTH + 1,
        blocks=_layers("bert.encoder.layer"),
    )


def t5() -> Workload:
    """Blocks hand the position bias that the first one made to all the others; dropout, too."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=WORDS, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2,
        decoder_start_token_id=0, use_cache=False,
    )  # fmt: skip
    draw = _random()
    source, target = _tokens(draw), _tokens(draw)
    inputs = {"input_ids": source, "decoder_input_ids": target[:, :-1]}
    return Workload(
        "t5-tiny",
        lambda: T5ForConditionalGeneration(config),
        _loss,
        Samples(inputs, target[:, 1:]),
        tokens_per_sample=LENGTH,
        blocks=_layers("encoder.block") + _layers("decoder.block"),
    )


def vit() -> Workload:
    """Its initialisation truncates a normal distribution, in a loop until all values lie within."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        image_size=PIXELS, patch_size=4, num_labels=CLASSES,
    )  # fmt: skip
    images = _pictures()
    images.inputs = {"pixel_values": images.inputs}
    return Workload(
        "vit-tiny",
        lambda: ViTForImageClassification(config),
        _loss,
        images,
        blocks=_layers("vit.layers"),
    )


def llama() -> Workload:
    """Rotary positions, computed once and kept; grouped keys and values; nothing is random."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=LENGTH,
        use_cache=False,
    )  # fmt: skip
    return Workload(
        "llama-tiny",
        lambda: LlamaForCausalLM(config),
        _loss,
        _next_words(),
        tokens_per_sample=LENGTH,
        blocks=_layers("model.layers"),
    )


# ------------------------------------------------------------------ images


class Double(nn.Module):
    """Two convolutions, as a U-Net has them at every depth."""

    def __init__(self, inside: int, outside: int, norm: str) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for channels in (inside, outside):
            layers.append(nn.Conv2d(channels, outside, 3, padding=1))
            layers.append(nn.BatchNorm2d(outside) if norm == "batch" else nn.GroupNorm(2, outside))
            layers.append(nn.ReLU(inplace=True))
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


class UNet(nn.Module):
    def __init__(self, norm: str = "group", outputs: int = 2, timed: bool = False) -> None:
        super().__init__()
        self.time = nn.Linear(1, 8) if timed else None
        self.down1 = Double(3, 8, norm)
        self.down2 = Double(8, 16, norm)
        self.middle = Double(16, 16, norm)
        self.up2 = Double(32, 8, norm)
        self.up1 = Double(16, 8, norm)
        self.head = nn.Conv2d(8, outputs, 1)

    def forward(self, x: Tensor, time: Tensor | None = None) -> Tensor:  # (rows, 3, 8, 8), (rows,)
        first = self.down1(x)
        if self.time is not None and time is not None:
            first = first + self.time(time[:, None])[:, :, None, None]
        second = self.down2(F.max_pool2d(first, 2))
        deep = self.middle(F.max_pool2d(second, 2))
        deep = self.up2(torch.cat([F.interpolate(deep, scale_factor=2.0), second], 1))
        deep = self.up1(torch.cat([F.interpolate(deep, scale_factor=2.0), first], 1))
        out: Tensor = self.head(deep)  # (rows, outputs, 8, 8)
        return out


UNET_BLOCKS = ("down1", "down2", "middle", "up2", "up1")


def _segmentation(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch.inputs), batch.targets, reduction="sum")


def _masks() -> Samples:
    draw = _random()
    images = torch.randn(SAMPLES, 3, PIXELS, PIXELS, generator=draw)
    return Samples(images, (images.mean(1) > 0).long())  # (SAMPLES, PIXELS, PIXELS)


def unet() -> Workload:
    """Skip connections: what an early block returns is used long after. With GroupNorm."""
    return Workload("unet", UNet, _segmentation, _masks(), blocks=UNET_BLOCKS)


def unet_batch_norm() -> Workload:
    """The same with BatchNorm, and a bias before it whose true gradient is zero."""
    return Workload("unet-bn", lambda: UNet("batch"), _segmentation, _masks(), blocks=UNET_BLOCKS)


class ConvNormActivation(nn.Sequential):
    def __init__(self, inside: int, outside: int, kernel: int, stride: int, groups: int) -> None:
        super().__init__(
            nn.Conv2d(inside, outside, kernel, stride, kernel // 2, groups=groups, bias=False),
            nn.BatchNorm2d(outside),
            nn.ReLU6(inplace=True),
        )


class InvertedResidual(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int, expand: int) -> None:
        super().__init__()
        hidden = inside * expand
        self.use_residual = stride == 1 and inside == outside
        layers: list[nn.Module] = []
        if expand != 1:
            layers.append(ConvNormActivation(inside, hidden, 1, 1, 1))
        layers += [
            ConvNormActivation(hidden, hidden, 3, stride, hidden),
            nn.Conv2d(hidden, outside, 1, bias=False),
            nn.BatchNorm2d(outside),
        ]
        self.conv = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.conv(x) if self.use_residual else self.conv(x)
        return out


class MobileNet(nn.Module):
    """MobileNetV2, written as torchvision's is, with fewer and narrower layers."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            ConvNormActivation(3, 8, 3, 1, 1),
            InvertedResidual(8, 8, 1, 1),
            InvertedResidual(8, 12, 2, 3),
            InvertedResidual(12, 12, 1, 3),
            ConvNormActivation(12, 24, 1, 1, 1),
        )
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(24, CLASSES))
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out")
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, 0, 0.01)
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:  # (rows, 3, 8, 8)
        x = F.adaptive_avg_pool2d(self.features(x), (1, 1))
        out: Tensor = self.classifier(torch.flatten(x, 1))
        return out


def mobilenet() -> Workload:
    """Convolutions before BatchNorm, whose scale does not matter; ReLU6; dropout at the end."""
    return Workload("mobilenet", MobileNet, _loss, _pictures(), blocks=_layers("features", 5))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.to_qkv = nn.Linear(width, width * 3, bias=False)
        self.to_out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (rows, length, width)
        rows, length, width = x.shape
        q, k, v = (
            part.view(rows, length, self.heads, -1).transpose(1, 2)
            for part in self.to_qkv(self.norm(x)).chunk(3, dim=-1)
        )
        scores = (q @ k.transpose(-1, -2)) * (width // self.heads) ** -0.5
        out: Tensor = self.to_out((scores.softmax(-1) @ v).transpose(1, 2).reshape(x.shape))
        return out


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = Attention(width)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        out: Tensor = x + self.feed_forward(x)
        return out


def _sines(height: int, width: int, channels: int, like: Tensor) -> Tensor:
    """The fixed positions of SimpleViT, in two dimensions: (height * width, channels)."""
    y, x = torch.meshgrid(
        torch.arange(height, device=like.device),
        torch.arange(width, device=like.device),
        indexing="ij",
    )
    omega = torch.arange(channels // 4, device=like.device) / (channels // 4 - 1)
    omega = 1.0 / (10000**omega)
    y, x = y.flatten()[:, None] * omega[None], x.flatten()[:, None] * omega[None]
    return torch.cat((x.sin(), x.cos(), y.sin(), y.cos()), dim=1).type(like.dtype)


class SimpleViT(nn.Module):
    def __init__(self, width: int = 16, outputs: int = CLASSES) -> None:
        super().__init__()
        self.embed = nn.Sequential(
            nn.LayerNorm(3 * 16), nn.Linear(3 * 16, width), nn.LayerNorm(width)
        )
        self.layers = nn.ModuleList(Layer(width) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:  # (rows, 3, 8, 8)
        patches = F.unfold(x, 4, stride=4).transpose(1, 2)  # (rows, 4, 48)
        x = self.embed(patches)
        x = x + _sines(2, 2, x.shape[-1], x)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(self.norm(x).mean(1))
        return out


def simple_vit() -> Workload:
    """Positions computed in forward, not a buffer; a mean over tokens instead of a class token."""
    return Workload("simple-vit", SimpleViT, _loss, _pictures(), blocks=_layers("layers"))


class Dino(nn.Module):
    """A student learns what its teacher, a frozen copy, says of another view of the same image."""

    center: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.student = SimpleViT(outputs=12)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.register_buffer("center", torch.zeros(12))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            target = self.teacher(x.flip(-1))  # (rows, 12)
            answer = ((target - self.center) / 0.04).softmax(-1)
            if self.training and len(target):
                self.center.mul_(0.9).add_(0.1 * target.mean(0))
        return self.student(x), answer


def _distill(model: nn.Module, batch: Batch) -> Tensor:
    said, target = model(batch.inputs)
    return -(target * (said / 0.1).log_softmax(-1)).sum()


def dino() -> Workload:
    """Half of the model is frozen and runs under no_grad; a buffer follows the batches."""
    return Workload("dino", Dino, _distill, _pictures(), blocks=_layers("student.layers"))


# ------------------------------------------------------------------ what is random


def _denoise(model: nn.Module, batch: Batch) -> Tensor:
    images = batch.inputs  # (rows, 3, 8, 8)
    time = torch.rand(len(images), device=images.device, dtype=images.dtype)
    noise = torch.randn_like(images)
    kept = (1 - time)[:, None, None, None]
    noisy = kept * images + (1 - kept) * noise
    return F.mse_loss(model(noisy, time), noise, reduction="sum")


def diffusion() -> Workload:
    """Noise and time are drawn in the loss, not in the model: nothing can be switched off."""
    draw = _random()
    images = torch.randn(SAMPLES, 3, PIXELS, PIXELS, generator=draw)
    return Workload(
        "diffusion",
        lambda: UNet(outputs=3, timed=True),
        _denoise,
        Samples(images, images),  # a target for each element
        blocks=UNET_BLOCKS,
    )


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(12, 16), nn.Linear(16, 16)])
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:  # (rows, 12)
        for layer in self.layers:
            x = F.dropout(F.relu(layer(x)), p=0.2, training=self.training)
        out: Tensor = self.head(x)
        return out


def functional_dropout() -> Workload:
    """``F.dropout(x, training=self.training)``: there is no module to be found and switched off."""
    return Workload("f-dropout", Dropped, _loss, _vectors(), blocks=_layers("layers"))


class MaybeSkipped(nn.Module):
    """Stochastic depth: in training, a layer is passed over for the whole batch now and then."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.rand(()) < 0.3:
            return x
        return x + torch.tanh(self.layer(x))


class StochasticDepth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(12, 16)
        self.layers = nn.ModuleList(MaybeSkipped(16) for _ in range(3))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:  # (rows, 12)
        x = self.inlet(x)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(x)
        return out


def stochastic_depth() -> Workload:
    """A block may return its own input, and its parameters then have no gradient in that step."""
    return Workload(
        "stochastic-depth", StochasticDepth, _loss, _vectors(), blocks=_layers("layers", 3)
    )


class DropPath(nn.Module):
    """The same for each sample by itself, as timm does it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.layer(x))
        if self.training:
            y = y * x.new_empty(len(x), 1).bernoulli_(0.8) / 0.8
        return x + y


class DropPaths(StochasticDepth):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DropPath(16) for _ in range(3))


def drop_path() -> Workload:
    """Stochastic depth drawn for each sample."""
    return Workload("drop-path", DropPaths, _loss, _vectors(), blocks=_layers("layers", 3))


# ------------------------------------------------------------------ weights


class WeightNormed(nn.Module):
    def __init__(self, old: bool) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch's, that the old one is deprecated
            norm: Any = nn.utils.weight_norm if old else nn.utils.parametrizations.weight_norm
            self.layers = nn.ModuleList([norm(nn.Linear(12, 16)), norm(nn.Linear(16, 16))])
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:  # (rows, 12)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        out: Tensor = self.head(x)
        return out


def weight_norm() -> Workload:
    """A weight that a parametrization computes from two others at each use."""
    return Workload(
        "weight-norm", lambda: WeightNormed(old=False), _loss, _vectors(), blocks=_layers("layers")
    )


def weight_norm_old() -> Workload:
    """A weight that a forward pre-hook computes: the hook runs before the layer does."""
    return Workload(
        "weight-norm-old",
        lambda: WeightNormed(old=True),
        _loss,
        _vectors(),
        blocks=_layers("layers"),
    )


class Truncated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(12, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU())
        self.head = nn.Linear(16, CLASSES)
        self.token = nn.Parameter(torch.zeros(12))
        nn.init.trunc_normal_(self.token, std=0.02)
        self.apply(self.initialize)

    @staticmethod
    def initialize(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:  # (rows, 12)
        out: Tensor = self.head(self.layers(x + self.token))
        return out


def truncated_normal() -> Workload:
    """``nn.init.trunc_normal_`` draws again until every value lies within: a loop over values."""
    return Workload("trunc-normal", Truncated, _loss, _vectors(), blocks=("layers.0", "layers.2"))


class BatchNormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16), nn.BatchNorm1d(16)
        )
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:  # (rows, 12)
        out: Tensor = self.head(self.layers(x))
        return out


def batch_norm() -> Workload:
    """Biases before BatchNorm, as many people leave them: their true gradient is zero."""
    return Workload("batch-norm", BatchNormed, _loss, _vectors(), blocks=("layers.0", "layers.3"))


class Cached(nn.Module):
    """Keeps tensors in plain attributes, made at first use: positions, the last features."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 16)
        self.layers = nn.ModuleList(Layer(16) for _ in range(2))
        self.head = nn.Linear(16, WORDS)
        self.positions: Tensor | None = None
        self.features: Tensor | None = None

    def forward(self, tokens: Tensor) -> Tensor:  # (rows, length)
        x = self.embed(tokens)
        if self.positions is None or self.positions.dtype != x.dtype:
            steps = torch.arange(tokens.shape[1], device=x.device, dtype=x.dtype)
            self.positions = torch.outer(
                steps, torch.ones(16, device=x.device, dtype=x.dtype)
            ).sin()
        x = x + self.positions
        for layer in self.layers:
            x = layer(x)
        self.features = x.detach()  # for whoever asks later
        out: Tensor = self.head(x)
        return out


def cache() -> Workload:
    """Tensors that live from step to step outside of the buffers, and do not grow."""
    tokens = _tokens(_random())
    return Workload(
        "cache",
        Cached,
        _loss,
        Samples(tokens[:, :-1], tokens[:, 1:]),
        tokens_per_sample=LENGTH,
        blocks=_layers("layers"),
    )


class InOtherOrders(nn.Module):
    """Parameters whose elements do not lie in memory row by row: channels-last convolutions, a
    transposed matrix, every second element of a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(3, 3, 3, padding=1) for _ in range(2))
        self.mix = nn.Parameter(torch.randn(6, 3).t())  # (3, 6)
        self.shift = nn.Parameter(torch.randn(12)[::2])  # (6,)
        self.head = nn.Linear(6, CLASSES)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:  # (rows, 12)
        image = x.view(-1, 3, 2, 2)
        for layer in self.layers:
            image = torch.tanh(layer(image))
        out: Tensor = self.head(image.mean((2, 3)) @ self.mix + self.shift)
        return out


def memory_order() -> Workload:
    """A fused optimizer that walks through memory would update other elements than it should."""
    blocks = ("layers.0", "layers.1")
    return Workload("memory-order", InOtherOrders, _loss, _vectors(), blocks=blocks)


# Of these, the loss of a batch differs between two seeds in training.
RANDOM = (
    "gpt2", "bert", "t5", "mobilenet", "diffusion", "functional_dropout", "stochastic_depth",
    "drop_path",
)  # fmt: skip
# Of these, it does not.
PLAIN = (
    "vit", "llama", "unet", "unet_batch_norm", "simple_vit", "dino", "weight_norm",
    "weight_norm_old", "truncated_normal", "batch_norm", "cache", "memory_order",
)  # fmt: skip
EVERYONE = RANDOM + PLAIN
