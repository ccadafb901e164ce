"""Bytes as people write them."""

from __future__ import annotations

import re

from shardlab.errors import UsageError

UNITS = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip


def parse_bytes(text: str, flag: str) -> int:
    """``24GB`` (powers of 1000), ``24GiB`` (of 1024), ``500 MB``, ``1e9``."""
    match = re.fullmatch(r"\s*([0-9.]+(?:e\+?[0-9]+)?)\s*([a-z]*)\s*", text.lower())
    try:
        size = int(float(match[1]) * UNITS[match[2]]) if match else 0
    except (KeyError, ValueError, OverflowError):
        size = 0
    if size < 1:
        raise UsageError(f"{flag} {text}: not a size, as in 24GB or 500MiB")
    return size
