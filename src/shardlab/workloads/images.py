"""What the image workloads share: real images, or others brought into their shape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
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


@dataclass(frozen=True)
class Found:
    """The images that a workload is given, and what is said about them."""

    name: str  # of the data set
    train: ImageSet
    test: ImageSet
    about: str
    chosen: dict[str, str]


def datasets(
    workload: str,
    default: str,
    dataset: str | None,
    data: DataConfig,
    shape: Shape,
    augments: Callable[[str, bool], bool] = lambda _name, _is_synthetic: False,
) -> Found:
    """The images to train on, and those held out.

    ``dataset`` is the option of that name, ``default`` the workload's own. ``augments`` tells for a
    data set, and whether it is synthetic, if its images are cropped and mirrored.
    """
    if data.seq_len is not None:
        raise UsageError("data.seq_len is for tokens; images have none")
    if dataset is not None and dataset not in images.KINDS:
        raise unknown("option dataset", dataset, images.KINDS)
    sources.refuse_other_words(data.source, tuple(images.KINDS), workload)
    name, source, why = _choose(default, dataset, data.source)
    is_made = source == SYNTHETIC

    def read(split: str) -> ImageSet:
        where = sources.AUTO if source == name else source
        found = synthetic.images(name, split) if is_made else images.load(name, where, split)
        return fit(found, shape)

    train, test = replace(read("train"), augment=augments(name, is_made)), read("test")
    label = f"synthetic images in the shape of {name}" if is_made else name
    about = f"{label if source in (name, SYNTHETIC) else f'{source}, as {name}'}: "
    about += f"{len(train):,} images, {len(test):,} held out"
    if name == "digits" and not is_made:
        about += ", of 8 x 8, enlarged"
    chosen = {"data.source": source} if data.source == sources.AUTO else {}
    return Found(name, train, test, about + (f" ({why})" if why else ""), chosen)


def _choose(default: str, dataset: str | None, source: str) -> tuple[str, str, str]:
    """The name of the data set; where it is read from, by its name if it was downloaded; and why
    it is not the workload's own. "auto" prefers the real data set, then scikit-learn's digits."""
    if source in images.KINDS:
        if dataset not in (None, source):
            raise UsageError(
                f"data.source is {source} and model.options.dataset is {dataset}: set one of them"
            )
        return source, source, ""
    if source != sources.AUTO:
        return dataset or default, source, ""
    if dataset is not None or images.is_here(default):
        name = dataset or default
        return name, name, ""
    why = sources.absent(default)
    return ("digits", "digits", why) if images.is_here("digits") else (default, SYNTHETIC, why)


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
