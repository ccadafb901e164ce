"""Where data lies on this machine, found and checked without torch or numpy."""

from __future__ import annotations

import glob
import gzip
import json
import os
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any, TypedDict

from msgspec import convert

from shardlab.config import AUTO, DATA_WORDS, STDLIB, SYNTHETIC, located
from shardlab.errors import UsageError

__all__ = ["AUTO", "STDLIB", "SYNTHETIC", "located"]
DESCRIPTION = "dataset.json"
STDLIB_BYTES = 8 << 20
_NOT_TEXT = {"test", "tests", "site-packages", "dist-packages", "__pycache__", "idlelib", "lib2to3"}


def existing(source: str) -> Path:
    path = located(source)
    if not path.exists():
        raise UsageError(f"no such data: {path}")
    return path


def find_shards(source: str) -> list[Path]:
    """The shard files of a file name, a folder (its ``*.bin``) or a glob, in name order."""
    path = located(source)
    if path.is_file():
        return [path]
    if path.is_dir():
        shards = sorted(p for p in path.glob("*.bin") if p.is_file())
        what = f"the folder {path} holds no *.bin shard"
    else:
        found = (Path(p) for p in glob.glob(str(path)))  # noqa: PTH207 - absolute patterns
        shards = sorted(p for p in found if p.is_file())
        what = f"no such data: {path}"
    if not shards:
        raise UsageError(f"{what}; data.source is a shard, a folder or glob of them, or '{STDLIB}'")
    return shards


def cache_folder() -> Path:
    """``$SHARDLAB_CACHE``, or ``~/.cache/shardlab``, or a temporary folder."""
    folder = Path(os.environ.get("SHARDLAB_CACHE", "~/.cache/shardlab")).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    fallback = Path(tempfile.gettempdir()) / f"shardlab-{os.getuid()}"
    fallback.mkdir(exist_ok=True)
    return fallback


def cached(name: str) -> Path:
    """Where `shardlab data fetch NAME` puts a data set, and "auto" looks for it."""
    return cache_folder() / "data" / name


def kept_proofs() -> Path:
    """Where `shardlab compare` keeps proofs that passed."""
    return cache_folder() / "proofs"


def is_downloaded(name: str) -> bool:
    return described(cached(name)) is not None


def downloaded(name: str) -> Path:
    """The folder of a data set that was asked for by its name."""
    if is_downloaded(name):
        return cached(name)
    here = f" (for the {name} in this folder, write ./{name})" if Path(name).exists() else ""
    raise UsageError(
        f"{name} has not been downloaded: run `shardlab data fetch {name}`, or name a file or "
        f"folder of it with data.source, or use data.source=synthetic{here}"
    )


def absent(name: str) -> str:
    """Why "auto" stands for something else than a data set."""
    return f"{name} has not been downloaded: shardlab data fetch {name}"


def refuse_other_words(source: str, known: tuple[str, ...], workload: str) -> None:
    """Refuse a word for data of another kind, such as images for a language model."""
    if source in DATA_WORDS and source not in (AUTO, SYNTHETIC, *known):
        raise UsageError(
            f"{workload} does not read '{source}'; its data.source is a file or folder, or one of "
            f"{', '.join((AUTO, SYNTHETIC, *known))}"
        )


class _File(TypedDict, total=False):
    bytes: int
    sha256: str


class _Description(TypedDict, total=False):
    """What is checked of a ``dataset.json``; it may say more."""

    name: str
    kind: str
    tokenizer: str
    source: str
    tokens: int
    vocab: int
    documents: int
    skipped_files: int
    classes: int
    shards: dict[str, int]
    samples: dict[str, int]
    files: dict[str, _File]


def described(folder: Path) -> dict[str, Any] | None:
    """What a folder's ``dataset.json`` says: written last, so a folder without is not complete."""
    path = folder / DESCRIPTION
    if not path.is_file():
        return None
    try:
        text = path.read_bytes()
        content: dict[str, Any] = json.loads(text)
        convert(content, _Description)  # for its checks alone: it leaves out other keys
    except (ValueError, RecursionError, OSError) as error:
        raise UsageError(f"{path} is damaged: {error}") from None
    return content


# Compression makes text three times smaller, logs fifty times, and a bomb a thousand times.
MOST_TIMES = 200  # a file may unpack to this many times its size
SMALL = 64 << 20  # bytes; up to this any ratio is allowed
MOST = 4 << 30  # bytes; more would not fit into the memory of a usual machine


def gunzip(path: Path) -> bytes:
    """The bytes that a gzip file stands for, up to a bound: it may be a bomb.

    Raises ``zlib.error``, ``EOFError`` or ``gzip.BadGzipFile`` if it is damaged.
    """
    size = path.stat().st_size
    if not path.is_file():  # a pipe would wait for whoever writes into it
        raise gzip.BadGzipFile(f"{path} is not a regular file")
    most = min(MOST, max(SMALL, MOST_TIMES * size))
    unpacked = bytearray()
    with gzip.open(path) as file:
        while part := file.read(4 << 20):
            unpacked += part
            if len(unpacked) > most:
                raise UsageError(
                    f"{path} has {size:,} bytes and unpacks to more than {most:,}; if that is "
                    "right, unpack it yourself and name the result"
                )
    return bytes(unpacked)


def _stdlib_text() -> bytes:
    """The first 8 MiB of the standard library's source, in path order, NUL between files."""
    root = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = sorted(set(subfolders) - _NOT_TEXT)
        for name in sorted(files):
            if name.endswith(".py") and len(text) < STDLIB_BYTES:
                text += Path(folder, name).read_bytes() + b"\0"
    if len(text) < 1 << 20:
        raise UsageError(
            f"this Python has no source text under {root}; name token shards with data.source"
        )
    return bytes(text[:STDLIB_BYTES])


def stdlib_shard() -> Path:
    """The standard library's text as a token shard (a byte is a token), made once per Python."""
    from shardlab.data import tokens

    version = ".".join(map(str, sys.version_info[:3]))
    path = cache_folder() / f"stdlib-{version}-bytes.bin"
    if not path.exists():
        tokens.write_shard(path, memoryview(_stdlib_text()))
    return path
