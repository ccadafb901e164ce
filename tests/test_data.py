"""The sampler's laws, and token shards."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.data import sampler, sources
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
