"""Compressed files, unpacked up to a bound: a few kilobytes can stand for many gigabytes."""

from __future__ import annotations

import zlib
from pathlib import Path

from shardlab.errors import UsageError

# Text shrinks to a third, logs to a fiftieth; a bomb to a thousandth. What is small is unpacked
# whatever its ratio, and nothing beyond what the memory of a usual machine can hold.
MOST_TIMES = 200
SMALL = 64 << 20
MOST = 4 << 30
PIECE = 4 << 20  # bytes unpacked at a time


def gunzip(path: Path, content: bytes) -> bytes:
    """The bytes that a gzip file stands for. Raises ``zlib.error`` or ``EOFError`` if damaged."""
    size = len(content)
    most = min(MOST, max(SMALL, MOST_TIMES * size))
    parts: list[bytes] = []
    total = 0
    while content.strip(b"\0"):  # one member after another; zeros may follow the last
        unpacking = zlib.decompressobj(wbits=31)
        while not unpacking.eof:
            part = unpacking.decompress(content, PIECE)
            content = unpacking.unconsumed_tail
            if not part and not content and not unpacking.eof:
                raise EOFError("it ends too early")
            total += len(part)
            if total > most:
                raise UsageError(
                    f"{path} has {size:,} bytes and unpacks to more than {most:,}; if that is "
                    "right, unpack it yourself and name the result"
                )
            parts.append(part)
        content = unpacking.unused_data
    return b"".join(parts)


def inflate(content: bytes, size: int) -> bytes:
    """A zlib stream that should have ``size`` bytes; of a longer one, one byte more."""
    return zlib.decompressobj().decompress(content, size + 1)
