"""Small valid files of every format that we read, as ``{path: bytes}``."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import json
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from shardlab.data import bpe, tokens

Files = dict[str, bytes]
Array = np.ndarray[Any, Any]


def lay_out(files: Files, folder: Path) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def shard_header(count: int) -> bytes:
    header = np.zeros(256, dtype="<i4")
    header[:3] = tokens.MAGIC, tokens.VERSION, count
    return header.tobytes()


def shard(ids: Iterable[int]) -> bytes:
    body = np.array(list(ids), dtype="<u2")
    return shard_header(len(body)) + body.tobytes()


# ------------------------------------------------------------------ images


def idx(array: Array, kind: int = 8) -> bytes:
    head = struct.pack(f">HBB{array.ndim}I", 0, kind, array.ndim, *array.shape)
    return head + array.astype(np.uint8).tobytes()


def mnist(train: int = 5, test: int = 5) -> Files:
    """Pixel i of a split is i % 251, and label i is i % 10."""
    return {
        f"{stem}-{what}": idx(array)
        for stem, count in (("train", train), ("t10k", test))
        for what, array in (
            ("images-idx3-ubyte", (np.arange(count * 784) % 251).reshape(count, 28, 28)),
            ("labels-idx1-ubyte", np.arange(count) % 10),
        )
    }


def zipped(files: Files) -> Files:
    return {f"{name}.gz": gzip.compress(content, mtime=0) for name, content in files.items()}


def pixels(count: int, shape: tuple[int, int, int], seed: int) -> tuple[Array, list[int]]:
    """Images and their labels, others for each seed."""
    random = np.random.default_rng(seed)
    return random.integers(0, 256, (count, *shape), np.uint8), [i % 10 for i in range(count)]


def png_rows(
    count: int,
    seed: int,
    shape: tuple[int, int, int] = (1, 28, 28),
    column: str = "image",
    label: int | None = None,
) -> bytes:
    """As the hub has them: parquet, in each row a PNG and its label; ``label``: of the last."""
    import pyarrow
    from PIL import Image
    from pyarrow import parquet

    images, labels = pixels(count, shape, seed)
    encoded = []
    for image in images:
        png = io.BytesIO()
        rows = image[0] if shape[0] == 1 else image.transpose(1, 2, 0)
        Image.fromarray(rows).save(png, "PNG")
        encoded.append({"bytes": png.getvalue(), "path": None})
    labels = labels if label is None else [*labels[:-1], label]
    sink = io.BytesIO()
    parquet.write_table(pyarrow.table({column: encoded, "label": labels}), sink)
    return sink.getvalue()


# ------------------------------------------------------------------ reviews


def table(rows: Iterable[Iterable[Any]]) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text, quoting=csv.QUOTE_ALL).writerows(rows)
    return text.getvalue().encode()


def json_lines(rows: Iterable[Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def reviews(texts: list[str], labels: list[int], split: str) -> dict[str, Files]:
    """Yelp's formats; parquet, if it can be made."""
    escaped = [text.replace("\n", "\\n").replace('"', '\\"') for text in texts]
    pairs = list(zip(escaped, labels, strict=True))
    found = {
        "csv": {f"yelp_review_full_csv/{split}.csv": table([n + 1, text] for text, n in pairs)},
    }
    with contextlib.suppress(ImportError):
        import pyarrow
        from pyarrow import parquet

        sink = io.BytesIO()
        parquet.write_table(pyarrow.table({"label": labels, "text": escaped}), sink)
        found["parquet"] = {f"hub/{split}-00000-of-00001.parquet": sink.getvalue()}
    return found


# ------------------------------------------------------------------ text


def vocabulary(merges: Iterable[bytes] = (b"ab",)) -> dict[str, int]:
    """A byte-level one in the format of GPT-2's encoder.json."""
    letters = bpe._printable_bytes()
    entries = {letters[byte]: byte for byte in range(256)}
    for merge in merges:
        entries.setdefault("".join(letters[byte] for byte in merge), len(entries))
    return {**entries, bpe.GPT2_END: len(entries)}
