"""The published formats of image data sets: idx, CIFAR-10's binary batches, digits."""

from __future__ import annotations

import math
import struct
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardlab.data import sources
from shardlab.errors import UsageError

Bytes = npt.NDArray[np.uint8]
Ids = npt.NDArray[np.int64]

DIGITS_HELD_OUT = 360  # the last of 1,797, written by other people than the first


# ------------------------------------------------------------------ MNIST


def read_mnist(path: Path, split: str) -> tuple[Bytes, Ids]:
    stem = "train" if split == "train" else "t10k"
    images = read_idx(_find(path, f"{stem}-images", "idx3-ubyte"))
    labels = read_idx(_find(path, f"{stem}-labels", "idx1-ubyte"))
    return images[:, None], labels.astype(np.int64)


def _find(folder: Path, stem: str, suffix: str) -> Path:
    """``train-images-idx3-ubyte``, ``train-images.idx3-ubyte``, either with .gz, at any depth."""
    if not folder.is_dir():
        folder = folder.parent  # one of the four files stands for all
    names = [f"{stem}{joint}{suffix}{end}" for joint in "-." for end in ("", ".gz")]
    found = (f for name in names for f in sorted(folder.rglob(name)) if f.is_file())
    if (file := next(found, None)) is None:
        raise UsageError(f"{folder} holds no {names[0]} (nor {names[1]})")
    return file


def read_idx(path: Path) -> Bytes:
    """An idx file of unsigned bytes: two zeros, a type, the number of axes, the axes, the data."""
    try:
        with path.open("rb") as file:
            is_packed = file.read(2) == b"\x1f\x8b"
        content = sources.gunzip(path) if is_packed else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None
    if len(content) < 4 or content[:3] != b"\0\0\x08":
        raise UsageError(f"{path} is not an idx file of bytes: it begins with {content[:4]!r}")
    start = 4 + 4 * content[3]
    if len(content) < start:
        raise UsageError(f"{path} is damaged: it ends inside its header")
    shape = struct.unpack(f">{content[3]}I", content[4:start])
    data = np.frombuffer(content, dtype=np.uint8, offset=start)
    if data.size != math.prod(shape):
        raise UsageError(f"{path} is damaged: its header says {shape}, it holds {data.size} bytes")
    return data.reshape(shape)


# ------------------------------------------------------------------ CIFAR-10


CIFAR10_BATCHES = {
    "train": [f"data_batch_{i}.bin" for i in range(1, 6)],
    "test": ["test_batch.bin"],
}


def read_cifar10(path: Path, split: str) -> tuple[Bytes, Ids]:
    """The binary batches, in a folder at any depth."""
    if not path.is_dir():
        path = path.parent
    names = CIFAR10_BATCHES[split]
    first = next((f for f in sorted(path.rglob(names[0])) if f.is_file()), None)
    if first is None:
        raise UsageError(f"{path} holds no CIFAR-10 in binary batches: no {names[0]}")
    files = [first.with_name(name) for name in names]
    if missing := [f.name for f in files if not f.is_file()]:
        raise UsageError(f"{first.parent} lacks {', '.join(missing)}")
    images, labels = zip(*map(_read_binary, files), strict=True)
    return np.concatenate(images), np.concatenate(labels)


def _read_binary(path: Path) -> tuple[Bytes, Ids]:
    """Rows of a label and 3 x 32 x 32 pixels."""
    rows = np.fromfile(path, dtype=np.uint8)
    if rows.size == 0 or rows.size % 3073:
        raise UsageError(f"{path} is damaged: {rows.size} bytes are not rows of 3073")
    rows = rows.reshape(-1, 3073)
    return rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0].astype(np.int64)


# ------------------------------------------------------------------ digits


def read_digits(path: Path, split: str) -> tuple[Bytes, Ids]:
    """Rows of 64 pixels from 0 to 16 and the label. The last rows are held out."""
    file = path / "digits.csv.gz" if path.is_dir() else path
    try:
        lines = sources.gunzip(file).decode("ascii").split()
        rows = np.array([line.split(",") for line in lines], dtype=np.float64)
    except (OSError, ValueError, EOFError, zlib.error) as error:
        raise UsageError(f"{file} is not scikit-learn's digits.csv.gz: {error}") from None
    if rows.ndim != 2 or rows.shape[1] != 65 or rows.min() < 0 or rows[:, :64].max() > 16:
        raise UsageError(f"{file} is not scikit-learn's digits.csv.gz")
    rows = rows[:-DIGITS_HELD_OUT] if split == "train" else rows[-DIGITS_HELD_OUT:]
    pixels = np.round(rows[:, :64] * (255 / 16)).astype(np.uint8)
    return pixels.reshape(-1, 1, 8, 8), rows[:, 64].astype(np.int64)
