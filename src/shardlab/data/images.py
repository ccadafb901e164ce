"""Labelled images: the real data sets, and batches of them by number.

``load`` reads idx files, as `shardlab data fetch` keeps MNIST, Fashion-MNIST and CIFAR-10, and
scikit-learn's 8x8 digits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from shardlab.batch import Batch
from shardlab.data import image_files, sources
from shardlab.data.image_files import Bytes, Ids
from shardlab.errors import UsageError, unknown

DIGIT_NAMES = tuple(str(i) for i in range(10))


@dataclass(frozen=True)
class Kind:
    """What is known of a data set before its files are read."""

    shape: tuple[int, int, int]  # channels, height, width
    classes: tuple[str, ...]
    mean: tuple[float, ...]  # by channel, over the training images, with pixels from 0 to 1
    std: tuple[float, ...]


KINDS = {
    "mnist": Kind((1, 28, 28), DIGIT_NAMES, (0.1307,), (0.3081,)),
    "fashion_mnist": Kind(
        (1, 28, 28),
        ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker",
         "Bag", "Ankle boot"),
        (0.2860,),
        (0.3530,),
    ),
    "cifar10": Kind(
        (3, 32, 32),
        ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
        (0.4914, 0.4822, 0.4465),
        (0.2470, 0.2435, 0.2616),
    ),
    "digits": Kind((1, 8, 8), DIGIT_NAMES, (0.3054,), (0.3753,)),
}  # fmt: skip
SPLITS = ("train", "test")


def load(name: str, source: str = sources.AUTO, split: str = "train") -> ImageSet:
    """The images of a split. ``source``: a folder or file, or "auto": the data set of that name,
    as it was downloaded or, of the digits, as it is installed.
    """
    if name not in KINDS:
        raise unknown("image data set", name, KINDS)
    if split not in SPLITS:
        raise unknown("split", split, SPLITS)
    kind = KINDS[name]
    path = _locate(name, source)
    read = image_files.read_digits if name == "digits" else image_files.read_split
    images, labels = read(path, split)
    if images.shape[1:] != kind.shape or len(images) != len(labels):
        raise UsageError(
            f"{path} is not {name}: {len(labels)} labels, images of shape {images.shape}, "
            f"where (n, {', '.join(map(str, kind.shape))}) belongs"
        )
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < len(kind.classes):
        raise UsageError(f"{path} is not {name}: labels from {labels.min()} to {labels.max()}")
    return ImageSet(images, labels, kind.classes, kind.mean, kind.std)


def is_here(name: str) -> bool:
    """Whether a data set can be read without a download."""
    if name == "digits":
        return _scikit_learns_digits() is not None
    return sources.is_downloaded(name)


def _locate(name: str, source: str) -> Path:
    if source != sources.AUTO:
        return sources.existing(source)
    if name != "digits":
        return sources.downloaded(name)
    if (file := _scikit_learns_digits()) is None:
        raise UsageError("the digits come with scikit-learn: pip install 'shardlab[images]'")
    return file


def _scikit_learns_digits() -> Path | None:
    """The file inside the installed package, found without importing it."""
    spec = find_spec("sklearn")
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz"
    return path if path.is_file() else None


# ------------------------------------------------------------------ samples by number


PADDING = 4  # pixels on each side, from which the crop is cut
_M1, _M2, _STEP = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0x9E3779B97F4A7C15


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Labelled images. Batches of them are normalised float32, and cropped and mirrored if asked.

    The crop of a sample is a function of (seed, epoch, id): it does not depend on the batch,
    the rank or the world in which the sample is read, so the same run on more ranks sees the
    same pixels, and so does a resumed one. ``batch`` does not know the epoch and reads epoch 0;
    the training loop calls ``batch_in``.
    """

    images: Bytes  # (n, channels, height, width)
    labels: Ids  # (n,)
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    augment: bool = False  # crop each image from a padded copy, and mirror every other
    seed: int = 0

    def __len__(self) -> int:
        return len(self.images)

    def batch(self, ids: Sequence[int]) -> Batch:
        return self.batch_in(ids, [0] * len(ids))

    def batch_in(self, ids: Sequence[int], epochs: Sequence[int]) -> Batch:
        """The samples as they are seen in these epochs, one for each id."""
        index = np.asarray(ids, dtype=np.int64)
        pixels = self.images[index]  # (batch, channels, height, width)
        if self.augment:
            pixels = crop_and_flip(pixels, _random_bits(self.seed, np.asarray(epochs), index))
        scale = 1 / (255 * np.asarray(self.std, dtype=np.float32))
        shift = (np.asarray(self.mean) / np.asarray(self.std)).astype(np.float32)
        inputs = pixels.astype(np.float32) * scale[:, None, None] - shift[:, None, None]
        targets = torch.from_numpy(self.labels[index])
        return Batch(torch.from_numpy(inputs), targets, count=len(index), samples=len(index))


def _random_bits(seed: int, epochs: Any, ids: Ids) -> npt.NDArray[np.uint64]:
    """64 random bits for each (seed, epoch, id): three rounds of splitmix64."""
    bits = np.zeros(len(ids), dtype=np.uint64)
    for part in (np.full(len(ids), seed % 2**63), epochs, ids):
        bits = bits ^ part.astype(np.uint64)
        bits = bits + np.uint64(_STEP)  # wraps around, as it should
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(_M1)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(_M2)
        bits = bits ^ (bits >> np.uint64(31))
    return bits


def crop_and_flip(pixels: Bytes, bits: npt.NDArray[np.uint64]) -> Bytes:
    """Each image moved by up to 4 pixels over a black ground, and mirrored or not, by its bits."""
    count, channels, height, width = pixels.shape
    padded = np.pad(pixels, ((0, 0), (0, 0), (PADDING, PADDING), (PADDING, PADDING)))
    places = np.uint64(2 * PADDING + 1)
    top = (bits % places).astype(np.int64)
    left = (bits // places % places).astype(np.int64)
    mirrored = (bits >> np.uint64(63)).astype(bool)
    rows = top[:, None] + np.arange(height)  # (count, height)
    columns = left[:, None] + np.where(
        mirrored[:, None], np.arange(width)[::-1], np.arange(width)
    )  # (count, width)
    cut: Bytes = padded[
        np.arange(count)[:, None, None, None],
        np.arange(channels)[None, :, None, None],
        rows[:, None, :, None],
        columns[:, None, None, :],
    ]
    return cut
