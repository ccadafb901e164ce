"""Labelled images: the real data sets in the formats in which they are published.

``load`` reads MNIST and Fashion-MNIST (idx, plain or gzipped), CIFAR-10 (its Python pickles,
its binary batches, or sheets of PNG) and scikit-learn's 8x8 digits into one uint8 array.
A pickle is data here, never code: its reader can build arrays and nothing else.
"""

from __future__ import annotations

import gzip
import json
import pickle
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from shardlab.data import sources
from shardlab.errors import UsageError, unknown
from shardlab.workloads.base import Batch

Bytes = npt.NDArray[np.uint8]
Ids = npt.NDArray[np.int64]

DIGIT_NAMES = tuple(str(i) for i in range(10))
DIGITS_HELD_OUT = 360  # of 1,797: the last ones, by other writers than the first


@dataclass(frozen=True)
class Kind:
    """What is known of a data set before its files are read."""

    shape: tuple[int, int, int]  # channels, height, width
    classes: tuple[str, ...]
    mean: tuple[float, ...]  # of each channel, pixels as 0 to 1, over the training images
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


@dataclass(frozen=True)
class ImageSet:
    images: Bytes  # (n, channels, height, width)
    labels: Ids  # (n,)
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]


def load(name: str, source: str = sources.AUTO, split: str = "train") -> ImageSet:
    """The images of a split. ``source``: a folder or file, or "auto": what was downloaded."""
    if name not in KINDS:
        raise unknown("image data set", name, KINDS)
    if split not in SPLITS:
        raise unknown("split", split, SPLITS)
    kind = KINDS[name]
    path = _locate(name, source)
    if name == "cifar10":
        images, labels = _read_cifar10(path, split)
    elif name == "digits":
        images, labels = _read_digits(path, split)
    else:
        images, labels = _read_mnist(path, split)
    if images.shape[1:] != kind.shape or len(images) != len(labels):
        raise UsageError(
            f"{path} is not {name}: {len(labels)} labels, images of shape {images.shape}, "
            f"where (n, {', '.join(map(str, kind.shape))}) belongs"
        )
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < len(kind.classes):
        raise UsageError(f"{path} is not {name}: labels from {labels.min()} to {labels.max()}")
    return ImageSet(images, labels, kind.classes, kind.mean, kind.std)


def _locate(name: str, source: str) -> Path:
    if source != sources.AUTO:
        path = Path(source).expanduser()
        if not path.exists():
            raise UsageError(f"no such data: {path}")
        return path
    path = sources.cached(name)
    if sources.described(path) is not None:
        return path
    if name == "digits" and (file := _scikit_learns_digits()):
        return file
    more = ", or pip install 'shardlab[images]'" if name == "digits" else ""
    raise UsageError(
        f"{name} has not been downloaded: run `shardlab data {name}`{more}, or name its folder "
        "with data.source"
    )


def _scikit_learns_digits() -> Path | None:
    """The file inside the installed package, found without importing it."""
    import importlib.util

    spec = importlib.util.find_spec("sklearn")
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz"
    return path if path.is_file() else None


# ------------------------------------------------------------------ MNIST


def _read_mnist(path: Path, split: str) -> tuple[Bytes, Ids]:
    stem = "train" if split == "train" else "t10k"
    images = read_idx(_find(path, f"{stem}-images", "idx3-ubyte"))
    labels = read_idx(_find(path, f"{stem}-labels", "idx1-ubyte"))
    return images[:, None], labels.astype(np.int64)


def _find(folder: Path, stem: str, suffix: str) -> Path:
    """``train-images-idx3-ubyte``, ``train-images.idx3-ubyte``, either with .gz, at any depth."""
    if not folder.is_dir():
        folder = folder.parent  # one of the four files stands for all
    names = [f"{stem}{joint}{suffix}{end}" for joint in "-." for end in ("", ".gz")]
    for name in names:
        for found in sorted(folder.rglob(name)):
            return found
    raise UsageError(f"{folder} holds no {names[0]} (nor {names[1]})")


def read_idx(path: Path) -> Bytes:
    """An idx file of unsigned bytes: two zeros, a type, the number of axes, the axes, the data."""
    try:
        content = path.read_bytes()
        if content[:2] == b"\x1f\x8b":
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None
    if len(content) < 4 or content[:3] != b"\0\0\x08":
        raise UsageError(f"{path} is not an idx file of bytes: it begins with {content[:4]!r}")
    axes = content[3]
    if len(content) < 4 + 4 * axes:
        raise UsageError(f"{path} is damaged: it ends inside its header")
    shape = struct.unpack_from(f">{axes}I", content, 4)
    data = np.frombuffer(content, dtype=np.uint8, offset=4 + 4 * axes)
    if data.size != int(np.prod(shape, dtype=np.int64)):
        raise UsageError(f"{path} is damaged: its header says {shape}, it holds {data.size} bytes")
    return data.reshape(shape)


# ------------------------------------------------------------------ CIFAR-10


