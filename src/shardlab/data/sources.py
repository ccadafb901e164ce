"""Where data lies on this machine, found and checked without torch or numpy."""

from __future__ import annotations

import glob
import json
import os
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardlab.config import AUTO, STDLIB, located
from shardlab.errors import UsageError

__all__ = ["AUTO", "STDLIB", "located"]
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
    """Where `shardlab data NAME` puts a data set, and "auto" looks for it."""
    return cache_folder() / "data" / name


def described(folder: Path) -> dict[str, Any] | None:
    """What a folder's ``dataset.json`` says: written last, so a folder without is not complete."""
    path = folder / DESCRIPTION
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        raise UsageError(f"{path} is damaged: {error}") from None
    if not isinstance(content, dict):
        raise UsageError(f"{path} is damaged: not a JSON object")
    for key, kind in _FIELDS.items():
        if key in content and type(content[key]) is not kind:
            raise UsageError(f"{path} is damaged: '{key}' is no {kind.__name__}")
    for key in ("shards", "samples"):
        if not all(type(count) is int for count in content.get(key, {}).values()):
            raise UsageError(f"{path} is damaged: '{key}' are not all counts")
    return content


_FIELDS = {
    "name": str, "kind": str, "tokenizer": str, "source": str, "tokens": int, "vocab": int,
    "documents": int, "skipped_files": int, "classes": int, "shards": dict, "samples": dict,
    "files": dict,
}  # fmt: skip


def stdlib_text(limit: int = STDLIB_BYTES) -> bytes:
    """Up to ``limit`` bytes of the standard library's source, in path order, NUL between files."""
    root = Path(sysconfig.get_path("stdlib"))
    parts: list[bytes] = []
    size = 0
    for path in _python_files(root):
        parts.append(path.read_bytes() + b"\0")
        size += len(parts[-1])
        if size >= limit:
            break
    if size < 1 << 20:
        raise UsageError(
            f"this Python has no source text under {root}; name token shards with data.source"
        )
    return b"".join(parts)[:limit]


def _python_files(root: Path) -> Iterator[Path]:
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = sorted(set(subfolders) - _NOT_TEXT)
        yield from (Path(folder, name) for name in sorted(files) if name.endswith(".py"))


def stdlib_shard() -> Path:
    """The standard library's text as a token shard (a byte is a token), made once per Python."""
    from shardlab.data import tokens

    version = ".".join(map(str, sys.version_info[:3]))
    path = cache_folder() / f"stdlib-{version}-bytes.bin"
    if not path.exists():
        tokens.write_shard(path, memoryview(stdlib_text()))
    return path
