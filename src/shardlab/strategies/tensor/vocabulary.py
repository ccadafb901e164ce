"""A vocabulary split over ranks: the embedding, the head, and the loss without whole logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from shardlab import comm
from shardlab.strategies.tensor.tensor_layers import (
    LinearPart,
    SplitLinear,
    enter,
    exchanged,
    leave,
)
from shardlab.workloads.samples import IGNORED
from shardlab.workloads.token_loss import takes_columns


class Vocabulary:
    """Which tokens are whose."""

    def __init__(self, parts: list[range], group: comm.Group) -> None:
        self.parts, self.group, self.own = parts, group, parts[group.rank()]
        self.is_first, self.is_last = group.rank() == 0, group.rank() == len(parts) - 1

    def find(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Which of the tokens are this rank's, and their places in its part (0 for the others).

        What is in nobody's part is the first or the last rank's: looking it up there fails, as it
        does in one process.
        """
        outside = torch.zeros_like(tokens, dtype=torch.bool)
        if not self.is_first:
            outside |= tokens < self.own.start
        if not self.is_last:
            outside |= tokens >= self.own.stop
        return ~outside, (tokens - self.own.start).masked_fill(outside, 0)

    def gather(self, x: Tensor, label: str) -> Tensor:  # (..., tokens) to (..., vocabulary)
        """All ranks' columns side by side."""
        sizes = [x.shape[:-1].numel() * len(part) for part in self.parts]
        flat, shard = x.new_empty(sum(sizes)), x.contiguous().view(-1)
        uneven = sizes if len(set(sizes)) > 1 else None
        comm.all_gather(flat, shard, self.group, sizes=uneven, label=label)
        columns = zip(flat.split(sizes), self.parts, strict=True)
        return torch.cat([of_rank.view(*x.shape[:-1], len(p)) for of_rank, p in columns], -1)

    def keep(self, x: Tensor, _label: str) -> Tensor:  # (..., vocabulary) to (..., tokens)
        """This rank's columns. Of a gradient that every rank has whole, they are no sum."""
        return x[..., self.own.start : self.own.stop].contiguous()


class VocabularyEmbedding(nn.Module):
    """Some of the rows. A token's vector comes from the rank that has it; all others add zeros."""

    def __init__(
        self, weight: nn.Parameter, padding_idx: int | None, vocabulary: Vocabulary, label: str
    ) -> None:
        super().__init__()
        self.weight, self.vocabulary, self.label = weight, vocabulary, label  # (tokens, dim)
        own = vocabulary.own
        self.padding_idx = None
        if padding_idx is not None and padding_idx in own:
            self.padding_idx = padding_idx - own.start

    def forward(self, tokens: Tensor) -> Tensor:  # (...) to (..., dim)
        is_own, at = self.vocabulary.find(tokens)
        found = F.embedding(at, self.weight, self.padding_idx)
        found = found.masked_fill(~is_own[..., None], 0)
        return leave(found, self.vocabulary.group, self.label)


class VocabularyHead(SplitLinear):
    """Some of the logits' columns; or, given the targets, the sum of their losses.

    Whoever asks for logits gets all of them, gathered, unless a ``token_loss`` waits for them.
    """

    def __init__(self, part: LinearPart, vocabulary: Vocabulary) -> None:
        super().__init__(part)
        self.vocabulary = vocabulary

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:  # (..., dim)
        x = enter(x, self.vocabulary.group, self.label)
        logits = self.product(x, self.bias)  # (..., tokens)
        if targets is not None:
            return self.loss(logits.flatten(0, -2), targets.flatten(), IGNORED)
        if takes_columns(self.loss):
            return logits
        return exchanged(logits, self.vocabulary.gather, self.vocabulary.keep, self.label)

    def loss(self, logits: Tensor, targets: Tensor, ignored: int) -> Tensor:
        return cross_entropy(logits, targets, self.vocabulary, ignored)


class _CrossEntropy(torch.autograd.Function):
    """The loss of a row is log Σ exp(logit) less the target's logit. Of each row the ranks tell
    each other three numbers: the largest logit, the sum, and the target's logit."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, vocabulary: Vocabulary, ignored: int
    ) -> Tensor:  # (rows, tokens), (rows,)
        counts = targets != ignored
        is_own, at = vocabulary.find(targets.where(counts, vocabulary.own.start))
        is_own, at = (is_own & counts), at[:, None]
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        top = wide.amax(1)  # (rows,)
        comm.all_reduce(top, vocabulary.group, op="max", label="loss maxima")
        wide = wide - top[:, None]
        picked = wide.gather(1, at)[:, 0].where(is_own, 0)
        powers = wide.exp_()
        sums = torch.stack([powers.sum(1), picked])  # (2, rows)
        comm.all_reduce(sums, vocabulary.group, label="loss sums")
        total, picked = sums
        ctx.save_for_backward(powers.div_(total[:, None]), at, is_own, counts)
        ctx.dtype = logits.dtype
        loss: Tensor = (total.log() - picked).where(counts, 0).sum()
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        softmax, at, is_own, counts = ctx.saved_tensors
        scale = gradient * counts  # (rows,)
        of_logits = softmax * scale[:, None]
        of_logits.scatter_add_(1, at, -(scale * is_own)[:, None].to(of_logits.dtype))
        return of_logits.to(ctx.dtype), None, None, None


def cross_entropy(
    logits: Tensor, targets: Tensor, vocabulary: Vocabulary, ignored: int = IGNORED
) -> Tensor:
    """The summed loss, the same on every rank, of logits (rows, tokens) and targets (rows,)."""
    if logits.shape[1] != len(vocabulary.own):
        raise ValueError(f"logits of {logits.shape[1]} columns, not of {len(vocabulary.own)}")
    loss: Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits, targets, vocabulary, ignored
    )
    return loss