CIFAR10_BATCHES = {
    "train": [f"data_batch_{i}" for i in range(1, 6)],
    "test": ["test_batch"],
}


def _read_cifar10(path: Path, split: str) -> tuple[Bytes, Ids]:
    """Whichever of the three forms is there; the binary one first, as it is read fastest."""
    if not path.is_dir():
        path = path.parent
    stems = CIFAR10_BATCHES[split]
    for suffix, read in ((".bin", _read_binary), ("", _read_pickle), (".png", _read_sheet)):
        folders = [f.parent for f in sorted(path.rglob(stems[0] + suffix))]
        if folders:
            files = [folders[0] / (stem + suffix) for stem in stems]
            missing = [f.name for f in files if not f.is_file()]
            if missing:
                raise UsageError(f"{folders[0]} lacks {', '.join(missing)}")
            parts = [read(file) for file in files]
            images = np.concatenate([p[0] for p in parts])
            labels = np.concatenate([p[1] for p in parts])
            if suffix == ".png":
                labels = _sheet_labels(folders[0], split)
            return images, labels
    raise UsageError(f"{path} holds no CIFAR-10: no {stems[0]}, {stems[0]}.bin or {stems[0]}.png")


def _read_binary(path: Path) -> tuple[Bytes, Ids]:
    """Rows of a label and 3 x 32 x 32 pixels."""
    rows = np.fromfile(path, dtype=np.uint8)
    if rows.size == 0 or rows.size % 3073:
        raise UsageError(f"{path} is damaged: {rows.size} bytes are not rows of 3073")
    rows = rows.reshape(-1, 3073)
    return rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0].astype(np.int64)


def write_binary(path: Path, images: Bytes, labels: Ids) -> None:
    rows = np.concatenate([labels.astype(np.uint8)[:, None], images.reshape(len(images), -1)], 1)
    rows.tofile(path)


class _ArraysOnly(pickle.Unpickler):
    """Builds dicts, lists, strings and numpy arrays. Whatever else a pickle names is refused."""

    def find_class(self, module: str, name: str) -> Any:
        reconstruct = np.empty(0).__reduce__()[0]  # wherever this numpy keeps it
        known = {
            ("numpy", "ndarray"): np.ndarray,
            ("numpy", "dtype"): np.dtype,
            ("numpy.core.multiarray", "_reconstruct"): reconstruct,
            ("numpy._core.multiarray", "_reconstruct"): reconstruct,
            ("_codecs", "encode"): _latin1,
        }
        if (module, name) not in known:
            raise pickle.UnpicklingError(f"it wants to run {module}.{name}")
        return known[module, name]


def _latin1(text: str | bytes, _encoding: str) -> bytes:
    """How Python 3 writes bytes into a pickle that Python 2 can read."""
    return text if isinstance(text, bytes) else text.encode("latin1")


def _read_pickle(path: Path) -> tuple[Bytes, Ids]:
    with path.open("rb") as file:
        try:
            content = _ArraysOnly(file, encoding="bytes").load()
        except Exception as error:  # a damaged pickle fails in as many ways as there are bytes
            raise UsageError(f"{path} is not a CIFAR-10 batch: {error}") from None
    if not isinstance(content, dict):
        raise UsageError(f"{path} is not a CIFAR-10 batch: a {type(content).__name__}, not a dict")
    values = {k.decode() if isinstance(k, bytes) else k: v for k, v in content.items()}
    data, labels = values.get("data"), values.get("labels")
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.size % 3072:
        raise UsageError(f"{path} is not a CIFAR-10 batch: 'data' is not rows of 3072 bytes")
    if not isinstance(labels, list):
        raise UsageError(f"{path} is not a CIFAR-10 batch: it has no list of 'labels'")
    return data.reshape(-1, 3, 32, 32), np.array(labels, dtype=np.int64)


def _read_sheet(path: Path) -> tuple[Bytes, Ids]:
    """A PNG whose every row of 1,024 pixels is one image of 32 x 32; labels are kept elsewhere."""
    pixels = read_png(path)
    if pixels.shape[1:] != (1024, 3):
        raise UsageError(f"{path} is not a sheet of CIFAR-10: {pixels.shape}, not (n, 1024, 3)")
    return pixels.reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2), np.empty(0, dtype=np.int64)


def _sheet_labels(folder: Path, split: str) -> Ids:
    """A JSON list (its name is misspelt in the package that carries the sheets)."""
    for name in (f"{split}_lables.json", f"{split}_labels.json"):
        if (folder / name).is_file():
            return np.array(json.loads((folder / name).read_text()), dtype=np.int64)
    raise UsageError(f"{folder} lacks {split}_lables.json")


