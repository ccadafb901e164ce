"""The published formats of image data sets: idx, CIFAR-10's pickles, batches and sheets, digits.

A pickle is data here, never code: its reader can build arrays and nothing else.
"""

from __future__ import annotations

import json
import math
import pickle
import struct
import zlib
from pathlib import Path
from typing import Any

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
    "train": [f"data_batch_{i}" for i in range(1, 6)],
    "test": ["test_batch"],
}


def read_cifar10(path: Path, split: str) -> tuple[Bytes, Ids]:
    """Whichever of the three forms is there; the binary one first, as it is read fastest."""
    if not path.is_dir():
        path = path.parent
    stems = CIFAR10_BATCHES[split]
    for suffix, read in ((".bin", _read_binary), ("", _read_pickle), (".png", _read_sheet)):
        first = next((f for f in sorted(path.rglob(stems[0] + suffix)) if f.is_file()), None)
        if first is None:
            continue
        files = [first.with_name(stem + suffix) for stem in stems]
        if missing := [f.name for f in files if not f.is_file()]:
            raise UsageError(f"{first.parent} lacks {', '.join(missing)}")
        images, labels = zip(*map(read, files), strict=True)
        if suffix == ".png":
            return np.concatenate(images), _sheet_labels(first.parent, split)
        return np.concatenate(images), np.concatenate(labels)
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


def _latin1(text: str | bytes, _encoding: str) -> bytes:
    """How Python 3 writes bytes into a pickle that Python 2 can read."""
    return text if isinstance(text, bytes) else text.encode("latin1")


_RECONSTRUCT = np.empty(0).__reduce__()[0]  # wherever this numpy keeps it
_HARMLESS = {
    "numpy.ndarray": np.ndarray,
    "numpy.dtype": np.dtype,
    "numpy.core.multiarray._reconstruct": _RECONSTRUCT,
    "numpy._core.multiarray._reconstruct": _RECONSTRUCT,
    "_codecs.encode": _latin1,
}


class _ArraysOnly(pickle.Unpickler):
    """Builds dicts, lists, strings and numpy arrays, and refuses to run anything else."""

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" not in _HARMLESS:
            raise pickle.UnpicklingError(f"it wants to run {module}.{name}")
        return _HARMLESS[f"{module}.{name}"]


def _read_pickle(path: Path) -> tuple[Bytes, Ids]:
    """A dict of ``data``, rows of 3 x 32 x 32 bytes, and ``labels``, a list."""
    try:
        with path.open("rb") as file:
            content = _ArraysOnly(file, encoding="bytes").load()
        values = {k.decode() if isinstance(k, bytes) else k: v for k, v in content.items()}
        data: Any = values.get("data")
        labels = values.get("labels")
        if getattr(data, "dtype", None) != np.uint8 or not isinstance(labels, list):
            raise TypeError("'data' is not rows of bytes, or 'labels' is no list")
        return data.reshape(-1, 3, 32, 32), np.array(labels, dtype=np.int64)
    except Exception as error:  # a damaged pickle fails in as many ways as there are bytes
        raise UsageError(f"{path} is not a CIFAR-10 batch: {error}") from None


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
            try:
                labels = json.loads((folder / name).read_text(encoding="utf-8"))
                return np.array(labels, dtype=np.int64).reshape(-1)
            except (ValueError, TypeError, OverflowError, RecursionError) as error:
                raise UsageError(f"{folder / name} is not a list of labels: {error}") from None
    raise UsageError(f"{folder} lacks {split}_lables.json")


def read_png(path: Path) -> Bytes:
    """The pixels of a PNG: (height, width, 3)."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise UsageError(
            f"{path} is a PNG, which needs Pillow: pip install 'shardlab[images]'"
        ) from None
    try:
        with Image.open(path, formats=["PNG"]) as picture:
            return np.array(picture.convert("RGB"))
    except UnidentifiedImageError:
        raise UsageError(f"{path} is not a PNG") from None
    except Exception as error:  # a damaged picture fails in as many ways as a pickle
        raise UsageError(f"{path} is damaged: {error}") from None


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
