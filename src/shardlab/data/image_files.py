"""The files of image data sets: idx, as MNIST is published, and scikit-learn's digits.

The hub has images as PNG in parquet. ``unpack_parquet`` makes idx files of them once, so that a run
opens its images at once and needs neither pyarrow nor Pillow.
"""

from __future__ import annotations

import io
import math
import struct
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardlab.data import sources
from shardlab.errors import UsageError
from shardlab.files import replacing

Bytes = npt.NDArray[np.uint8]
Ids = npt.NDArray[np.int64]

DIGITS_HELD_OUT = 360  # the last of 1,797, written by other people than the first
STEMS = {"train": "train", "test": "t10k"}  # what the idx files of a split begin with


# ------------------------------------------------------------------ idx


def read_split(path: Path, split: str) -> tuple[Bytes, Ids]:
    """The images (n, channels, height, width) and labels of a folder, at any depth."""
    images = read_idx(_find(path, f"{STEMS[split]}-images"))
    labels = read_idx(_find(path, f"{STEMS[split]}-labels"))
    return images[:, None] if images.ndim == 3 else images, labels.astype(np.int64)


def _find(folder: Path, stem: str) -> Path:
    """``train-images-idx3-ubyte`` or ``train-images.idx3-ubyte``, either with .gz."""
    if not folder.is_dir():
        folder = folder.parent  # one of the four files stands for all
    patterns = [f"{stem}[-.]idx?-ubyte{end}" for end in ("", ".gz")]
    found = (f for pattern in patterns for f in sorted(folder.rglob(pattern)) if f.is_file())
    if (file := next(found, None)) is None:
        raise UsageError(f"{folder} holds no {stem}-idx3-ubyte (nor {stem}-idx3-ubyte.gz)")
    return file


def read_idx(path: Path) -> Bytes:
    """An idx file of unsigned bytes: two zeros, a type, the number of axes, the axes, the data."""
    try:
        with path.open("rb") as file:
            is_packed = file.read(2) == b"\x1f\x8b"
        content = sources.gunzip(path) if is_packed else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None
    if len(content) < 4 or content[:3] != b"\0\0\x08" or not 1 <= content[3] <= 4:
        raise UsageError(f"{path} is not an idx file of bytes: it begins with {content[:4]!r}")
    start = 4 + 4 * content[3]
    if len(content) < start:
        raise UsageError(f"{path} is damaged: it ends inside its header")
    shape = struct.unpack(f">{content[3]}I", content[4:start])
    data = np.frombuffer(content, dtype=np.uint8, offset=start)
    if data.size != math.prod(shape):
        raise UsageError(f"{path} is damaged: its header says {shape}, it holds {data.size} bytes")
    return data.reshape(shape)


def write_idx(path: Path, array: Bytes) -> None:
    with replacing(path) as part:
        head = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
        part.write_bytes(head + array.tobytes())


# ------------------------------------------------------------------ the hub's parquet


def unpack_parquet(path: Path, folder: Path, shape: tuple[int, int, int]) -> list[Path]:
    """A split of the hub (rows of a PNG and its label) as two idx files; returns their paths."""
    try:
        from PIL import Image
        from pyarrow import parquet
    except ImportError:
        raise UsageError(
            f"{path} is parquet, which needs pyarrow and Pillow: pip install 'shardlab[hub]'"
        ) from None
    channels, height, width = shape
    pixels, labels = [], []
    try:
        for part in parquet.ParquetFile(path).iter_batches():
            for row in part.to_pylist():
                labels.append(row.pop("label"))
                (image,) = row.values()  # called image, or img
                with Image.open(io.BytesIO(image["bytes"]), formats=("PNG",)) as png:
                    if (len(png.getbands()), png.height, png.width) != shape:
                        raise ValueError(f"an image is {png.mode} of {png.width} x {png.height}")
                    pixels.append(np.asarray(png, dtype=np.uint8))
        images = np.stack(pixels).reshape(-1, height, width, channels).transpose(0, 3, 1, 2)
        numbers = np.array(labels, dtype=np.uint8)
    except Exception as error:  # of many kinds, whichever library finds the damage
        reason = str(error).partition("\n")[0]
        raise UsageError(f"{path} does not hold images of shape {shape}: {reason}") from None
    stem = STEMS["train" if path.name.startswith("train") else "test"]
    axes = 3 if channels == 1 else 4
    files = [folder / f"{stem}-images-idx{axes}-ubyte", folder / f"{stem}-labels-idx1-ubyte"]
    write_idx(files[0], images[:, 0] if channels == 1 else images)
    write_idx(files[1], numbers)
    return files


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
