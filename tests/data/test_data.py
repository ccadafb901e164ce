"""Token shards, images and reviews in their published formats."""

from __future__ import annotations

import ast
import gzip
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import data_files
from data_files import idx, lay_out, mnist, table
from shardlab.data import images, reviews, sources
from shardlab.data.text import make_shards
from shardlab.data.tokens import HEADER, MAGIC, TokenDataset, open_shard, write_shard
from shardlab.errors import UsageError


def shards(folder: Path, *parts: list[int]) -> list[Path]:
    paths = [folder / f"{i:02d}.bin" for i in range(len(parts))]
    for path, part in zip(paths, parts, strict=True):
        write_shard(path, part)
    return paths


Read = Callable[[Path], object]


@pytest.fixture
def refused(tmp_path: Path) -> Callable[[Read, str, bytes, str], None]:
    """What is said of a file with this name and content names it, and has these words."""

    def check(read: Read, name: str, content: bytes, message: str) -> None:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UsageError) as caught:
            read(tmp_path / name)
        assert name in str(caught.value)
        assert message in str(caught.value)
        (tmp_path / name).unlink()

    return check


# ------------------------------------------------------------------ token shards


@given(st.lists(st.integers(0, 65535), max_size=300))
def test_a_shard_is_read_as_it_was_written(tokens: list[int]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (path,) = shards(Path(folder), tokens)
        assert open_shard(path).tolist() == tokens
        assert path.stat().st_size == HEADER + 2 * len(tokens)
        assert np.fromfile(path, "<i4", 3).tolist() == [MAGIC, 1, len(tokens)]
        assert list(Path(folder).iterdir()) == [path]  # no part of a file is left


def test_a_token_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="0 to 65535"):
        shards(tmp_path, [65536])
    assert list(tmp_path.iterdir()) == []


def test_damaged_shards_are_refused_by_name(refused: Any) -> None:
    good = data_files.shard(range(10))
    for content, message in (
        (good[:-4], "its header says 10 tokens, it holds 8"),
        (good[:-1], "it holds 9.5"),
        (good[:100], "100 bytes, its header alone is 1024"),
        (b"", "0 bytes"),
        (b"\0" * 4 + good[4:], "magic 0, not 20240520"),
        (good[:4] + b"\2\0\0\0" + good[8:], "shard version 2"),
        # As another program's overflow of the 32-bit count would leave it.
        (data_files.shard_header(-5) + good[HEADER:], "its header says -5 tokens"),
    ):
        refused(open_shard, "bad.bin", content, message)


def test_windows_cross_from_shard_to_shard(tmp_path: Path) -> None:
    dataset = TokenDataset(shards(tmp_path, [0, 1, 2], [], [3], [*range(4, 10)]), 3, vocab=10)
    assert len(dataset) == 3
    batch = dataset.batch([0, 1, 2])
    assert batch.inputs.tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert batch.targets.tolist() == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert (batch.count, batch.samples) == (9, 3)
    nothing = dataset.batch([])
    assert nothing.inputs.shape == (0, 3)
    assert (nothing.count, nothing.samples) == (0, 0)
    stream = iter(range(1000))
    many = [[next(stream) for _ in range(n)] for n in (0, 1, 0, 0, 2, 1, 0, 5, 1, 1, 0)]
    dataset = TokenDataset(shards(tmp_path, *many), seq_len=10, vocab=1000)
    assert dataset.batch([0]).targets.tolist() == [list(range(1, 11))]
    assert len(dataset) == 1


def test_what_the_model_cannot_read_is_refused(tmp_path: Path) -> None:
    paths = shards(tmp_path, [1, 2, 300, 4])
    with pytest.raises(UsageError, match="token 300 is outside the model's vocabulary of 256"):
        TokenDataset(paths, seq_len=3, vocab=256).batch([0])
    with pytest.raises(UsageError, match="4 tokens are too few for one sample of 4"):
        TokenDataset(paths, seq_len=4, vocab=256)


