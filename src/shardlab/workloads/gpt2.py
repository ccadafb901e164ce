"""GPT-2 on token shards: the published sizes, and three small ones for a CPU."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardlab.config import DataConfig
from shardlab.data import sources
from shardlab.data.tokens import TokenDataset
from shardlab.errors import UsageError, unknown
from shardlab.workloads.base import Batch, Workload


@dataclass(frozen=True)
class Shape:
    layers: int
    heads: int
    dim: int
    context: int = 1024
    vocab: int = 50257


SIZES = {
    # For a CPU: a byte is a token.
    "tiny": Shape(layers=2, heads=2, dim=64, context=64, vocab=256),  # 0.12 M parameters
    "mini": Shape(layers=4, heads=4, dim=256, context=128, vocab=256),  # 3.3 M
    "midi": Shape(layers=6, heads=6, dim=384, context=256, vocab=256),  # 10.8 M
    # As published.
    "small": Shape(layers=12, heads=12, dim=768),  # 124,439,808
    "medium": Shape(layers=24, heads=16, dim=1024),  # 354,823,168
    "large": Shape(layers=36, heads=20, dim=1280),  # 774,030,080
    "xl": Shape(layers=48, heads=25, dim=1600),  # 1,557,611,200
}


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.dim, 3 * shape.dim)
        self.proj = nn.Linear(shape.dim, shape.dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, dim = x.shape
        qkv = self.qkv(x).view(batch, seq, 3, self.heads, dim // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (batch, heads, seq, dim / heads)
        # The fused kernel: the (seq, seq) scores are never materialised.
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.proj(y.transpose(1, 2).reshape(batch, seq, dim))
        return out


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(shape.dim)
        self.attention = Attention(shape)
        self.ln_2 = nn.LayerNorm(shape.dim)
        self.up = nn.Linear(shape.dim, 4 * shape.dim)
        self.down = nn.Linear(4 * shape.dim, shape.dim)

    def forward(self, x: Tensor) -> Tensor:  # (batch, seq, dim)
        x = x + self.attention(self.ln_1(x))
        out: Tensor = x + self.down(F.gelu(self.up(self.ln_2(x)), approximate="tanh"))
        return out


class GPT2(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.wte = nn.Embedding(shape.vocab, shape.dim)
        self.wpe = nn.Embedding(shape.context, shape.dim)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.ln_f = nn.LayerNorm(shape.dim)
        self.head = nn.Linear(shape.dim, shape.vocab, bias=False)
        self.head.weight = self.wte.weight  # tied: one parameter, two gradients that add up
        self.apply(self._init)
        # Each block adds to the residual stream twice: keep its variance from growing with depth.
        for name, parameter in self.named_parameters():
            if name.endswith(("proj.weight", "down.weight")):
                nn.init.normal_(parameter, std=0.02 / (2 * shape.layers) ** 0.5)

    @staticmethod
    def _init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:  # (batch, seq)
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.wte(tokens) + self.wpe(positions)  # (batch, seq, dim)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.ln_f(x))  # (batch, seq, vocab)
        return logits


def next_token_loss(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch.inputs)
    return F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="sum")


def gpt2(
    data: DataConfig,
    *,
    size: str = "mini",
    layers: int | None = None,
    heads: int | None = None,
    dim: int | None = None,
    context: int | None = None,
    vocab: int | None = None,
) -> Workload:
    """GPT-2, next-token loss on token shards; sizes tiny, mini, midi, small, medium, large, xl."""
    if size not in SIZES:
        raise unknown("gpt2 size", size, SIZES)
    given = {"layers": layers, "heads": heads, "dim": dim, "context": context, "vocab": vocab}
    shape = replace(SIZES[size], **{k: v for k, v in given.items() if v is not None})
    _check(shape)
    seq_len = data.seq_len or shape.context
    if seq_len > shape.context:
        raise UsageError(
            f"data.seq_len {seq_len} is longer than the model's context {shape.context}"
        )
    stdlib = data.source in (sources.AUTO, sources.STDLIB)
    shards = [sources.stdlib_shard()] if stdlib else sources.find_shards(data.source)
    return Workload(
        name=f"gpt2-{size}",
        make_model=lambda: GPT2(shape),
        loss=next_token_loss,
        dataset=TokenDataset(shards, seq_len, shape.vocab),
        tokens_per_sample=seq_len,
        blocks=tuple(f"blocks.{i}" for i in range(shape.layers)),
    )


def _check(shape: Shape) -> None:
    for f in fields(shape):
        value = getattr(shape, f.name)
        if type(value) is not int or value < 1:
            raise UsageError(f"gpt2's {f.name} must be a whole number of at least 1, got {value!r}")
    if shape.dim % shape.heads:
        raise UsageError(f"gpt2's dim {shape.dim} cannot be divided over {shape.heads} heads")
