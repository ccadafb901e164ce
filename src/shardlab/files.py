"""Files that are whole or absent, and strict JSON. No torch."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from shardlab.errors import Halt

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A place for what becomes ``path`` when it is whole: a reader never sees half a file."""
    part = path.with_name(path.name + ".part")
    if part.is_symlink():
        part.unlink()  # what it leads to is not ours
    try:
        yield part
        os.replace(part, path)  # noqa: PTH105
    finally:
        with suppress(OSError):
            shutil.rmtree(part) if part.is_dir() else part.unlink()


def text_of(path: Path) -> str:
    """The text of a regular file. Reading a pipe would wait for whoever writes into it."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return path.read_text(encoding="utf-8")


def write_text(path: Path, text: str) -> None:
    """Whole or not at all, on a full disk too."""
    with replacing(path) as part:
        part.write_text(text, encoding="utf-8", newline="\n")


def with_schema(value: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same with the version of its format, which is 1 unless it has one."""
    return value if "schema" in value else {"schema": 1, **value}


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    write_text(path, json_text(with_schema(value), indent=1) + "\n")


def json_text(value: Any, indent: int | None = None) -> str:
    """Strict JSON: it has no NaN or infinity, so a loss that is one becomes null."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return value


def append_to(path: Path) -> TextIO:
    """A file to append to. A link is not followed: what it leads to is not ours."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
    return os.fdopen(os.open(path, flags, 0o666), "a", encoding="utf-8")


def append_jsonl(path: Path, row: Mapping[str, Any]) -> None:
    with append_to(path) as file:
        file.write(json_text(row) + "\n")


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The rows of a file that may have been cut off in its last line."""
    rows: list[dict[str, Any]] = []
    if path.exists() and not path.is_file():
        return rows
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            break
        if not isinstance(row, dict):
            break
        rows.append(row)
    return rows


@contextmanager
def room_needed(rank: int) -> Iterator[None]:
    """A full disk ends a run with one sentence, not with a traceback."""
    try:
        yield
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        what = f": {error.filename}" if error.filename else ""
        raise Halt(
            "disk full",
            f"rank {rank} cannot write the run's files: {error.strerror}{what}. Checkpoints that "
            "are there are whole: make room, then continue with --resume",
            rank,
        ) from None
