"""`shardlab data`: downloads from a hub that misbehaves, local files, text."""

from __future__ import annotations

import base64
import gzip
import hashlib
import http.server
import itertools
import json
import multiprocessing
import os
import shutil
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import commands
import data_files
from data_files import lay_out
from shardlab.data import bpe, catalog, fetching, hub, images, sources, text, tokens
from shardlab.errors import UsageError

huggingface_hub = pytest.importorskip("huggingface_hub")
from huggingface_hub import constants, file_download  # noqa: E402

# ------------------------------------------------------------------ a hub


class Hub(socketserver.ThreadingTCPServer):
    """Answers as the Hugging Face Hub does, and misbehaves if asked to."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}  # by the path in the URL
        self.sent: dict[str, bytes] = {}  # instead of what was announced
        self.asked: list[tuple[str, str | None]] = []  # path, range
        self.cut_after: int | None = None  # bytes after which a connection is closed
        self.cuts = 0  # the number of connections that are still to be cut
        self.is_git = False  # publishes git's SHA-1, as of small files
        self.slow_s = 0.0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def put(self, name: str, contents: Sequence[bytes], shards: int = 1) -> None:
        entry = catalog.entry(name, shards)
        for file, content in zip(entry.files, contents, strict=True):
            self.files[path_of(entry, file)] = content


def path_of(entry: catalog.Entry, file: str) -> str:
    kind = "/datasets" if entry.repo_type == "dataset" else ""
    return f"{kind}/{entry.repo}/resolve/main/{file}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._head(self.server.files.get(self.path), 0)

    def do_GET(self) -> None:
        server, wanted = self.server, self.headers.get("Range")
        if "/resolve/" in self.path:  # the library also asks about itself
            server.asked.append((self.path, wanted))
        body = server.sent.get(self.path, server.files.get(self.path))
        start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted else 0
        self._head(body, start)
        if body is None:
            return
        time.sleep(server.slow_s)
        part = body[start:]
        if server.cut_after is not None and server.cuts:
            server.cuts -= 1
            part = part[: server.cut_after]
            self.close_connection = True
        self.wfile.write(part)

    def _head(self, body: bytes | None, start: int) -> None:
        if body is None:
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        announced = self.server.files[self.path]
        etag = hashlib.sha256(announced).hexdigest()
        if self.server.is_git:
            etag = hashlib.sha1(b"blob %d\0" % len(announced) + announced).hexdigest()
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        self.send_header("X-Repo-Commit", "c" * 40)
        self.send_header("ETag", f'"{etag}"')
        self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()

    def log_message(self, *_: Any) -> None: ...


def names(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir()}


def forget_connections() -> None:
    """The hub's library keeps its connections, and the proxies that it began with."""
    huggingface_hub.close_session()


