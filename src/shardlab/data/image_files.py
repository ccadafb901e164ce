"""The published formats of image data sets: idx, CIFAR-10's pickles, batches and sheets, digits.

A pickle is data here, never code: its reader can build arrays and nothing else.
"""

from __future__ import annotations

import json
import pickle
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardlab.data import unpack
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
    for name in names:
        for found in sorted(folder.rglob(name)):
            if found.is_file():
                return found
    raise UsageError(f"{folder} holds no {names[0]} (nor {names[1]})")


def read_idx(path: Path) -> Bytes:
    """An idx file of unsigned bytes: two zeros, a type, the number of axes, the axes, the data."""
    try:
        content = path.read_bytes()
        if content[:2] == b"\x1f\x8b":
            content = unpack.gunzip(path, content)
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


def read_cifar10(path: Path, split: str) -> tuple[Bytes, Ids]:
    """Whichever of the three forms is there; the binary one first, as it is read fastest."""
    if not path.is_dir():
        path = path.parent
    stems = CIFAR10_BATCHES[split]
    for suffix, read in ((".bin", _read_binary), ("", _read_pickle), (".png", _read_sheet)):
        folders = [f.parent for f in sorted(path.rglob(stems[0] + suffix)) if f.is_file()]
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
            try:
                labels = json.loads((folder / name).read_text(encoding="utf-8"))
                return np.array(labels, dtype=np.int64).reshape(-1)
            except (ValueError, TypeError, OverflowError, RecursionError) as error:
                raise UsageError(f"{folder / name} is not a list of labels: {error}") from None
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
    size = height * (1 + 3 * width)
    if size > unpack.MOST:
        raise UsageError(f"{path}: {width} x {height} pixels are too many")
    try:
        raw = np.frombuffer(unpack.inflate(b"".join(packed), size), dtype=np.uint8)
    except zlib.error as error:
        raise UsageError(f"{path} is damaged: {error}") from None
    if raw.size != size:
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


def read_digits(path: Path, split: str) -> tuple[Bytes, Ids]:
    """Rows of 64 pixels from 0 to 16 and the label. The published file has no split: ours is fixed.

    1,437 for training, the last 360 held out.
    """
    file = path / "digits.csv.gz" if path.is_dir() else path
    try:
        text = unpack.gunzip(file, file.read_bytes()).decode("ascii")
        rows = np.array([line.split(",") for line in text.split()], dtype=np.float64)
    except (OSError, ValueError, EOFError, zlib.error) as error:
        raise UsageError(f"{file} is not scikit-learn's digits.csv.gz: {error}") from None
    if rows.ndim != 2 or rows.shape[1] != 65 or rows.min() < 0 or rows[:, :64].max() > 16:
        raise UsageError(f"{file} is not scikit-learn's digits.csv.gz")
    rows = rows[:-DIGITS_HELD_OUT] if split == "train" else rows[-DIGITS_HELD_OUT:]
    pixels = np.round(rows[:, :64] * (255 / 16)).astype(np.uint8)
    return pixels.reshape(-1, 1, 8, 8), rows[:, 64].astype(np.int64)
