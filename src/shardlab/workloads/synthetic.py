"""Data that needs nothing and can be learnt: the twin of each workload's real data.

Everything is a function of the sample's number, so any rank of any world sees the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from shardlab.data.images import KINDS, ImageSet
from shardlab.data.reviews import Reviews
from shardlab.workloads.base import Batch

SIZES = {"train": 2048, "test": 512}

_WORDS = ("awful", "poor", "fair", "good", "superb")  # from one star to five
_THINGS = ("food", "service", "room", "coffee", "price", "view", "music", "staff")


class Tokens:
    """Sample i counts upwards from somewhere, in steps of 1 to 8: after two tokens all is known.

    Every fifth of the ways to begin and to continue is held out.
    """

    STRIDES = 8

    def __init__(self, seq_len: int, vocab: int, split: str) -> None:
        self.seq_len = seq_len
        self.vocab = vocab
        self.is_test = split == "test"
        self.length = SIZES[split]

    def __len__(self) -> int:
        return self.length

    def batch(self, ids: Sequence[int]) -> Batch:
        fifths = max(1, self.vocab * self.STRIDES // 5)
        numbers = torch.tensor(list(ids), dtype=torch.int64)[:, None] * 7919  # (batch, 1), a prime
        if self.is_test:
            way = numbers % fifths * 5 + 4
        else:
            numbers = numbers % (4 * fifths)
            way = numbers // 4 * 5 + numbers % 4
        start, stride = way // self.STRIDES, 1 + way % self.STRIDES
        stream = (start + stride * torch.arange(self.seq_len + 1)) % self.vocab
        count = len(ids) * self.seq_len
        return Batch(inputs=stream[:, :-1], targets=stream[:, 1:], count=count, samples=len(ids))


def images(name: str, split: str) -> ImageSet:
    """Images in the shape of a real data set: a pattern for each class, under noise."""
    kind = KINDS[name]
    patterns = np.random.default_rng(0).integers(64, 192, (len(kind.classes), *kind.shape))
    random = np.random.default_rng(1 if split == "train" else 2)
    labels = random.integers(0, len(kind.classes), SIZES[split])
    noise = random.integers(-63, 64, (SIZES[split], *kind.shape))
    pixels = (patterns[labels] + noise).astype(np.uint8)
    return ImageSet(pixels, labels, kind.classes, kind.mean, kind.std)


def reviews(split: str) -> Reviews:
    """Sentences whose words tell the stars, as long in bytes (20 to 300) as Yelp's reviews are in
    tokens: where a byte is a token, speed and memory are like those of the real ones."""
    random = np.random.default_rng(3 if split == "train" else 4)
    labels = random.integers(0, len(_WORDS), SIZES[split]).tolist()
    texts = []
    for label in labels:
        things = random.choice(_THINGS, random.integers(1, 13))
        texts.append(" ".join(f"The {thing} was {_WORDS[label]}." for thing in things))
    return Reviews(texts, labels, len(_WORDS))
