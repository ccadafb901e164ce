"""What the image workloads share: real images, or others brought into their shape."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import nn

from shardlab.batch import Batch
from shardlab.config import SYNTHETIC, DataConfig
from shardlab.data import images, sources
from shardlab.data.images import ImageSet
from shardlab.errors import UsageError, unknown
from shardlab.workloads import synthetic
from shardlab.workloads.base import classification_loss, count_flops

Shape = tuple[int, int, int]  # channels, height, width


def datasets(name: str, data: DataConfig, shape: Shape, augment: bool) -> tuple[ImageSet, ImageSet]:
    """The images to train on, and those held out."""
    if data.seq_len is not None:
        raise UsageError("data.seq_len is for tokens; images have none")
    if name not in images.KINDS:
        raise unknown("option dataset", name, images.KINDS)

    def read(split: str) -> ImageSet:
        is_made = data.source == SYNTHETIC
        found = synthetic.images(name, split) if is_made else images.load(name, data.source, split)
        return fit(found, shape)

    return replace(read("train"), augment=augment), read("test")


def default_dataset(name: str, source: str) -> str:
    """``name``, or scikit-learn's digits where nothing else can be had without a download."""
    if source != sources.AUTO or sources.described(sources.cached(name)) is not None:
        return name
    return "digits" if importlib.util.find_spec("sklearn") else name


@lru_cache  # a comparison builds its workload many times
def flops(model: type[nn.Module], shape: Shape, *arguments: Any) -> float:
    """The FLOPs of a classifier for one image, forward and backward.

    They are counted in eval mode, where one image is enough for BatchNorm.
    """
    one = Batch(torch.zeros(1, *shape), torch.zeros(1, dtype=torch.int64), count=1, samples=1)
    return count_flops(lambda: model(*arguments).eval(), classification_loss, one)


def fit(images: ImageSet, shape: Shape) -> ImageSet:
    """Smaller images enlarged by a whole factor and framed in black; grey ones in every channel."""
    channels, height, width = shape
    _, own, h, w = images.images.shape
    if (own, h, w) == shape:
        return images
    if own not in (1, channels) or h > height or w > width:
        raise UsageError(f"images of shape {(own, h, w)} do not fit into a model for {shape}")
    factor = min(height // h, width // w)
    pixels = images.images.repeat(factor, axis=2).repeat(factor, axis=3)
    top, left = (height - h * factor) // 2, (width - w * factor) // 2
    framed = np.zeros((len(pixels), own, height, width), dtype=np.uint8)
    framed[:, :, top : top + h * factor, left : left + w * factor] = pixels
    more = channels // own
    return replace(
        images, images=framed.repeat(more, axis=1), mean=images.mean * more, std=images.std * more
    )
