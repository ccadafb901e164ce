"""GPT-2's byte-pair encoding: tiktoken's where that is installed, the same in Python elsewhere.

From a vocabulary file in either case: nothing is downloaded here.
"""

from __future__ import annotations

import base64
import binascii
import itertools
import json
import re
import sys
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

from shardlab.errors import UsageError

GPT2_END = "<|endoftext|>"
LIMIT = 1 << 16  # token ids that a shard can hold


@dataclass(frozen=True)
class Vocabulary:
    ranks: dict[bytes, int]  # of the text's tokens; a lower one is merged first
    end: int  # the token between documents

    @property
    def size(self) -> int:
        return 1 + max(self.end, max(self.ranks.values()))


def read_vocabulary(path: Path) -> Vocabulary:
    """From ``encoder.json`` (on the hub, ``vocab.json``), a ``.tiktoken`` file, or their folder."""
    if path.is_dir():
        names = ("encoder.json", "vocab.json", "gpt2.tiktoken", "r50k_base.tiktoken")
        found = [path / name for name in names if (path / name).is_file()]
        if not found:
            raise UsageError(f"{path} holds no vocabulary: none of {', '.join(names)}")
        path = found[0]
    try:
        if path.suffix == ".tiktoken":
            ranks = _read_tiktoken(path)
            end = len(ranks)
        else:
            entries = json.loads(path.read_text(encoding="utf-8"))
            byte_of = {char: byte for byte, char in _printable_bytes().items()}
            end = entries.pop(GPT2_END)
            ranks = {bytes(byte_of[c] for c in token): i for token, i in entries.items()}
        if wrong := [i for i in (end, *ranks.values()) if type(i) is not int or i < 0]:
            raise ValueError(f"{wrong[0]!r} is no token id")
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


def _read_tiktoken(path: Path) -> dict[bytes, int]:
    lines = path.read_bytes().splitlines()
    try:
        return {base64.b64decode(t): int(r) for t, r in (line.split() for line in lines if line)}
    except binascii.Error as error:
        raise ValueError(error) from None


def _printable_bytes() -> dict[int, str]:
    """How encoder.json writes a byte: as itself where it prints, else as a letter from 256 on."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(others)}


@cache
def word_pattern() -> re.Pattern[str]:
    r"""GPT-2's cut of a text into words, for Python's own ``re``.

    Its pattern speaks of Unicode's letters and numbers, which ``re`` cannot. Letters are
    word characters less the numbers; ``\d`` is decimal digits alone, so the other numbers (½, Ⅷ)
    are listed. White space is listed as well: ``\s`` has four control characters too many.
    """
    others = [c for c in map(chr, range(sys.maxunicode + 1)) if unicodedata.category(c) in _NUMBERS]
    listed = "".join(re.escape(c) for c in others)
    number, letter = rf"[\d{listed}]", rf"[^\W\d_{listed}]"
    space = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
    sign = rf"(?:(?!{letter}|{number})[^{space}])"
    return re.compile(
        rf"'(?:s|t|re|ve|m|ll|d)| ?{letter}+| ?{number}+| ?{sign}+|[{space}]+(?![^{space}])"
        rf"|[{space}]+"
    )


_NUMBERS = ("No", "Nl")
TIKTOKEN_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def python_encoder(vocabulary: Vocabulary) -> Callable[[str], list[int]]:
    """Byte-pair encoding as it is told in five lines: merge the pair of the lowest rank, again."""
    ranks = vocabulary.ranks

    @lru_cache(maxsize=1 << 16)
    def encode_word(word: bytes) -> tuple[int, ...]:
        parts = [word[i : i + 1] for i in range(len(word))]
        while len(parts) > 1:
            pairs = [ranks.get(a + b, LIMIT) for a, b in itertools.pairwise(parts)]
            lowest = min(pairs)
            if lowest == LIMIT:
                break
            i = pairs.index(lowest)
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        return tuple(ranks[part] for part in parts)

    def encode(text: str) -> list[int]:
        return [i for w in word_pattern().findall(text) for i in encode_word(w.encode())]

    return encode


def fast_encoder(vocabulary: Vocabulary) -> Callable[[str], list[int]]:
    """tiktoken's, if it is installed."""
    try:
        import tiktoken
    except ImportError:
        return python_encoder(vocabulary)
    encoding = tiktoken.Encoding(
        "gpt2", pat_str=TIKTOKEN_PATTERN, mergeable_ranks=vocabulary.ranks, special_tokens={}
    )
    encode: Callable[[str], list[int]] = encoding.encode_ordinary
    return encode