@pytest.fixture(autouse=True)
def _own_caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("SHARDLAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)  # processes that a test starts read it
    for name in ("no_proxy", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    forget_connections()
    yield
    forget_connections()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Everything is fetched from it, and cached under tmp_path."""
    with Hub() as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        monkeypatch.setattr(file_download.time, "sleep", lambda _s: None)
        yield running
        running.shutdown()
        thread.join()


# ------------------------------------------------------------------ a data set


def serve_fashion(server: Hub) -> tuple[str, str]:
    """The paths of its two files."""
    server.put("fashion_mnist", [data_files.png_rows(5, seed) for seed in (0, 1)])
    first, second = server.files
    return first, second


def test_images_of_the_hub(server: Hub) -> None:
    """PNG in parquet becomes idx, pixel by pixel, and is fetched once."""
    serve_fashion(server)
    result = fetching.fetch(catalog.entry("fashion_mnist"))
    assert result["new"]
    assert result["samples"] == {"train": 5, "test": 5}
    loaded = images.load("fashion_mnist", split="test")
    pixels, labels = data_files.pixels(5, (1, 28, 28), 1)
    assert np.array_equal(loaded.images, pixels)
    assert loaded.labels.tolist() == labels
    assert names(Path(result["folder"])) == {*data_files.mnist(), "dataset.json"}
    server.asked.clear()
    assert not fetching.fetch(catalog.entry("fashion_mnist"))["new"]
    assert server.asked == []


def test_cifar10_of_the_hub(server: Hub) -> None:
    """In colours; the column is called img."""
    shape = (3, 32, 32)
    server.put("cifar10", [data_files.png_rows(4, seed, shape, "img") for seed in (0, 1)])
    assert fetching.fetch(catalog.entry("cifar10"))["samples"] == {"train": 4, "test": 4}
    loaded = images.load("cifar10", split="train")
    assert np.array_equal(loaded.images, data_files.pixels(4, shape, 0)[0])


def test_files_that_had_come_are_not_fetched_again(server: Hub) -> None:
    _, last = serve_fashion(server)
    kept = server.files.pop(last)
    with pytest.raises(UsageError, match=r"the server answers 404 \(RemoteEntryNotFoundError\)"):
        fetching.fetch(catalog.entry("fashion_mnist"))
    with pytest.raises(UsageError, match="has not been downloaded"):
        images.load("fashion_mnist")
    assert not sources.cached("fashion_mnist").exists()
    server.files[last] = kept
    server.asked.clear()
    fetching.fetch(catalog.entry("fashion_mnist"))
    assert [path for path, _ in server.asked] == [last]


def test_what_is_in_the_hubs_cache_needs_no_network(
    server: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve_fashion(server)
    fetching.fetch(catalog.entry("fashion_mnist"))
    shutil.rmtree(sources.cached("fashion_mnist"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert fetching.fetch(catalog.entry("fashion_mnist"))["new"]


def test_a_cut_connection(server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The download continues where it was cut."""
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 100_000)  # instead of 10 MB
    shards = [data_files.shard([*range(i, 50_000 + i)] * 10) for i in range(2)]
    server.put("fineweb", shards)
    server.cut_after, server.cuts = 300_000, 2
    assert fetching.fetch(catalog.entry("fineweb"), tmp_path / "fw")["tokens"] == 1_000_000
    assert [wanted for _, wanted in server.asked] == [
        None, "bytes=300000-", "bytes=600000-", None
    ]  # fmt: skip
    assert [f.read_bytes() for f in sorted((tmp_path / "fw").glob("*.bin"))] == shards[::-1]


@pytest.mark.parametrize("is_git", [False, True], ids=["sha256", "git's sha1"])
def test_a_wrong_checksum_leaves_nothing(is_git: bool, server: Hub, tmp_path: Path) -> None:
    server.is_git = is_git
    entries = json.dumps(data_files.vocabulary()).encode()
    server.put("gpt2_vocab", [entries])
    (path,) = server.files
    server.sent[path] = entries.replace(b"ab", b"ba")
    with pytest.raises(UsageError, match="is not what the hub announced: checksum"):
        fetching.fetch(catalog.entry("gpt2_vocab"), tmp_path / "vocab")
    assert not (tmp_path / "vocab").exists()
    server.sent.clear()
    assert fetching.fetch(catalog.entry("gpt2_vocab"), tmp_path / "vocab")["vocab"] == 258


def test_what_is_not_the_data_set_is_refused_and_removed(server: Hub) -> None:
    first, _ = serve_fashion(server)
    server.files[first] = b"<html>sign in</html>"
    with pytest.raises(UsageError, match=r"train.* does not hold images of shape \(1, 28, 28\)"):
        fetching.fetch(catalog.entry("fashion_mnist"))
    assert not sources.cached("fashion_mnist").exists()


def test_images_of_another_size_or_label_are_refused(server: Hub, tmp_path: Path) -> None:
    for content, message in (
        (data_files.png_rows(2, 0, (3, 28, 28)), "an image is RGB of 28 x 28"),
        (data_files.png_rows(2, 0, (1, 32, 32)), "an image is L of 32 x 32"),
        (data_files.png_rows(2, 0, label=300), "300 out of bounds"),
        (data_files.png_rows(2, 0, label=11), "labels from 0 to 11"),
        (data_files.png_rows(2, 0)[:-100], "does not hold images"),
    ):
        (tmp_path / "train.parquet").write_bytes(content)
        with pytest.raises(UsageError, match=message):
            fetching.fetch(catalog.entry("mnist"), tmp_path / "to", str(tmp_path / "train.parquet"))
        assert not (tmp_path / "to").exists()
    assert server.asked == []


def test_more_shards_are_added(server: Hub, tmp_path: Path) -> None:
    server.put("fineweb", [data_files.shard(range(i, i + 10)) for i in range(3)], shards=2)
    result = fetching.fetch(catalog.entry("fineweb", 1), tmp_path / "fw")
    assert result["tokens"] == 20
    server.asked.clear()
    result = fetching.fetch(catalog.entry("fineweb", 2), tmp_path / "fw")
    (last,) = server.asked
    assert last[0].endswith("/fineweb_train_000002.bin")
    assert result["shards"] == {
        "fineweb_train_000001.bin": 10, "fineweb_train_000002.bin": 10, "fineweb_val_000000.bin": 10
    }  # fmt: skip
    assert not fetching.fetch(catalog.entry("fineweb", 2), tmp_path / "fw")["new"]
    # Which cannot be read by a model with fewer tokens.
    shards = sources.find_shards(str(tmp_path / "fw"))
    with pytest.raises(UsageError, match="vocabulary of 50257 is larger than the model's of 256"):
        tokens.TokenDataset(shards, 4, vocab=256)
    assert len(tokens.TokenDataset(shards, 4, vocab=50257)) == 7


@pytest.mark.parametrize(
    ("name", "package"), [("yelp", "pyarrow"), ("mnist", "PIL"), ("fineweb", "huggingface_hub")]
)
def test_nothing_is_fetched_that_cannot_be_read(
    name: str, package: str, server: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "find_spec", lambda wanted: None if wanted == package else wanted)
    with pytest.raises(
        UsageError, match=rf"fetching {name} needs {package}: pip install 'shardlab\[hub\]'"
    ):
        fetching.fetch(catalog.entry(name))
    assert server.asked == []


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server that takes connections and never says a word. The test waits less than a user
    does, who waits for 10 seconds."""
    monkeypatch.setattr(hub, "TIMEOUT_S", 0.5)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(100)  # the system takes them; we accept none
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


@pytest.mark.long
@pytest.mark.parametrize("variable", ["https_proxy", "HF_ENDPOINT"])
def test_a_proxy_or_hub_without_an_answer(
    variable: str, silent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command says so in a line, within seconds."""
    began = time.monotonic()
    done = commands.here("data", "fetch", "mnist", cwd=tmp_path, **{variable: silent})
    assert done.returncode == 2, done.stdout
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: mnist cannot be had now (")
    assert "no answer in time" in line
    assert "shardlab data fetch mnist --from PATH" in line
    monkeypatch.setenv(variable, silent)
    with pytest.raises(hub.Unreachable, match="no answer in time"):
        hub.refuse_unreachable("somebody/something")
    assert time.monotonic() - began < 20


def fetch_fashion(url: str, cache: str) -> bool:
    os.environ |= {"HF_ENDPOINT": url, "SHARDLAB_CACHE": cache}
    constants.HF_HUB_CACHE = f"{cache}/hub"
    return bool(fetching.fetch(catalog.entry("fashion_mnist"))["new"])


@pytest.mark.long
def test_two_processes_fetch_it_once(server: Hub, tmp_path: Path) -> None:
    serve_fashion(server)
    server.slow_s = 0.2
    context = multiprocessing.get_context("spawn")
    with context.Pool(2) as pool:
        jobs = [
            pool.apply_async(fetch_fashion, (server.url, str(tmp_path / "cache"))) for _ in range(2)
        ]
        assert sorted(job.get(timeout=60) for job in jobs) == [False, True]
    assert len(server.asked) == 2
    assert names(tmp_path / "cache" / "data") == {"fashion_mnist"}


# ------------------------------------------------------------------ local files


def test_from_a_file_or_folder_at_hand(server: Hub, tmp_path: Path) -> None:
    lay_out(data_files.mnist(7, 7), tmp_path / "idx" / "raw")
    for split in ("train", "test"):
        data = {f"mnist/{split}-00000-of-00001.parquet": data_files.png_rows(7, 0)}
        lay_out(data, tmp_path / "hubs")
    for source in ("idx", "hubs"):
        to = tmp_path / f"to-{source}"
        result = fetching.fetch(catalog.entry("mnist"), to, str(tmp_path / source))
        assert result["samples"]["train"] == 7
        assert names(to) == {*data_files.mnist(), "dataset.json"}
    assert server.asked == []
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="holds none of train"):
        fetching.fetch(catalog.entry("mnist"), tmp_path / "no", str(tmp_path / "empty"))
    with pytest.raises(UsageError, match="no such path"):
        fetching.fetch(catalog.entry("mnist"), tmp_path / "no", str(tmp_path / "nope"))
    assert not (tmp_path / "no").exists()


def test_the_commands(server: Hub, tmp_path: Path) -> None:
    serve_fashion(server)
    done = commands.here("data", "fetch", "fashion_mnist", "--out", "here", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "fashion_mnist: 5 train and 5 test images, 10 classes" in done.stdout
    assert "fetching zalando-datasets/fashion_mnist/fashion_mnist/test-00000" in done.stderr
    done = commands.here("data", "show", "here", "--json", cwd=tmp_path)
    assert json.loads(done.stdout)["source"] == "hub"

    nobody = "http://127.0.0.1:9"
    done = commands.here("data", "fetch", "fineweb", cwd=tmp_path, HF_ENDPOINT=nobody)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: fineweb cannot be had now (http://127.0.0.1:9: ")
    assert "Connection refused" in line
    assert "instead: make shards of text that you have: shardlab data text PATH" in line
    assert not (tmp_path / "cache" / "data").is_dir() or names(tmp_path / "cache/data") == set()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fetch", "fineweb", "--shards", "104"], "1 to 103 shards"),
        (["fetch", "mnist", "--shards", "2"], "--shards is for fineweb"),
        (["fetch", "minst"], "did you mean 'mnist'"),
        (["show", "nowhere"], "no folder nowhere"),
        (["text", "nope.txt", "--out", "x"], "no such file or folder: nope.txt"),
        (["text", ".", "--out", "x", "--tokenizer", "gtp2"], "did you mean 'gpt2'"),
        (["text", ".", "--out", "x", "--tokenizer", "gpt2"], "shardlab data fetch gpt2_vocab"),
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
    assert names(tmp_path) - {"cache"} == {"b.txt", "full"}


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
