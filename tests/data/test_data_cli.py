"""`shardlab data`: downloads against a server that misbehaves, local files, text."""

from __future__ import annotations

import base64
import gzip
import hashlib
import http.server
import itertools
import json
import multiprocessing
import os
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import commands
import data_files
from data_files import lay_out
from shardlab.data import bpe, catalog, download, images, obtaining, sources, text, tokens
from shardlab.errors import UsageError

# ------------------------------------------------------------------ a server


class Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.asked: list[tuple[str, str | None]] = []  # path, range
        self.cut_after: int | None = None  # bytes after which a connection is closed
        self.cuts = 0  # how many connections are still to be cut
        self.with_range = True
        self.slow_s = 0.0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        server, wanted = self.server, self.headers.get("Range")
        server.asked.append((self.path, wanted))
        body = server.files.get(self.path)
        if body is None:
            self.send_error(404)
            return
        tag = f'"{hashlib.md5(body).hexdigest()}"'
        start = 0
        fresh = self.headers.get("If-Range") in (None, tag)
        if wanted and server.with_range and fresh:
            start = int(wanted.removeprefix("bytes=").removesuffix("-"))
            if start >= len(body):
                self.send_error(416)
                return
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        else:
            self.send_response(200)
        self.send_header("ETag", tag)
        self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        time.sleep(server.slow_s)
        part = body[start:]
        if server.cut_after is not None and server.cuts:
            server.cuts -= 1
            part = part[: server.cut_after]
        self.wfile.write(part)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Server]:
    """Everything is fetched from it, and cached under tmp_path."""
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        monkeypatch.setenv(download.MIRROR, running.url)
        monkeypatch.setenv("SHARDLAB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(download.time, "sleep", lambda _s: None)
        yield running
        running.shutdown()
        thread.join()


URL = "https://example.org/some/file.bin"
PATH = "/example.org/some/file.bin"
BODY = bytes(range(256)) * 4000
SHA = hashlib.sha256(BODY).hexdigest()


def names(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir()}


# ------------------------------------------------------------------ one file


def test_a_file_comes_whole_and_is_checked(server: Server, tmp_path: Path) -> None:
    server.files[PATH] = BODY
    told: list[tuple[str, int, int | None]] = []
    target = tmp_path / "file.bin"
    got = download.fetch(URL, target, sha256=SHA, on_progress=lambda *event: told.append(event))
    assert got == SHA
    assert target.read_bytes() == BODY
    assert names(tmp_path) == {"file.bin"}
    assert told[0] == ("file.bin", 0, len(BODY))
    assert told[-1] == ("file.bin", len(BODY), len(BODY))


@pytest.mark.parametrize(
    ("with_range", "cut_after", "asked"),
    [
        (True, 300_000, [None, "bytes=300000-", "bytes=600000-"]),
        (False, 100_000, [None, "bytes=100000-"]),
    ],
)
def test_a_cut_connection(
    with_range: bool, cut_after: int, asked: list[str | None], server: Server, tmp_path: Path
) -> None:
    """It goes on where it was; a server without ranges sends it all again."""
    server.files[PATH] = BODY
    server.with_range, server.cut_after, server.cuts = with_range, cut_after, len(asked) - 1
    download.fetch(URL, tmp_path / "file.bin", sha256=SHA)
    assert server.asked == [(PATH, wanted) for wanted in asked]


def test_what_has_come_is_kept_for_the_next_run(server: Server, tmp_path: Path) -> None:
    server.files[PATH] = BODY
    server.cut_after, server.cuts = 100_000, download.ATTEMPTS
    target = tmp_path / "file.bin"
    with pytest.raises(download.Unreachable, match="400,000 bytes are kept, run it again"):
        download.fetch(URL, target, sha256=SHA)
    assert not target.exists()
    assert (tmp_path / "file.bin.part").stat().st_size == 400_000
    server.asked.clear()
    download.fetch(URL, target, sha256=SHA)
    assert server.asked == [(PATH, "bytes=400000-")]
    assert names(tmp_path) == {"file.bin"}


def test_a_file_that_changed_meanwhile_is_fetched_anew(server: Server, tmp_path: Path) -> None:
    server.files[PATH] = b"old" * 100_000
    server.cut_after, server.cuts = 1000, download.ATTEMPTS
    with pytest.raises(download.Unreachable):
        download.fetch(URL, tmp_path / "file.bin")
    server.files[PATH] = BODY
    download.fetch(URL, tmp_path / "file.bin", sha256=SHA)


def test_a_part_as_long_as_the_file_is_no_dead_end(server: Server, tmp_path: Path) -> None:
    server.files[PATH] = BODY
    (tmp_path / "file.bin.part").write_bytes(BODY + b"more")
    (tmp_path / "file.bin.part.tag").write_text(f'"{hashlib.md5(BODY).hexdigest()}"')
    download.fetch(URL, tmp_path / "file.bin", sha256=SHA)
    assert [wanted for _, wanted in server.asked] == [f"bytes={len(BODY) + 4}-", None]


def test_a_wrong_checksum_leaves_nothing(server: Server, tmp_path: Path) -> None:
    server.files[PATH] = BODY[:-1] + b"x"
    with pytest.raises(UsageError, match="is not what was expected: sha256"):
        download.fetch(URL, tmp_path / "file.bin", sha256=SHA)
    assert names(tmp_path) == set()


def test_not_found_leaves_nothing(server: Server, tmp_path: Path) -> None:
    with pytest.raises(download.Unreachable, match="answers 404"):
        download.fetch(URL, tmp_path / "new" / "file.bin")
    assert not (tmp_path / "new").exists()
    assert len(server.asked) == 1  # it will not be there the next moment


def test_mirrors(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = "https://huggingface.co/datasets/a/b"
    monkeypatch.delenv(download.MIRROR, raising=False)
    monkeypatch.setenv(download.HUB, "https://mirror.example/")
    assert download.resolve(hub) == "https://mirror.example/datasets/a/b"
    assert download.resolve(URL) == URL
    monkeypatch.setenv(download.MIRROR, "http://x/y/")
    assert download.resolve(hub) == "http://x/y/huggingface.co/datasets/a/b"


# ------------------------------------------------------------------ a data set


FASHION = "/fashion-mnist.s3-website.eu-central-1.amazonaws.com"


def serve_fashion(server: Server) -> None:
    for name, content in data_files.zipped(data_files.mnist()).items():
        server.files[f"{FASHION}/{name}"] = content


def test_a_data_set_is_there_when_it_is_complete(server: Server) -> None:
    serve_fashion(server)
    result = obtaining.obtain(catalog.entry("fashion_mnist"))
    assert result["new"]
    assert result["samples"] == {"train": 5, "test": 5}
    assert len(images.load("fashion_mnist", split="test").labels) == 5
    server.asked.clear()
    assert not obtaining.obtain(catalog.entry("fashion_mnist"))["new"]
    assert server.asked == []


def test_files_that_had_come_are_not_fetched_again(server: Server) -> None:
    serve_fashion(server)
    last = f"{FASHION}/t10k-labels-idx1-ubyte.gz"
    kept = server.files.pop(last)
    with pytest.raises(UsageError, match="answers 404"):
        obtaining.obtain(catalog.entry("fashion_mnist"))
    with pytest.raises(UsageError, match="has not been downloaded"):
        images.load("fashion_mnist")
    server.files[last] = kept
    server.asked.clear()
    obtaining.obtain(catalog.entry("fashion_mnist"))
    assert [path for path, _ in server.asked] == [last]


def test_the_first_downloads_checksum_holds(server: Server) -> None:
    """Of a data set without a published one."""
    serve_fashion(server)
    folder = Path(obtaining.obtain(catalog.entry("fashion_mnist"))["folder"])
    name = "train-labels-idx1-ubyte.gz"
    (folder / name).unlink()
    server.files[f"{FASHION}/{name}"] = gzip.compress(data_files.idx(np.zeros(5)))
    with pytest.raises(UsageError, match="is not what was expected"):
        obtaining.obtain(catalog.entry("fashion_mnist"))
    assert not (folder / name).exists()


def test_what_is_not_the_data_set_is_refused_and_removed(server: Server) -> None:
    serve_fashion(server)
    server.files[f"{FASHION}/train-images-idx3-ubyte.gz"] = b"<html>sign in</html>"
    with pytest.raises(UsageError, match="is not an idx file of bytes: it begins with b'<htm'"):
        obtaining.obtain(catalog.entry("fashion_mnist"))
    assert not sources.cached("fashion_mnist").exists()


def test_more_shards_are_added(server: Server, tmp_path: Path) -> None:
    base = "/huggingface.co/datasets/kjj0/fineweb10B-gpt2/resolve/main"
    for i, name in enumerate(("val_000000", "train_000001", "train_000002")):
        server.files[f"{base}/fineweb_{name}.bin"] = data_files.shard(range(i, i + 10))
    result = obtaining.obtain(catalog.entry("fineweb", 1), tmp_path / "fw")
    assert result["tokens"] == 20
    server.asked.clear()
    result = obtaining.obtain(catalog.entry("fineweb", 2), tmp_path / "fw")
    assert [path for path, _ in server.asked] == [f"{base}/fineweb_train_000002.bin"]
    assert result["shards"] == {
        "fineweb_train_000001.bin": 10, "fineweb_train_000002.bin": 10, "fineweb_val_000000.bin": 10
    }  # fmt: skip
    # Which cannot be read by a model with fewer tokens.
    shards = sources.find_shards(str(tmp_path / "fw"))
    with pytest.raises(UsageError, match="vocabulary of 50257 is larger than the model's of 256"):
        tokens.TokenDataset(shards, 4, vocab=256)
    assert len(tokens.TokenDataset(shards, 4, vocab=50257)) == 7


def fetch_fashion(url: str, cache: str) -> bool:
    os.environ |= {download.MIRROR: url, "SHARDLAB_CACHE": cache}
    return bool(obtaining.obtain(catalog.entry("fashion_mnist"))["new"])


CIFAR10 = "/www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"


def cifar10_archive(server: Server) -> catalog.Entry:
    """CIFAR-10 with one image in each batch, as its authors' archive."""
    body = data_files.archive(data_files.cifar10("cifar-10-batches-bin/"))
    server.files[CIFAR10] = body
    entry = catalog.entry("cifar10")
    file = catalog.File(entry.files[0].url, hashlib.sha256(body).hexdigest())
    return replace(entry, files=(file,))


@pytest.mark.parametrize("has_come", [False, True], ids=["fetched", "of a run that broke off"])
def test_an_archive_is_unpacked_and_removed(has_come: bool, server: Server) -> None:
    entry = cifar10_archive(server)
    if has_come:
        download.fetch(entry.files[0].url, sources.cached("cifar10") / entry.files[0].name)
        server.asked.clear()
    result = obtaining.obtain(entry)
    assert result["samples"] == {"train": 5, "test": 1}
    assert bool(server.asked) != has_come
    assert "cifar-10-binary.tar.gz" not in names(sources.cached("cifar10"))
    assert len(result["files"]) == 6


def test_a_damaged_archive_leaves_no_half(server: Server, tmp_path: Path) -> None:
    cifar10_archive(server)
    whole = server.files[CIFAR10]
    (tmp_path / "cut.tar.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UsageError, match=r"cut.tar.gz cannot be read"):
        obtaining.obtain(catalog.entry("cifar10"), None, str(tmp_path / "cut.tar.gz"))
    assert not sources.cached("cifar10").exists()


def test_parquet_is_not_fetched_where_it_cannot_be_read(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(obtaining, "find_spec", lambda _name: None)
    with pytest.raises(UsageError, match=r"needs pyarrow: pip install 'shardlab\[text\]'"):
        obtaining.obtain(catalog.entry("yelp"))
    assert server.asked == []


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """A server that takes connections, and never says a word. Nobody waits for it as long as a
    user does, 5 and 10 seconds."""
    monkeypatch.setattr(download, "CONNECT_S", 0.5)
    monkeypatch.setattr(download, "TIMEOUT_S", 0.5)
    for name in ("no_proxy", "NO_PROXY", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SHARDLAB_CACHE", str(tmp_path / "cache"))
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(100)  # the system takes them; we accept none
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


@pytest.mark.long
def test_a_proxy_or_hub_without_an_answer(silent: str, tmp_path: Path) -> None:
    """It is said in a line, within seconds, whoever asks."""
    began = time.monotonic()
    done = commands.here("data", "mnist", cwd=tmp_path, https_proxy=silent, http_proxy=silent)
    assert done.returncode == 2, done.stdout
    assert done.stderr.count("error: ") == 1
    assert "Traceback" not in done.stderr
    assert "no answer in time" in done.stderr.splitlines()[-1]
    assert "shardlab data mnist --from PATH" in done.stderr.splitlines()[-1]
    with pytest.raises(download.Unreachable, match="no answer in time"):
        download.refuse_unreachable(silent)
    assert time.monotonic() - began < 20


@pytest.mark.long
def test_two_processes_fetch_it_once(server: Server, tmp_path: Path) -> None:
    serve_fashion(server)
    server.slow_s = 0.2
    context = multiprocessing.get_context("spawn")
    with context.Pool(2) as pool:
        jobs = [
            pool.apply_async(fetch_fashion, (server.url, str(tmp_path / "cache"))) for _ in range(2)
        ]
        assert sorted(job.get(timeout=60) for job in jobs) == [False, True]
    assert len(server.asked) == 4
    assert names(tmp_path / "cache" / "data") == {"fashion_mnist"}  # no lock is left


# ------------------------------------------------------------------ local files


def test_from_a_file_or_folder_at_hand(server: Server, tmp_path: Path) -> None:
    lay_out(data_files.mnist(7, 7), tmp_path / "mine" / "raw")
    packed = data_files.archive(data_files.mnist(7, 7), "../../evil/")  # only the last name counts
    (tmp_path / "mnist.tar.gz").write_bytes(packed)
    for source in (tmp_path / "mine", tmp_path / "mnist.tar.gz"):
        to = tmp_path / f"to-{source.name}"
        result = obtaining.obtain(catalog.entry("mnist"), to, str(source))
        assert result["samples"]["train"] == 7
        assert names(to) == {*data_files.mnist(), "dataset.json"}
    assert not (tmp_path.parent / "evil").exists()
    assert server.asked == []
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="holds none of train-images"):
        obtaining.obtain(catalog.entry("mnist"), tmp_path / "no", str(tmp_path / "empty"))
    with pytest.raises(UsageError, match="no such path"):
        obtaining.obtain(catalog.entry("mnist"), tmp_path / "no", str(tmp_path / "nope"))
    assert not (tmp_path / "no").exists()


def test_the_commands(server: Server, tmp_path: Path) -> None:
    serve_fashion(server)
    done = commands.here("data", "fashion_mnist", "--out", "here", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "fashion_mnist: 5 train and 5 test images, 10 classes" in done.stdout
    assert "fetching t10k-images-idx3-ubyte.gz" in done.stderr
    done = commands.here("data", "show", "here", "--json", cwd=tmp_path)
    assert json.loads(done.stdout)["source"] == "hub"

    done = commands.here("data", "fineweb", cwd=tmp_path, SHARDLAB_MIRROR="http://127.0.0.1:9")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: fineweb cannot be had now (http://127.0.0.1:9/")
    assert "Connection refused" in line
    assert "instead: make shards of text that you have: shardlab data text PATH" in line
    assert not (tmp_path / "cache" / "data").is_dir() or names(tmp_path / "cache/data") == set()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fineweb", "--shards", "104"], "1 to 103 shards"),
        (["show", "nowhere"], "no folder nowhere"),
        (["text", "nope.txt", "--out", "x"], "no such file or folder: nope.txt"),
        (["text", ".", "--out", "x", "--tokenizer", "gtp2"], "did you mean 'gpt2'"),
        (["text", ".", "--out", "x", "--tokenizer", "gpt2"], "shardlab data gpt2_vocab"),
        (["text", ".", "--out", "x", "--jobs", "0"], "--jobs must be at least 1"),
    ],
)
def test_refusals(arguments: list[str], message: str, tmp_path: Path) -> None:
    done = commands.here("data", *arguments, cwd=tmp_path, SHARDLAB_CACHE=str(tmp_path / "c"))
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


# ------------------------------------------------------------------ text


MERGES = (b"th", b"he", b" t", b" th", b"the", b" the", b"in", b"er", b"\n\n", b"  ", b"1", b"19")


def vocabulary_file(folder: Path) -> Path:
    """With some merges of English."""
    path = folder / "encoder.json"
    path.write_text(json.dumps(data_files.vocabulary(MERGES)))
    return path


WORDS = b"ab\n 's1\x1c"
TEXTS = st.text(
    st.one_of(
        st.characters(codec="utf-8"),
        st.sampled_from(" \n\t'thersn19½Ⅷ²é_\x1c\x1f\x85\xa0\u2028漢"),
    ),
    max_size=60,
)


def test_gpt2_tokens_need_tiktoken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(
        UsageError, match=r"pip install 'shardlab\[text\]', or use --tokenizer bytes"
    ):
        text.choose_tokenizer("auto", vocabulary_file(tmp_path))
    assert text.choose_tokenizer("bytes", None) is None


@given(TEXTS)
@settings(max_examples=400, suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_words_are_cut_as_gpt2_cuts_them(sample: str) -> None:
    """No merge crosses a word, nothing is lost, and a lower rank is merged first."""
    pytest.importorskip("tiktoken")
    ranks = {bytes([b]): b for b in range(256)} | {b"th": 256, b" th": 257, b"he": 258}
    back = {i: token for token, i in ranks.items()}
    sample = sample.replace("'", "")  # behind it a "t" may be a word of its own
    encoded = bpe.encoder(bpe.Vocabulary(ranks, end=259))(sample)
    assert b"".join(back[i] for i in encoded) == sample.encode()
    assert encoded.count(256) + encoded.count(257) == sample.count("th")


@given(
    st.lists(st.sampled_from(["a", "b ", "\n", " ", "\n\n", "'s", "1", "\x1c"])), st.integers(1, 9)
)
def test_a_text_in_pieces_gives_the_same_tokens(parts: list[str], size: int) -> None:
    whole = "".join(parts)
    cut = list(text.pieces(whole, size))
    assert "".join(cut) == whole
    # Every pair of bytes that a word may hold is one token: a word that is cut is encoded anew.
    ranks = {bytes([b]): b for b in range(256)}
    ranks |= {bytes([a, b]): 256 + i for i, (a, b) in enumerate(itertools.product(WORDS, WORDS))}
    encode = bpe.encoder(bpe.Vocabulary(ranks, end=len(ranks)))
    assert [t for piece in cut for t in encode(piece)] == encode(whole)


def test_long_texts_are_cut() -> None:
    assert len(list(text.pieces("a word\n" * 1000, 100))) > 50


def write_texts(folder: Path) -> list[str]:
    """Three documents that count, in the order of their names, and some that do not."""
    first, second, third = "the first: 1999\n" * 50, "in\n\nthe second, é漢", "the last"
    files = {
        "a.txt": first.encode(),
        "b.txt.gz": gzip.compress(second.encode()),
        "sub/c.jsonl": data_files.json_lines([{"text": third}]),
        "binary.dat": b"\xff\xfe\x00",
        ".hidden": b"no",
    }
    lay_out(files, folder)
    return [first, second, third]


def read_back(folder: Path) -> list[int]:
    return [t for p in sources.find_shards(str(folder)) for t in tokens.open_shard(p).tolist()]


def test_bytes_are_read_back_equal(tmp_path: Path) -> None:
    documents = write_texts(tmp_path / "in")
    told: list[tuple[int, int]] = []
    result = text.make_shards(
        [tmp_path / "in"], tmp_path / "out", tokenizer="bytes", shard_tokens=100, jobs=1,
        on_progress=lambda *event: told.append(event),
    )  # fmt: skip
    assert bytes(read_back(tmp_path / "out")) == b"".join(d.encode() + b"\0" for d in documents)
    assert (result["documents"], result["skipped_files"], result["vocab"]) == (3, 1, 256)
    assert all(count == 100 for count in list(result["shards"].values())[:-1])
    assert told[-1] == (4, 4)
    described = {**(sources.described(tmp_path / "out") or {}), "folder": result["folder"]}
    assert described == {"schema": 1, **result}
    dataset = tokens.TokenDataset(sources.find_shards(str(tmp_path / "out")), 64, vocab=256)
    assert bytes(dataset.batch([0]).inputs[0].tolist()) == documents[0].encode()[:64]
    done = commands.here("data", "show", "out", cwd=tmp_path)
    assert "tokenizer bytes (vocabulary 256)" in done.stdout


def test_half_a_character_is_no_traceback(tmp_path: Path) -> None:
    """JSON can write one half of a surrogate pair, which no encoding has bytes for."""
    (tmp_path / "in.jsonl").write_text('{"text": "a\\ud800b"}')
    text.make_shards([tmp_path / "in.jsonl"], tmp_path / "out", tokenizer="bytes", jobs=1)
    assert bytes(read_back(tmp_path / "out")) == b"a?b\0"


def test_tokens_are_read_back_equal_for_any_number_of_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = write_texts(tmp_path / "in")
    vocab = vocabulary_file(tmp_path)
    results = []
    for jobs in (1, 2):
        monkeypatch.setattr(text, "PIECE", 100)
        to = tmp_path / f"out{jobs}"
        results.append(
            text.make_shards([tmp_path / "in"], to, vocab=vocab, shard_tokens=70, jobs=jobs)
        )
    assert read_back(tmp_path / "out1") == read_back(tmp_path / "out2")
    assert results[0]["tokenizer"] == "gpt2"
    vocabulary = bpe.read_vocabulary(vocab)
    encode = bpe.encoder(vocabulary)
    want = [t for d in documents for t in [*encode(d), vocabulary.end]]
    assert read_back(tmp_path / "out1") == want
    back = {i: token for token, i in vocabulary.ranks.items()}
    decoded = b"".join(back.get(t, b"|") for t in want)
    assert decoded.decode() == "".join(d + "|" for d in documents)
    assert len(want) < len(decoded)  # some bytes were merged


def test_nothing_is_left_of_a_refusal(tmp_path: Path) -> None:
    binary = tmp_path / "b.txt"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match=r"b.txt is not UTF-8 text"):
        text.make_shards([binary], tmp_path / "out", jobs=1)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    with pytest.raises(UsageError, match="exists and is not an empty folder"):
        text.make_shards([binary], tmp_path / "full")
    assert names(tmp_path) == {"b.txt", "full"}


def test_vocabularies(tmp_path: Path) -> None:
    entries = json.loads(vocabulary_file(tmp_path).read_text())
    for content, message in (
        ({**entries, "zzz": 70_000}, "token ids up to 70000; a shard holds uint16"),
        ({"a": 0, "<|endoftext|>": 1}, "byte 0 has no token"),
        ({**entries, "zz": 5}, "5 is the id of two tokens"),
        ([], "is not a vocabulary"),
    ):
        (tmp_path / "bad.json").write_text(json.dumps(content))
        with pytest.raises(UsageError, match=message):
            bpe.read_vocabulary(tmp_path / "bad.json")
    (tmp_path / "bad.json").unlink()
    vocabulary = bpe.read_vocabulary(tmp_path)
    lines = [f"{base64.b64encode(t).decode()} {r}" for t, r in vocabulary.ranks.items()]
    (tmp_path / "v.tiktoken").write_text("\n".join(lines))
    assert bpe.read_vocabulary(tmp_path / "v.tiktoken") == vocabulary
