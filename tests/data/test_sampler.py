"""The sampler's laws, for all small lengths and worlds."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlab.config import EPOCHS
from shardlab.data import loader, sampler
from shardlab.errors import UsageError

LENGTHS = st.integers(0, 1000)
WORLDS = st.integers(1, 64)
SEEDS = st.integers(0, 2**31)
FEW = st.integers(0, 5)
MODES = st.sampled_from(sampler.MODES)


def epoch(
    length: int, world: int, mode: str, seed: int = 0, number: int = 0, position: int = 0
) -> list[list[int]]:
    """What each rank reads."""
    return [
        sampler.rank_ids(length, world, r, seed, number, mode=mode, position=position).tolist()
        for r in range(world)
    ]


def in_turn(ranks: list[list[int]]) -> list[int]:
    """What all ranks have read, in the order of time: the first of each, the second of each, …"""
    longest = max(map(len, ranks))
    return [ids[i] for i in range(longest) for ids in ranks if i < len(ids)]


# ------------------------------------------------------------------ an epoch of samples


@pytest.mark.parametrize("mode", sampler.MODES)
def test_without_shuffling_samples_come_in_their_order(mode: str) -> None:
    """And from the start again, when all were read."""
    drawn = [sampler.draw(step, 4, 8, 0, shuffle=False, mode=mode) for step in range(3)]
    assert [d.ids.tolist() for d in drawn] == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3]]


@given(length=LENGTHS, world=WORLDS, seed=SEEDS, number=FEW)
def test_padded(length: int, world: int, seed: int, number: int) -> None:
    """Equal counts by the ceil rule, everything covered, the tail repeated from the start."""
    ranks = epoch(length, world, "padded", seed, number)
    assert {len(ids) for ids in ranks} == {-(-length // world)}
    order = sampler.epoch_order(length, seed, number, True).tolist()
    stream = in_turn(ranks)
    assert stream[:length] == order
    # Also where the data set is smaller than the world: round as often as it takes.
    assert all(stream[i] == order[i % length] for i in range(length, len(stream)))


@given(length=LENGTHS, world=WORLDS, seed=SEEDS, number=FEW)
def test_exact(length: int, world: int, seed: int, number: int) -> None:
    """Each sample once, ranks disjoint and within one of each other."""
    ranks = epoch(length, world, "exact", seed, number)
    assert Counter(i for ids in ranks for i in ids) == Counter(range(length))
    sizes = [len(ids) for ids in ranks]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@given(length=LENGTHS, world=WORLDS, mode=MODES, seed=SEEDS)
def test_determinism(length: int, world: int, mode: str, seed: int) -> None:
    first = epoch(length, world, mode, seed)
    sampler.epoch_order.cache_clear()
    assert epoch(length, world, mode, seed) == first
    if length > 20:
        assert epoch(length, world, "exact", seed) != epoch(length, world, "exact", seed + 1)
        assert epoch(length, world, "exact", seed) != epoch(length, world, "exact", seed, number=1)


@given(data=st.data(), length=LENGTHS, before=WORLDS, after=WORLDS, mode=MODES, seed=SEEDS)
def test_resumed_at_another_world(
    data: st.DataObject, length: int, before: int, after: int, mode: str, seed: int
) -> None:
    """After k samples on each of n ranks, m ranks go on where they were: no gap, no repeat."""
    whole = epoch(length, before, mode, seed)
    done = data.draw(st.integers(0, min(map(len, whole))))
    read = in_turn([ids[:done] for ids in whole])
    rest = in_turn(epoch(length, after, mode, seed, position=len(read)))
    order = sampler.epoch_order(length, seed, 0, True).tolist()
    assert (read + rest)[:length] == order
    if mode == "exact":
        assert len(read) + len(rest) == length
    elif len(read) < length:
        assert len(read) + len(rest) - length < after


def test_an_order_that_is_shared_cannot_be_changed() -> None:
    order = sampler.epoch_order(10, 0, 0, True)
    with pytest.raises(ValueError, match="read-only"):
        order[0] = 3


def test_without_shuffling_the_order_is_the_datas() -> None:
    got = sampler.rank_ids(7, 2, 1, seed=3, epoch=4, mode="padded", shuffle=False)
    assert got.tolist() == [1, 3, 5, 0]


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(UsageError, match="did you mean 'padded'"):
        sampler.rank_ids(7, 2, 1, 0, 0, mode="pad")


# ------------------------------------------------------------------ the same, batch by batch


def finished_epochs(steps: int, size: int, length: int, mode: str) -> int:
    """Epochs that are wholly read after this many steps."""
    return steps * size // length if mode == "continuous" else steps // -(-length // size)


@given(
    length=st.integers(1, 200),
    size=st.integers(1, 64),
    world=st.integers(1, 9),
    micro=st.integers(1, 4),
    mode=st.sampled_from(EPOCHS),
    seed=FEW,
)
@settings(max_examples=300)
def test_batches_are_slices_of_the_epochs_order(
    length: int, size: int, world: int, micro: int, mode: str, seed: int
) -> None:
    order = loader.Order(length, size, micro, seed, True, mode)
    # Enough steps for two epochs.
    steps = (
        -(-2 * length // size)
        if mode == "continuous"
        else 2 * sampler.steps_per_epoch(length, size, mode)
    )
    stream: list[tuple[int, int]] = []
    for step in range(steps):
        shares = [order.share(step, world, rank) for rank in range(world)]
        whole = sampler.draw(step, size, length, seed, True, mode)
        assert all(len(share) == micro for share in shares)
        sizes = [sum(len(part.ids) for part in share) for share in shares]
        # Rank 0, whose buffers all follow, is the last to have nothing.
        assert sizes[0] == max(sizes) <= min(sizes) + 1
        fed = Counter(int(i) for share in shares for part in share for i in part.ids)
        assert fed == Counter(whole.ids.tolist())  # the ranks share it, whatever their number
        assert len(whole.ids) == size or mode == "exact"
        stream += zip(whole.epochs.tolist(), whole.ids.tolist(), strict=True)
    assert finished_epochs(steps, size, length, mode) >= 2
    for number in range(2):
        ids = [i for e, i in stream if e == number]
        want = sampler.epoch_order(length, seed, number, True).tolist()
        if mode == "padded":
            assert ids == [want[i % length] for i in range(-(-length // size) * size)]
        else:
            assert ids == want


def test_a_rank_reads_the_same_by_sample_and_by_batch() -> None:
    """One law: the batches of a rank, one after another, are its part of the epoch."""
    order = loader.Order(103, 12, 1, 5, True, "padded")
    steps = sampler.steps_per_epoch(103, 12, "padded")
    by_batch = [order.share(s, 4, 1)[0].ids for s in range(steps)]
    slots = sampler.epoch_slots(103, 12, "padded")
    by_sample = sampler.rank_ids(slots, 4, 1, 5, 0, mode="exact", shuffle=False)
    want = sampler.epoch_order(103, 5, 0, True)[by_sample % 103]
    assert np.array_equal(np.concatenate(by_batch), want)


def test_an_empty_data_set_has_no_batches() -> None:
    with pytest.raises(UsageError, match="no samples"):
        loader.Order(0, 4, 1, 0, True, "continuous")


@given(
    epochs=st.integers(1, 7),
    size=st.integers(1, 40),
    length=st.integers(1, 300),
    mode=st.sampled_from(EPOCHS),
)
def test_steps_of_epochs_read_them_and_no_more(
    epochs: int, size: int, length: int, mode: str
) -> None:
    steps = sampler.steps_of_epochs(epochs, size, length, mode)
    assert finished_epochs(steps, size, length, mode) >= epochs
    assert finished_epochs(steps - 1, size, length, mode) < epochs


def test_a_part_of_an_epoch() -> None:
    assert sampler.steps_of_epochs(0.1, 1, 30, "continuous") == 3
    assert sampler.steps_of_epochs(0.5, 8, 60, "exact") == 4
    assert sampler.steps_of_epochs(1e-9, 8, 60, "continuous") == 1
    assert sampler.steps_of_epochs(10, 512, 50_000, "continuous") == 977
