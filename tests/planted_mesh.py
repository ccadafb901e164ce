"""Models that every axis can cut, as workloads, and bugs of ranks that cut them, each planted on
every rank for the time of a proof."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import meshed
from shardlab.workloads import gpt2
from shardlab.workloads.base import Batch, Workload

VOCAB, BLOCKS, PADDING = meshed.VOCAB, 4, 3


class Texts:
    """Rows of tokens of 5 to 7 tokens, padded at their end; not all targets count."""

    def __len__(self) -> int:
        return 64

    def batch(self, ids: Sequence[int]) -> Batch:
        lengths = [5 + i % 3 for i in ids]
        x, y = torch.full((2, len(ids), max(lengths, default=5)), -100)
        for row, (i, length) in enumerate(zip(ids, lengths, strict=True)):
            draw = torch.Generator().manual_seed(100 + i)
            x[row, :length], y[row, :length] = torch.randint(VOCAB, (2, length), generator=draw)
        y[y % 5 == 0] = -100
        x[x == -100] = PADDING
        return Batch(x, y, int((y != -100).sum()), len(ids))


class Even(Texts):
    """All of one length."""

    def batch(self, ids: Sequence[int]) -> Batch:
        return super().batch([3 * i for i in ids])


class Nasty(meshed.Nasty):
    """Tied, frozen, unused and sometimes used parameters, an odd vocabulary, uneven stages."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(meshed.Block() for _ in range(BLOCKS))
        self.blocks[1].attention.out.requires_grad_(False)
        with torch.no_grad():  # biases and norms that are no zeros and ones
            for p in self.parameters():
                p.add_(0.1 * torch.randn_like(p))


NAMES = tuple(f"blocks.{i}" for i in range(BLOCKS))


def nasty(loss: Callable[[nn.Module, Batch], Tensor] = meshed.nasty_loss) -> Workload:
    return Workload(
        "nasty", Nasty, loss, Texts(), blocks=NAMES, splits=meshed.NASTY, couples_samples=True
    )


gathered = functools.partial(nasty, meshed.gathered_loss)

SHAPE = gpt2.Shape(layers=BLOCKS, heads=4, dim=16, context=16, vocab=VOCAB)


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    return gpt2.next_token_loss(model, batch)


def _take(batch: Batch, positions: Tensor) -> Batch:
    return take(batch, positions)  # by its name, which a bug may stand for


def take(batch: Batch, positions: Tensor) -> Batch:
    """Ours, with the count of the targets that count."""
    part = gpt2.take_positions(batch, positions)
    return dataclasses.replace(part, count=int((part.targets != -100).sum()))


class Loud(gpt2.GPT2):
    """With weights that are not small, so that attention matters."""

    def __init__(self) -> None:
        super().__init__(SHAPE)
        with torch.no_grad():
            for p in self.parameters():
                p.add_(0.3 * torch.randn_like(p))


def words(texts: type[Texts] = Texts) -> Workload:
    return Workload(
        "words", Loud, _loss, texts(), blocks=NAMES, splits=gpt2.splits_of(SHAPE),
        context=dataclasses.replace(gpt2.CONTEXT, take=_take),
    )  # fmt: skip


even_words = functools.partial(words, Even)


def tied() -> Workload:
    """The pipeline's own: statistics before and in the blocks, a sum past all of them."""
    import test_pipeline

    toy: Any = test_pipeline.TOYS["tied"]
    return Workload("tied", toy.make, toy.loss, Rows(), blocks=toy.blocks, couples_samples=True)


class Rows:
    def __len__(self) -> int:
        return 64

    def batch(self, ids: Sequence[int]) -> Batch:
        rows = [torch.randn(2, 6, generator=torch.Generator().manual_seed(i)) for i in ids]
        x = torch.cat(rows) if rows else torch.zeros(0, 6)  # two rows: a BatchNorm needs them
        y = torch.tensor([j for i in ids for j in (i % 3, -100 if i % 4 else 2)], dtype=torch.long)
        return Batch(x, y, int((y != -100).sum()), len(rows))
