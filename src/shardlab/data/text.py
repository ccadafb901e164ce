"""From text files to token shards: bytes, or GPT-2's byte-pair encoding.

The encoding is tiktoken's where that is installed and the same in plain Python elsewhere, from
a vocabulary file in either case: nothing is downloaded here. Work is spread over processes; the
shards do not depend on their number.
"""

from __future__ import annotations

import base64
import binascii
import gzip
import itertools
import json
import multiprocessing
import os
import re
import shutil
import sys
import unicodedata
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardlab.data import sources
from shardlab.errors import UsageError, unknown
from shardlab.record import write_json

Tokens = npt.NDArray[np.uint16]

TOKENIZERS = ("auto", "bytes", "gpt2")
SHARD_TOKENS = 100_000_000
PIECE = 1 << 20  # characters that a process gets at a time
BYTES_END = 0  # between documents, as in the embedded text
GPT2_END = "<|endoftext|>"
LIMIT = 1 << 16  # token ids that a shard can hold


# ------------------------------------------------------------------ GPT-2's encoding


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
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
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


# ------------------------------------------------------------------ documents


def find_documents(paths: Iterable[Path]) -> list[Path]:
    """The files named, and all in the folders named, in name order; hidden ones are left out."""
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            for folder, subfolders, names in os.walk(path):
                subfolders[:] = sorted(s for s in subfolders if not s.startswith("."))
                files += [Path(folder, n) for n in sorted(names) if not n.startswith(".")]
        elif path.is_file():
            files.append(path)
        else:
            raise UsageError(f"no such file or folder: {path}")
    if not files:
        raise UsageError("there is no file in " + ", ".join(map(str, paths)))
    return files


def read_documents(path: Path) -> list[str] | None:
    """The documents of a file: one, or one for each line of JSON lines. None: it is not text."""
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
        text = content.decode("utf-8")
    except (UnicodeDecodeError, gzip.BadGzipFile, EOFError, zlib.error):
        return None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    if "\0" in text:
        return None
    if path.name.removesuffix(".gz").endswith(".jsonl"):
        try:
            return [str(json.loads(line)["text"]) for line in text.splitlines() if line.strip()]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise UsageError(f"{path}: a line is not JSON with a 'text': {error!r}") from None
    return [text]


_CUT = re.compile(r"(?<=\S\n)(?=\S)")


def pieces(text: str, size: int) -> Iterator[str]:
    """The text in parts that can be encoded apart and give the same tokens.

    Cut only behind a single line break between two words: there the encoding cuts anyway.
    """
    start = 0
    while len(text) - start > size and (cut := _CUT.search(text, start + size)):
        yield text[start : cut.start()]
        start = cut.start()
    yield text[start:]


# ------------------------------------------------------------------ shards


_encode: Callable[[str], list[int]] | None = None  # of a worker process: none is bytes


def _start_worker(vocabulary: Vocabulary | None) -> None:
    global _encode
    _encode = None if vocabulary is None else fast_encoder(vocabulary)


def _work(piece: str) -> bytes:
    if _encode is None:
        return np.frombuffer(piece.encode(), dtype=np.uint8).astype("<u2").tobytes()
    return np.array(_encode(piece), dtype="<u2").tobytes()


class _Shards:
    """Collects tokens and writes a shard whenever one is full."""

    def __init__(self, folder: Path, size: int) -> None:
        self.folder, self.size = folder, size
        self.parts: list[Tokens] = []
        self.held = 0
        self.counts: dict[str, int] = {}

    def add(self, tokens: Tokens) -> None:
        while len(tokens):
            part = tokens[: self.size - self.held]
            self.parts.append(part)
            self.held += len(part)
            tokens = tokens[len(part) :]
            if self.held == self.size:
                self.flush()

    def flush(self) -> None:
        from shardlab.data.tokens import write_shard

        if self.held:
            name = f"shard_{len(self.counts):06d}.bin"
            write_shard(self.folder / name, np.concatenate(self.parts))
            self.counts[name] = self.held
            self.parts, self.held = [], 0