def test_positions_have_64_bits(tmp_path: Path) -> None:
    """Over 2^32 tokens in five shards of zeros, which take no space on disk; the windows behind
    them are found and read."""
    size = 1_000_000_000
    for i in range(5):
        with (tmp_path / f"{i}.bin").open("wb") as file:
            file.write(data_files.shard_header(size))
            file.truncate(HEADER + 2 * size)
    start = 2**32 // 1000 * 1000 - 4 * size
    with (tmp_path / "4.bin").open("r+b") as file:
        file.seek(HEADER + 2 * start)
        file.write(np.arange(100, 2101, dtype="<u2").tobytes())
    dataset = TokenDataset(sorted(tmp_path.iterdir()), seq_len=1000, vocab=50257)
    assert len(dataset) == (5 * size - 1) // 1000
    first = 2**32 // 1000
    batch = dataset.batch([first, first + 1, 2**31 // 1000])
    assert batch.inputs[0].tolist() == list(range(100, 1100))
    assert batch.targets[1].tolist() == list(range(1101, 2101))
    assert batch.inputs[2].sum() == 0
    last = len(dataset) - 1
    assert dataset.batch([last]).inputs.shape == (1, 1000)


def test_reading_maps_and_does_not_copy(tmp_path: Path) -> None:
    dataset = TokenDataset(shards(tmp_path, [*range(100)]), seq_len=10, vocab=100)
    assert isinstance(dataset.shards[0], np.memmap)
    assert np.shares_memory(dataset.read(20, 11), dataset.shards[0])


# ------------------------------------------------------------------ sources


def test_shards_are_found_in_name_order(tmp_path: Path) -> None:
    for name in ("b.bin", "a.bin", "c.txt"):
        (tmp_path / name).touch()
    names = [p.name for p in sources.find_shards(str(tmp_path))]
    assert names == ["a.bin", "b.bin"]
    assert [p.name for p in sources.find_shards(f"{tmp_path}/b*")] == ["b.bin"]
    assert [p.name for p in sources.find_shards(f"{tmp_path}/c.txt")] == ["c.txt"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"holds no \*.bin shard"):
        sources.find_shards(str(tmp_path / "empty"))


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


# ------------------------------------------------------------------ images


def test_colour_images(tmp_path: Path) -> None:
    """idx files with an axis more, in a folder below the one that is named."""
    pixels, labels = data_files.pixels(3, (3, 32, 32), 0)
    files = {
        "train-images-idx4-ubyte": idx(pixels),
        "train-labels-idx1-ubyte": idx(np.array(labels)),
    }
    lay_out(files, tmp_path / "cifar")
    got = images.load("cifar10", str(tmp_path))
    assert np.array_equal(got.images, pixels)
    assert got.labels.tolist() == labels
    with pytest.raises(UsageError, match=r"is not mnist: 3 labels, images of shape \(3, 3, 32, 32"):
        images.load("mnist", str(tmp_path))


@pytest.mark.parametrize("pack", [dict, data_files.zipped], ids=["plain", "zipped"])
def test_mnist(pack: Callable[[data_files.Files], data_files.Files], tmp_path: Path) -> None:
    files = {name: content for name, content in mnist(test=4).items() if "t10k" in name}
    got = images.load("mnist", str(lay_out(pack(files), tmp_path)), "test")
    assert got.images.flatten().tolist() == [i % 251 for i in range(4 * 784)]
    assert got.images.shape == (4, 1, 28, 28)
    assert got.labels.tolist() == [0, 1, 2, 3]
    with pytest.raises(UsageError, match="holds no train-images-idx3-ubyte"):
        images.load("mnist", str(tmp_path), "train")


def test_damaged_image_files_are_refused_by_name(refused: Any, tmp_path: Path) -> None:
    pixels, labels = "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"
    lay_out({labels: idx(np.array([1]))}, tmp_path)
    good = idx(np.zeros((1, 28, 28)))

    def read(path: Path) -> None:
        images.load("mnist", str(path.parent), "test")

    refused(read, pixels, good[:-1], "its header says (1, 28, 28), it holds 783")
    refused(read, pixels, idx(np.zeros((1, 28, 28)), kind=13), "is not an idx file of bytes")
    refused(read, pixels, good[:9], "ends inside its header")
    refused(read, f"{pixels}.gz", gzip.compress(good)[:-9], "cannot be read")
    refused(read, pixels, bytes([0, 0, 8, 0, 7]), "is not an idx file of bytes")  # without axes
    refused(read, pixels, bytes([0, 0, 8, 99]) + bytes(99 * 4), "is not an idx file of bytes")
    lay_out({pixels: good}, tmp_path)
    lay_out({labels: idx(np.array([11]))}, tmp_path)
    with pytest.raises(UsageError, match="labels from 11 to 11"):
        images.load("mnist", str(tmp_path), "test")
    with pytest.raises(UsageError, match="did you mean 'mnist'"):
        images.load("minst", str(tmp_path))
    with pytest.raises(UsageError, match="unknown split 'val'"):
        images.load("mnist", str(tmp_path), "val")
    os.mkfifo(tmp_path / "digits.csv.gz")  # nobody waits for what will never be written to it
    with pytest.raises(UsageError, match="is not a regular file"):
        images.load("digits", str(tmp_path), "train")


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
    """The same three reviews as CSV and parquet."""
    want = ['Good.\nReally "good".', "bad, very", "so-so"]
    for name, files in data_files.reviews(want, [4, 0, 2], "test").items():
        folder = str(lay_out(files, tmp_path / name))
        got = reviews.load(folder, "test")
        assert (got.texts, got.labels, got.classes) == (want, [4, 0, 2], 5), name
        with pytest.raises(UsageError, match="holds no train reviews"):
            reviews.load(folder, "train")


def test_a_file_of_ones_own_is_split_by_row(tmp_path: Path) -> None:
    rows = [[f"film {i}, \\n", int(i > 49), "imdb"] for i in range(100)]
    lay_out({"films.csv": table([["text", "label", "source"], *rows])}, tmp_path)
    train, test = (reviews.load(str(tmp_path), split) for split in ("train", "test"))
    assert (len(train.texts), len(test.texts), train.classes) == (90, 10, 2)
    assert not set(train.texts) & set(test.texts)
    assert test.texts[0] == "film 9, \\n"  # nothing in it is escaped
    some = reviews.load(str(tmp_path / "films.csv"), "train", limit=10)
    assert sum(some.labels) == 5  # evenly spread, though the file is sorted


def test_wrong_reviews_are_refused_by_name(refused: Any) -> None:
    for name, content, message in (
        ("test.csv", b'"6","x"\n', "the rating in row 1 is not one of 5"),
        ("test.csv", b'"5","x"\n"x"\n', "row 2 is not a review"),
        ("test.csv", b"", "holds no reviews"),
        ("test.jsonl", b"", "reviews are read from .parquet, .csv"),
        ("test-0.parquet", b"PAR1 no", "test-0.parquet is"),  # not Yelp's, or pyarrow is missing
    ):
        refused(lambda path: reviews.load(str(path), "test"), name, content, message)


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
