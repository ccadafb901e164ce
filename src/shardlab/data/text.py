"""Makes token shards of text files: bytes, or GPT-2's byte-pair encoding.

Work is spread over threads; the shards do not depend on their number.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from shardlab.data import sources
from shardlab.data.bpe import Vocabulary, encoder, read_vocabulary
from shardlab.errors import UsageError, unknown
from shardlab.files import replacing, write_json

TOKENIZERS = ("auto", "bytes", "gpt2")
SHARD_TOKENS = 100_000_000
PIECE = 1 << 20  # characters that a thread gets at a time
BYTES_END = 0  # between documents, as in the embedded text


# ------------------------------------------------------------------ documents


def find_documents(paths: Iterable[Path]) -> list[Path]:
    """The files named, and all in the folders named, in name order; hidden ones are left out."""
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            for folder, subfolders, names in os.walk(path):
                subfolders[:] = sorted(s for s in subfolders if not s.startswith("."))
                found = (Path(folder, n) for n in sorted(names) if not n.startswith("."))
                files += [file for file in found if file.is_file()]
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
        content = sources.gunzip(path) if path.suffix == ".gz" else path.read_bytes()
        text = content.decode("utf-8")
    except (UnicodeDecodeError, EOFError, zlib.error, gzip.BadGzipFile):
        return None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    if "\0" in text:
        return None
    if path.name.removesuffix(".gz").endswith(".jsonl"):
        try:
            return [str(json.loads(line)["text"]) for line in text.splitlines() if line.strip()]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
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


def encode_bytes(text: str) -> bytes:
    """A token for each byte of the text; a token takes two bytes, as in a shard."""
    encoded = text.encode(errors="replace")  # JSON may hold half of a surrogate pair
    return np.frombuffer(encoded, dtype=np.uint8).astype("<u2").tobytes()


def choose_tokenizer(name: str, vocab: Path | None) -> Vocabulary | None:
    """GPT-2's vocabulary if it is wanted or at hand; None if a byte is a token."""
    if name not in TOKENIZERS:
        raise unknown("tokenizer", name, TOKENIZERS)
    if vocab is not None:
        if name == "bytes":
            raise UsageError("--vocab is for --tokenizer gpt2; a byte needs none")
        if not vocab.exists():
            raise UsageError(f"no such vocabulary: {vocab}")
    elif name != "bytes" and sources.described(cached := sources.cached("gpt2_vocab")):
        vocab = cached
    elif name == "gpt2":
        raise UsageError(
            "GPT-2's vocabulary is not at hand: run `shardlab data fetch gpt2_vocab`, or name "
            "encoder.json with --vocab"
        )
    else:
        return None
    vocabulary = read_vocabulary(vocab)
    encoder(vocabulary)  # if it cannot be made, it is refused before anything is written
    return vocabulary


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
    try:
        with replacing(to) as part:
            shutil.rmtree(part, ignore_errors=True)  # left by a process that was killed
            part.mkdir(parents=True)
            description = _fill(part, files, paths, vocabulary, shard_tokens, jobs, on_progress)
            write_json(part / sources.DESCRIPTION, description)
    except OSError as error:
        raise UsageError(f"cannot write {to}: {error}") from None
    return {"folder": str(to), **description}


def _fill(
    folder: Path,
    files: list[Path],
    given: list[Path],
    vocabulary: Vocabulary | None,
    shard_tokens: int,
    jobs: int | None,
    on_progress: Callable[[int, int], None],
) -> dict[str, Any]:
    from shardlab.data.tokens import write_shard

    encode, end_token = encode_bytes, BYTES_END
    if vocabulary is not None:
        tokens_of, end_token = encoder(vocabulary), vocabulary.end

        def encode(text: str) -> bytes:
            return np.array(tokens_of(text), dtype="<u2").tobytes()

    end = np.array([end_token], dtype="<u2").tobytes()
    documents, skipped = 0, 0
    threads = jobs or os.cpu_count() or 1
    waiting: deque[tuple[list[Future[bytes]], int]] = deque()  # documents, in pieces
    held = bytearray()  # tokens that are in no shard yet, two bytes each
    shards: dict[str, int] = {}  # tokens of each

    def write() -> None:
        name, tokens = f"shard_{len(shards):06d}.bin", held[: 2 * shard_tokens]
        write_shard(folder / name, np.frombuffer(tokens, dtype="<u2"))
        shards[name] = len(tokens) // 2
        del held[: len(tokens)]

    def take(limit: int) -> None:
        """Write what is ready, in order, until ``limit`` documents are under way."""
        while len(waiting) > limit:
            encoded, done = waiting.popleft()
            held.extend(b"".join(piece.result() for piece in encoded) + end)
            while len(held) >= 2 * shard_tokens:
                write()
            on_progress(done, len(files))

    with ThreadPoolExecutor(threads) as pool:  # tiktoken works outside of Python's lock
        for done, path in enumerate(files, start=1):
            found = read_documents(path)
            if found is None and path in given:
                raise UsageError(f"{path} is not UTF-8 text")
            skipped += found is None
            for document in found or []:
                documents += 1
                waiting.append(([pool.submit(encode, p) for p in pieces(document, PIECE)], done))
                take(8 * threads)
        take(0)
    if held:
        write()
    if not shards:
        raise UsageError("the files hold no text: " + ", ".join(str(f) for f in files[:3]))
    return {
        "name": "text",
        "kind": "tokens",
        "tokenizer": "bytes" if vocabulary is None else "gpt2",
        "vocab": 256 if vocabulary is None else vocabulary.size,
        "end_of_text": end_token,
        "documents": documents,
        "skipped_files": skipped,  # not UTF-8 text
        "tokens": sum(shards.values()),
        "shards": shards,
    }
