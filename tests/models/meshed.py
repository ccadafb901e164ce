"""Models that ranks split between them, what one process makes of them, and what ranks do."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from conformance import STEPS, Trajectory, make_optimizer, one_process
from shardlab import axes
from shardlab.ledger import LEDGER
from shardlab.strategies.base import Setup
from shardlab.strategies.cut_model import CutModel
from shardlab.strategies.data_parallel.bucket_ddp_async import BucketDDPAsync
from shardlab.strategies.data_parallel.single import Single
from shardlab.training.builders import cuts_of
from shardlab.workloads import gpt2
from shardlab.workloads.architectures import LLAMA_LIKE, known_splits
from shardlab.workloads.base import Batch
from shardlab.workloads.causal_lm import answer_loss
from shardlab.workloads.token_loss import token_loss
from shardlab.world import World

VOCAB = 23


@dataclass(frozen=True)
class Subject:
    make: Callable[[], nn.Module]
    batch: Callable[[int, int, int], Batch]  # of a step, a share of the data, a micro-batch
    loss: Callable[[nn.Module, Batch], Tensor]
    splits: dict[str, str] | None  # None: as they are known from the model


# ------------------------------------------------------------------ models


class Block(nn.Module):
    """Grouped queries in one fused layer, a gate, and layers with and without a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.attention = Attention()
        self.up = nn.Linear(8, 13, bias=False)  # a prime
        self.down = nn.Linear(13, 8)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.seen += 1
        x = x + self.attention(self.norm_1(x))
        return x + self.down(torch.tanh(self.up(self.norm_2(x))))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads, self.kv_heads = 8, 4
        self.qkv = nn.Linear(8, 4 * (8 + 4 + 4))
        self.scale = nn.LayerNorm(4)  # of each head
        self.out = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        sizes = [4 * self.heads, 4 * self.kv_heads, 4 * self.kv_heads]
        parts = self.qkv(x).split(sizes, -1)
        q, k, v = (p.unflatten(-1, (p.shape[-1] // 4, 4)).transpose(1, 2) for p in parts)
        q, k = self.scale(q), self.scale(k)  # else the keys' bias would change nothing
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Nasty(nn.Module):
    """A tied head and an odd vocabulary; a frozen layer, one that nobody uses, one on some data;
    a count in each block."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 8, padding_idx=3)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.sometimes, self.never = nn.Linear(8, 5), nn.Linear(5, 8)
        self.scale = nn.Parameter(torch.rand(()))
        self.head = nn.Linear(8, VOCAB, bias=True)
        self.head.weight = self.embed.weight
        self.blocks[1].attention.out.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        if tokens.sum() % 2:
            x = x + torch.tanh(self.sometimes(x)).sum() * self.scale
        out: Tensor = self.head(x * self.scale)
        return out


class Dropping(Nasty):
    """Dropout in the residual stream, and between columns and rows."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.up = nn.Sequential(nn.Linear(8, 12), nn.Dropout(0.3))
            block.down = nn.Sequential(nn.Linear(12, 8), nn.Dropout(0.3))


class Tied(nn.Module):
    """A tied and a frozen embedding, parameters that nobody or only some data uses, statistics in
    each block, and a sum before the head of what came first."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.places = nn.Embedding(6, 6).requires_grad_(False)
        self.blocks = nn.ModuleList(
            Branch(6 + 2 * (i % 2), 6 + 2 * ((i + 1) % 2)) for i in range(8)
        )
        self.never = nn.Linear(6, 3)
        self.sometimes = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:  # (rows, 6), read as tokens
        tokens = (x.abs() * 10).long() % 11
        stream = self.embed(tokens) + self.places.weight  # (rows, 6, 6)
        if len(x) and x[0, 0] > 0:
            stream = stream + self.sometimes(stream)
        y = stream
        for block in self.blocks:
            y = block(y)
        out: Tensor = self.head(y + stream).mean(1)  # past all blocks: each stage makes it again
        return out


class Branch(nn.Module):
    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.main, self.extra = nn.Linear(inside, outside), nn.Linear(inside, outside)
        self.frozen = nn.Linear(inside, outside).requires_grad_(False)
        self.norm = nn.BatchNorm1d(outside)
        self.register_buffer("drift", torch.zeros(outside))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.tanh(self.main(x)) + 0.1 * self.frozen(x) + self.drift
        if len(x) > 1:
            out = out + self.norm(out.mean(1))[:, None]
        if len(x):
            with torch.no_grad():
                self.drift.mul_(0.9).add_(0.1 * out.mean((0, 1)))
        return out + self.extra(x) if len(x) and x.mean() > 0 else out


NASTY = {
    "embed": "vocabulary",
    "blocks.*": "block",
    "blocks.*.norm_*": "norm",
    "blocks.*.attention": "branch",
    "blocks.*.attention.qkv": "heads 8 4 4",
    "blocks.*.attention.heads": "number",
    "blocks.*.attention.kv_heads": "number",
    "blocks.*.attention.scale": "inside",
    "blocks.*.attention.out": "rows",
    "blocks.*.up": "columns",
    "blocks.*.down": "rows",
    "sometimes": "whole",
    "never": "whole",
    "scale": "whole",
    "head": "vocabulary",
}


def tokens(step: int, share: int, micro: int, length: int = 6) -> Batch:
    """Ragged in rows and in the labels that count; a share may have nothing."""
    generator = torch.Generator().manual_seed(10_000 * step + 100 * share + micro)
    rows = 0 if share and (step + micro) % 3 == 2 else 1 + (step + share + micro) % 3
    x = torch.randint(0, VOCAB, (rows, length), generator=generator)
    y = torch.randint(0, VOCAB, (rows, length), generator=generator)
    y[torch.rand(rows, length, generator=generator) < 0.3] = -100
    return Batch(x, y, int((y != -100).sum()), rows)


def reviews(step: int, share: int, micro: int) -> Batch:
    """As causal_lm's: masked, and never without rows."""
    batch = tokens(step, share, micro)
    x, y = batch.inputs, batch.targets
    if not len(x):
        x, y = torch.zeros(1, 6, dtype=torch.long), torch.full((1, 6), -100)
    mask = torch.ones_like(x)
    mask[0, 4:] = 0
    y = torch.where(mask == 1, y, -100)
    count = int((y != -100).sum())
    return Batch({"input_ids": x, "attention_mask": mask}, y, count, len(x))


def nasty_loss(model: nn.Module, batch: Batch) -> Tensor:
    return token_loss(lambda: model(batch.inputs), batch.targets)


def gathered_loss(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch.inputs).flatten(0, 1)
    return F.cross_entropy(logits, batch.targets.flatten(), reduction="sum")


SHAPE = gpt2.Shape(layers=2, heads=4, dim=16, context=8, vocab=VOCAB)


def theirs(kind: str, **options: Any) -> nn.Module:
    """A small causal model of transformers."""
    import transformers

    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2,
             "num_attention_heads": 4, "bos_token_id": None, "eos_token_id": None,
             "pad_token_id": None}  # fmt: skip
    if kind != "gpt2":
        sizes |= {"num_key_value_heads": 4, "intermediate_size": 24, "head_dim": 4}
    else:
        options = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, **options}
    config = transformers.AutoConfig.for_model(kind, **{**sizes, **options})
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.config.use_cache = False
    return model


SUBJECTS = {
    "gpt2": Subject(
        functools.partial(gpt2.GPT2, SHAPE), tokens, gpt2.next_token_loss, gpt2.splits_of(SHAPE)
    ),
    "nasty": Subject(Nasty, tokens, nasty_loss, NASTY),
    "gathered": Subject(Nasty, tokens, gathered_loss, NASTY),
    "odd length": Subject(
        Nasty, functools.partial(tokens, length=7), nasty_loss, NASTY
    ),
    "llama": Subject(
        functools.partial(theirs, "llama", tie_word_embeddings=True, attention_bias=True), reviews,
        answer_loss, None,
    ),
    "their gpt2": Subject(functools.partial(theirs, "gpt2"), reviews, answer_loss, None),
}  # fmt: skip


ARCHITECTURES = [kind for kind in LLAMA_LIKE if kind != "llama"]
SUBJECTS |= {
    kind: Subject(
        functools.partial(theirs, kind, num_key_value_heads=2), reviews, answer_loss, None
    )
    for kind in ARCHITECTURES
}


class Scaled(nn.Linear):
    """A layer whose forward is its own."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def built(subject: Subject, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = subject.make().double()
    with torch.no_grad():  # biases and norms that are no zeros and ones
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model


# ------------------------------------------------------------------ one process, and ranks


def plain(name: str, shares: int, micro: int) -> Trajectory:
    """One process that sees every share's micro-batches."""
    subject = SUBJECTS[name]

    def by_share(step: int) -> list[list[Batch]]:
        return [[subject.batch(step, s, m) for m in range(micro)] for s in range(shares)]

    return one_process(built(subject, 0), make_optimizer("adamw"), subject.loss, by_share)


def strategy_of(
    world: World, name: str, options: dict[str, Any], inner: Any = None, seed: int | None = None
) -> tuple[CutModel, Subject, axes.Axes]:
    subject = SUBJECTS[name]
    model = built(subject, world.rank if seed is None else seed)
    found, _ = axes.axes_of("tensor_parallel", options, world.size)
    assert found is not None
    splits = known_splits(model) if subject.splits is None else subject.splits
    sample = subject.batch(0, 0, 0)
    setup = Setup(
        model, make_optimizer("adamw"), subject.loss, world.mesh, sample=sample, splits=splits
    )
    inner = inner or (Single if found.data == 1 else BucketDDPAsync)
    return CutModel(setup, found, inner, cuts_of("tensor_parallel", found)), subject, found


def meshed(world: World, name: str, options: dict[str, Any], micro: int = 2) -> Trajectory:
    """On a rank: the same, by ranks that split the model."""
    strategy, subject, found = strategy_of(world, name, options)
    share, _ = found.data_share(world.rank)
    result = Trajectory()
    for step in range(STEPS):
        batches = [subject.batch(step, share, m) for m in range(micro)]
        LEDGER.reset()
        result.take_step(strategy, batches)
    return result