def read_png(path: Path) -> Bytes:
    """The pixels of an 8-bit RGB PNG that is not interlaced: (height, width, 3)."""
    content = path.read_bytes()
    if content[:8] != b"\x89PNG\r\n\x1a\n":
        raise UsageError(f"{path} is not a PNG")
    header, packed, at = b"", [], 8
    while at + 12 <= len(content):
        length, kind = struct.unpack_from(">I4s", content, at)
        body = content[at + 8 : at + 8 + length]
        header = body if kind == b"IHDR" else header
        if kind == b"IDAT":
            packed.append(body)
        at += 12 + length
    if len(header) != 13 or header[8:] != b"\x08\x02\0\0\0":
        raise UsageError(f"{path}: only 8-bit RGB without interlacing can be read")
    width, height = struct.unpack(">II", header[:8])
    try:
        raw = np.frombuffer(zlib.decompress(b"".join(packed)), dtype=np.uint8)
    except zlib.error as error:
        raise UsageError(f"{path} is damaged: {error}") from None
    if raw.size != height * (1 + 3 * width):
        raise UsageError(f"{path} is damaged: {raw.size} bytes for {width} x {height} pixels")
    lines = raw.reshape(height, 1 + 3 * width)
    pixels = np.empty((height, width, 3), dtype=np.uint8)
    above = np.zeros((width, 3), dtype=np.uint8)
    for row, line in zip(pixels, lines, strict=True):
        difference = line[1:].reshape(width, 3)
        match int(line[0]):
            case 0:
                row[:] = difference
            case 1:  # to the pixel on the left: a running sum
                np.cumsum(difference, axis=0, dtype=np.uint8, out=row)
            case 2:  # to the pixel above
                np.add(difference, above, out=row)
            case 3 | 4:
                row[:] = _unfilter(int(line[0]), line[1:].tobytes(), above.tobytes(), width)
            case other:
                raise UsageError(f"{path} is damaged: a row has filter {other}")
        above = row
    return pixels


def _unfilter(kind: int, line: bytes, above: bytes, width: int) -> Bytes:
    """Average (3) and Paeth (4): each byte needs the one before it, so byte by byte."""
    out = bytearray(len(line))
    for i, value in enumerate(line):
        left, corner = (out[i - 3], above[i - 3]) if i >= 3 else (0, 0)
        up = above[i]
        if kind == 3:
            guess = (left + up) // 2
        else:
            estimate = left + up - corner
            guess = min(
                (abs(estimate - left), 0, left),
                (abs(estimate - up), 1, up),
                (abs(estimate - corner), 2, corner),
            )[2]
        out[i] = (value + guess) & 255
    return np.frombuffer(out, dtype=np.uint8).reshape(width, 3)


# ------------------------------------------------------------------ digits


def _read_digits(path: Path, split: str) -> tuple[Bytes, Ids]:
    """Rows of 64 pixels from 0 to 16 and the label. The published file has no split: ours is fixed.

    1,437 for training, the last 360 held out.
    """
    file = path / "digits.csv.gz" if path.is_dir() else path
    try:
        text = gzip.decompress(file.read_bytes()).decode("ascii")
        rows = np.array([line.split(",") for line in text.split()], dtype=np.float64)
    except (OSError, ValueError, EOFError, zlib.error) as error:
        raise UsageError(f"{file} is not scikit-learn's digits.csv.gz: {error}") from None
    if rows.ndim != 2 or rows.shape[1] != 65 or rows.min() < 0 or rows[:, :64].max() > 16:
        raise UsageError(f"{file} is not scikit-learn's digits.csv.gz")
    rows = rows[:-DIGITS_HELD_OUT] if split == "train" else rows[-DIGITS_HELD_OUT:]
    pixels = np.round(rows[:, :64] * (255 / 16)).astype(np.uint8)
    return pixels.reshape(-1, 1, 8, 8), rows[:, 64].astype(np.int64)


# ------------------------------------------------------------------ samples by number


PADDING = 4  # pixels on each side, from which the crop is cut
_M1, _M2, _STEP = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0x9E3779B97F4A7C15


class ImageDataset:
    """Images as normalised float32, optionally augmented: cropped from a padded copy, mirrored.

    The crop of a sample is a function of (seed, epoch, id): it does not depend on the batch,
    the rank or the world in which the sample is read, so the same run on more ranks sees the
    same pixels, and a resumed one goes on with them. ``batch`` alone does not know the epoch
    and reads epoch 0; the training loop calls ``batch_in``.
    """

    def __init__(
        self,
        images: Bytes,
        labels: Ids,
        mean: Sequence[float],
        std: Sequence[float],
        *,
        augment: bool = False,
        seed: int = 0,
    ) -> None:
        self.images, self.labels = images, labels
        shape = (1, -1, 1, 1)
        self.scale = (1 / (255 * np.asarray(std, dtype=np.float32))).reshape(shape)
        self.shift = (np.asarray(mean) / np.asarray(std)).astype(np.float32).reshape(shape)
        self.augment, self.seed = augment, seed

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
        inputs = pixels.astype(np.float32) * self.scale - self.shift
        return Batch(
            inputs=torch.from_numpy(inputs),
            targets=torch.from_numpy(self.labels[index]),
            count=len(index),
            samples=len(index),
        )


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
