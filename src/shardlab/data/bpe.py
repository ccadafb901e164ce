"""GPT-2's byte-pair encoding, by tiktoken, from a vocabulary file: nothing is downloaded here."""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shardlab.errors import UsageError

GPT2_END = "<|endoftext|>"
LIMIT = 1 << 16  # token ids that a shard can hold


@dataclass(frozen=True)
class Vocabulary:
    ranks: dict[bytes, int]  # by token; the pair of the lowest rank is merged first
    end: int  # the token between documents

    @property
    def size(self) -> int:
        return 1 + max(self.end, max(self.ranks.values()))


def read_vocabulary(path: Path) -> Vocabulary:
    """Read ``encoder.json`` (on the hub, ``vocab.json``), a ``.tiktoken`` file, or their folder."""
    if path.is_dir():
        names = ("encoder.json", "vocab.json", "gpt2.tiktoken", "r50k_base.tiktoken")
        found = [path / name for name in names if (path / name).is_file()]
        if not found:
            raise UsageError(f"{path} holds no vocabulary: none of {', '.join(names)}")
        path = found[0]
    try:
        if path.suffix == ".tiktoken":
            pairs = (line.split() for line in path.read_bytes().splitlines() if line)
            ranks = {base64.b64decode(token): int(rank) for token, rank in pairs}
            end = len(ranks)
        else:
            entries = json.loads(path.read_text(encoding="utf-8"))
            byte_of = {char: byte for byte, char in _printable_bytes().items()}
            end = entries.pop(GPT2_END)
            ranks = {bytes(byte_of[c] for c in token): i for token, i in entries.items()}
        if wrong := [i for i in (end, *ranks.values()) if type(i) is not int or i < 0]:
            raise ValueError(f"{wrong[0]!r} is not a token id")
        if twice := [i for i, times in Counter(ranks.values()).items() if times > 1]:
            raise ValueError(f"{twice[0]} is the id of two tokens")
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise UsageError(f"{path} is not a vocabulary of GPT-2's kind: {error!r}") from None
    if missing := [b for b in range(256) if bytes([b]) not in ranks]:
        raise UsageError(f"{path} is not a byte-level vocabulary: byte {missing[0]} has no token")
    vocabulary = Vocabulary(ranks, end)
    if vocabulary.size > LIMIT:
        raise UsageError(
            f"{path} has token ids up to {vocabulary.size - 1}; a shard holds uint16, up to "
            f"{LIMIT - 1}"
        )
    return vocabulary


def _printable_bytes() -> dict[int, str]:
    """How encoder.json writes a byte: as itself where it prints, else as a letter from 256 on."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(others)}


# How GPT-2 cuts a text into words before it merges their bytes.
PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def encoder(vocabulary: Vocabulary) -> Callable[[str], list[int]]:
    """A function that makes the tokens of a text."""
    try:
        import tiktoken
    except ImportError:
        raise UsageError(
            "GPT-2's tokens need tiktoken: pip install 'shardlab[text]', or use --tokenizer bytes"
        ) from None
    encoding = tiktoken.Encoding(
        "gpt2", pat_str=PATTERN, mergeable_ranks=vocabulary.ranks, special_tokens={}
    )
    encode: Callable[[str], list[int]] = encoding.encode_ordinary
    return encode