def choose_tokenizer(name: str, vocab: Path | None) -> Vocabulary | None:
    """GPT-2's if its vocabulary is at hand, else bytes (none), unless one was asked for."""
    if name not in TOKENIZERS:
        raise unknown("tokenizer", name, TOKENIZERS)
    if vocab is not None:
        if name == "bytes":
            raise UsageError("--vocab is for --tokenizer gpt2; a byte needs none")
        if not vocab.exists():
            raise UsageError(f"no such vocabulary: {vocab}")
        return read_vocabulary(vocab)
    cached = sources.cached("gpt2_vocab")
    if name != "bytes" and sources.described(cached):
        return read_vocabulary(cached)
    if name == "gpt2":
        raise UsageError(
            "GPT-2's vocabulary is not at hand: run `shardlab data gpt2_vocab`, or name "
            "encoder.json with --vocab"
        )
    return None


def make_shards(
    paths: list[Path],
    to: Path,
    *,
    tokenizer: str = "auto",
    vocab: Path | None = None,
    shard_tokens: int = SHARD_TOKENS,
    jobs: int | None = None,
    on_progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> dict[str, Any]:
    """Tokenise text files into a new folder of shards; returns its description.

    ``on_progress`` gets files done and files in all. The folder appears when it is complete.
    """
    if shard_tokens < 1:
        raise UsageError(f"--shard-tokens must be at least 1, got {shard_tokens}")
    if jobs is not None and jobs < 1:
        raise UsageError(f"--jobs must be at least 1, got {jobs}")
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise UsageError(f"{to} exists and is not an empty folder; choose another")
    vocabulary = choose_tokenizer(tokenizer, vocab)
    files = find_documents(paths)
    given = {path for path in paths if path.is_file()}
    part = to.with_name(f".{to.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        part.mkdir(parents=True)
        description = _fill(part, files, given, vocabulary, shard_tokens, jobs, on_progress)
        write_json(part / sources.DESCRIPTION, description)
        if to.exists():
            to.rmdir()
        part.rename(to)
    except OSError as error:
        raise UsageError(f"cannot write {to}: {error}") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return {"folder": str(to), **description}


def _fill(
    folder: Path,
    files: list[Path],
    given: set[Path],
    vocabulary: Vocabulary | None,
    shard_tokens: int,
    jobs: int | None,
    on_progress: Callable[[int, int], None],
) -> dict[str, Any]:
    shards = _Shards(folder, shard_tokens)
    end = np.array([BYTES_END if vocabulary is None else vocabulary.end], dtype=np.uint16)
    documents, skipped = 0, 0
    workers = jobs or os.cpu_count() or 1
    waiting: deque[tuple[Future[bytes] | None, int]] = deque()  # none: a document's end

    def take(limit: int) -> None:
        """Write what is ready, in order, until ``limit`` pieces are under way."""
        while len(waiting) > limit:
            future, done = waiting.popleft()
            shards.add(end if future is None else np.frombuffer(future.result(), dtype="<u2"))
            on_progress(done, len(files))

    with ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(vocabulary,),
    ) as pool:
        try:
            for done, path in enumerate(files, start=1):
                found = read_documents(path)
                if found is None:
                    if path in given:
                        raise UsageError(f"{path} is not UTF-8 text")
                    skipped += 1
                    continue
                for document in found:
                    for piece in pieces(document, PIECE):
                        waiting.append((pool.submit(_work, piece), done))
                    waiting.append((None, done))
                    documents += 1
                    take(8 * workers)
            take(0)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    shards.flush()
    if not shards.counts:
        raise UsageError("the files hold no text: " + ", ".join(str(f) for f in files[:3]))
    return {
        "name": "text",
        "kind": "tokens",
        "tokenizer": "bytes" if vocabulary is None else "gpt2",
        "vocab": 256 if vocabulary is None else vocabulary.size,
        "end_of_text": int(end[0]),
        "documents": documents,
        "skipped_files": skipped,  # not UTF-8 text
        "tokens": sum(shards.counts.values()),
        "shards": shards.counts,
    }
