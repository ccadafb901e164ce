"""Token shards in the FineWeb format, and the data set of fixed windows over them.

A shard is 256 int32 of header (magic 20240520, version 1, number of tokens), then the
tokens as uint16. Shards are memory-mapped: opening a terabyte costs nothing.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from shardlab.batch import Batch
from shardlab.data import sources
from shardlab.errors import UsageError

MAGIC = 20240520
VERSION = 1
HEADER = 256 * 4  # bytes

Tokens = npt.NDArray[np.uint16]


def write_shard(path: Path, tokens: Any) -> None:
    """Write token ids (0 to 65535) as one shard: whole, or not at all."""
    array = np.asarray(tokens)
    if array.size and not (int(array.min()) >= 0 and int(array.max()) < 1 << 16):
        raise ValueError("a shard holds token ids from 0 to 65535")
    header = np.zeros(256, dtype="<i4")
    header[:3] = MAGIC, VERSION, array.size
    # Another process may write the same shard: each writes its own file, the last rename wins.
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
    try:
        part.write_bytes(header.tobytes() + array.astype("<u2").tobytes())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def open_shard(path: Path) -> Tokens:
    """The tokens of a shard, memory-mapped. A file that is not one is refused with the reason."""
    try:
        size = path.stat().st_size
        with path.open("rb"):
            pass
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    if size < HEADER:
        raise UsageError(f"{path} is not a token shard: {size} bytes, its header alone is {HEADER}")
    magic, version, count = np.fromfile(path, dtype="<i4", count=3).tolist()
    if magic != MAGIC:
        raise UsageError(f"{path} is not a token shard: magic {magic}, not {MAGIC}")
    if version != VERSION:
        raise UsageError(f"{path} has shard version {version}; this reads version {VERSION}")
    held = (size - HEADER) / 2
    if held != count:
        raise UsageError(f"{path} is damaged: its header says {count} tokens, it holds {held:g}")
    if count == 0:
        return np.empty(0, dtype="<u2")  # an empty file cannot be mapped
    return np.memmap(path, dtype="<u2", mode="r", offset=HEADER, shape=(count,))


class TokenDataset:
    """Sample i is the window of ``seq_len`` tokens from i * seq_len on; its targets, the next ones.

    The shards are read as one stream, so a window may cross from one into the next.
    """

    def __init__(self, shards: Sequence[Path], seq_len: int, vocab: int) -> None:
        self.shards = [open_shard(path) for path in shards]
        self.paths = list(shards)
        self.ends = np.cumsum([len(s) for s in self.shards], dtype=np.int64)  # (shards,)
        self.seq_len = seq_len
        self.vocab = vocab
        known = sources.described(shards[0].parent)
        if known is not None and known.get("vocab", 0) > vocab:
            raise UsageError(
                f"{shards[0].parent} was made with the tokenizer {known.get('tokenizer')}, whose "
                f"vocabulary of {known['vocab']} is larger than the model's of {vocab}; give the "
                "model that one (model.options.vocab)"
            )
        if len(self) == 0:
            names = ", ".join(str(p) for p in shards)
            raise UsageError(
                f"{names}: {int(self.ends[-1])} tokens are too few for one sample of {seq_len}"
            )

    def __len__(self) -> int:
        return max(0, int(self.ends[-1]) - 1) // self.seq_len

    def batch(self, ids: Sequence[int]) -> Batch:
        windows = np.empty((len(ids), self.seq_len + 1), dtype=np.int64)
        for row, sample in zip(windows, ids, strict=True):
            row[:] = self.read(int(sample) * self.seq_len, self.seq_len + 1)
        if windows.size and (largest := int(windows.max())) >= self.vocab:
            raise UsageError(
                f"{self.paths[0].parent}: token {largest} is outside the model's vocabulary of "
                f"{self.vocab}; these shards want a larger one (model.options.vocab)"
            )
        stream = torch.from_numpy(windows)  # (batch, seq_len + 1)
        count = len(ids) * self.seq_len
        return Batch(inputs=stream[:, :-1], targets=stream[:, 1:], count=count, samples=len(ids))

    def read(self, start: int, count: int) -> Tokens:
        """``count`` tokens of the stream from position ``start``, over as many shards as needed."""
        parts: list[Tokens] = []
        shard = int(np.searchsorted(self.ends, start, side="right"))
        while count > 0:
            offset = start - (int(self.ends[shard]) - len(self.shards[shard]))
            part = self.shards[shard][offset : offset + count]
            parts.append(part)
            start, count, shard = start + len(part), count - len(part), shard + 1
        return parts[0] if len(parts) == 1 else np.concatenate(parts)
