"""Small valid files of every format that we read, as ``{path: bytes}``."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import json
import struct
import tarfile
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


CIFAR10 = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]


def cifar10_rows(batch: int, count: int) -> Array:
    """A label and 3072 pixels in each row, and others in each batch."""
    labels = (np.arange(count) + batch) % 10
    pixels = (np.arange(count * 3072) * (batch + 1) % 251).reshape(count, 3072)
    return np.concatenate([labels[:, None], pixels], 1).astype(np.uint8)


def cifar10(folder: str = "", count: int = 1) -> Files:
    return {
        f"{folder}{name}.bin": cifar10_rows(i, count).tobytes() for i, name in enumerate(CIFAR10)
    }


def archive(files: Files, prefix: str = "", link: str | None = None) -> bytes:
    """As tar.gz; ``link``: with a symbolic link of this name, to a file of the machine."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(prefix + name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
        if link is not None:
            away = tarfile.TarInfo(link)
            away.type, away.linkname = tarfile.SYMTYPE, "/etc/passwd"
            tar.addfile(away)
    return packed.getvalue()


# ------------------------------------------------------------------ reviews


def table(rows: Iterable[Iterable[Any]]) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text, quoting=csv.QUOTE_ALL).writerows(rows)
    return text.getvalue().encode()


def json_lines(rows: Iterable[Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def reviews(texts: list[str], labels: list[int], split: str) -> dict[str, Files]:
    """Yelp's formats. All but its dump have escaped texts; parquet, if it can be made."""
    escaped = [text.replace("\n", "\\n").replace('"', '\\"') for text in texts]
    pairs = list(zip(escaped, labels, strict=True))
    found = {
        "csv": {f"yelp_review_full_csv/{split}.csv": table([n + 1, text] for text, n in pairs)},
        "jsonl": {f"{split}.jsonl": json_lines({"label": n, "text": t} for t, n in pairs)},
        "dump": {
            f"{split}_dump.json": json_lines(
                {"stars": n + 1.0, "text": text} for text, n in zip(texts, labels, strict=True)
            )
        },
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
