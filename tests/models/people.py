"""Models as people bring them: each function is a workload
(``--workload tests/models/people.py:NAME``).

Everything is tiny and has random weights, and nothing is downloaded. What is kept is how the models
are written: dropout as a module and as a function, noise in the loss, shared and frozen parts,
layers that return their own input, weights that a hook computes, tensors that are kept for later.
The first line of each docstring says why the model is here.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zoo
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

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for channels in (inside, outside):
            layers.append(nn.Conv2d(channels, outside, 3, padding=1))
            layers.append(nn.GroupNorm(2, outside))
            layers.append(nn.ReLU(inplace=True))
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


class UNet(nn.Module):
    def __init__(self, outputs: int = 2, timed: bool = False) -> None:
        super().__init__()
        self.time = nn.Linear(1, 8) if timed else None
        self.down1 = Double(3, 8)
        self.down2 = Double(8, 16)
        self.middle = Double(16, 16)
        self.up2 = Double(32, 8)
        self.up1 = Double(16, 8)
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


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.layer(x))


class MaybeSkipped(Residual):
    """Stochastic depth: in training, a layer is passed over for the whole batch now and then."""

    def forward(self, x: Tensor) -> Tensor:
        return x if self.training and torch.rand(()) < 0.3 else super().forward(x)


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


class LayerDropped(StochasticDepth):
    """As fairseq and OPT do it: what is skipped is not called at all."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Residual(16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:  # (rows, 12)
        x = self.inlet(x)
        for layer in self.layers:
            if not self.training or torch.rand(()) >= 0.6:
                x = layer(x)
        out: Tensor = self.head(x)
        return out


def layer_drop() -> Workload:
    """A block that is skipped on all ranks is not gathered either."""
    return Workload("layer-drop", LayerDropped, _loss, _vectors(), blocks=_layers("layers", 4))


# ------------------------------------------------------------------ weights


class Relative(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:  # (rows, width), (keys, width)
        weights = (self.query(x) @ self.key(positions).t()).softmax(-1)  # (rows, keys)
        return x + weights @ positions


class WithRelative(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inlet, self.head = nn.Linear(12, 16), nn.Linear(16, CLASSES)
        self.positions = nn.Embedding(20, 16)
        self.layers = nn.ModuleList(Relative(16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:  # (rows, 12)
        x = self.inlet(x)
        for layer in self.layers:
            x = layer(x, self.positions.weight)
        out: Tensor = self.head(x)
        return out


def relative() -> Workload:
    """DeBERTa's relative embeddings: every block is given the same parameter of the root's."""
    return Workload("relative", WithRelative, _loss, _vectors(), blocks=_layers("layers", 3))


class WeightNormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        norm: Any = nn.utils.parametrizations.weight_norm
        self.layers = nn.ModuleList([norm(nn.Linear(12, 16)), norm(nn.Linear(16, 16))])
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:  # (rows, 12)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        out: Tensor = self.head(x)
        return out


def weight_norm() -> Workload:
    """A weight that a parametrization computes from two others at each use."""
    return Workload("weight-norm", WeightNormed, _loss, _vectors(), blocks=_layers("layers"))


class Cached(nn.Module):
    """Keeps tensors in plain attributes, made at first use: positions, the last features."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 16)
        self.layers = nn.ModuleList(Residual(16) for _ in range(2))
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


# ------------------------------------------------------------------ some of the zoo, as workloads


def _of_the_zoo(name: str) -> Workload:
    animal, draw = zoo.ZOO[name], _random()
    rows = torch.randn(SAMPLES, zoo.W, generator=draw)
    data = Samples(rows, torch.randint(zoo.CLASSES, (SAMPLES,), generator=draw))
    return Workload(name, animal.make, animal.loss, data, blocks=animal.blocks)


weight_norm_old = functools.partial(_of_the_zoo, "weight_norm_old")
# Biases before BatchNorm: their true gradient is zero.
batch_norm = functools.partial(_of_the_zoo, "batch_norm")
# Half of the model is frozen and runs under no_grad; a buffer follows the batches.
dino = functools.partial(_of_the_zoo, "dino")
# A fused optimizer that walks through memory would update other elements than it should.
memory_order = functools.partial(_of_the_zoo, "non_contiguous")

# Of these, the loss of a batch differs between two seeds in training.
RANDOM = (
    "gpt2", "bert", "t5", "diffusion", "functional_dropout", "stochastic_depth", "layer_drop",
)  # fmt: skip
# Of these, what is skipped by chance has no gradient.
SKIPPING = ("stochastic_depth", "layer_drop")
# Of these, the loss does not differ.
PLAIN = (
    "vit", "llama", "unet", "dino", "weight_norm", "weight_norm_old", "batch_norm", "cache",
    "memory_order", "relative",
)  # fmt: skip
EVERYONE = RANDOM + PLAIN
