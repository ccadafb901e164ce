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
def test_dropped(length: int, world: int, seed: int, number: int) -> None:
    """Equal counts by the floor rule, nothing twice, fewer than a world missed."""
    ranks = epoch(length, world, "dropped", seed, number)
    assert {len(ids) for ids in ranks} == {length // world}
    seen = Counter(i for ids in ranks for i in ids)
    assert set(seen.values()) <= {1}
    assert set(seen) <= set(range(length))
    assert length - len(seen) == length % world


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
    together = (read + rest)[:length]
    assert together == order[: len(together)]
    missed = length - len(together)
    assert missed == (max(0, length - len(read)) % after if mode == "dropped" else 0)
    if mode != "padded":
        assert len(read) + len(rest) == len(together)
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
    if mode == "dropped" and length < size:
        with pytest.raises(UsageError, match="leaves nothing"):
            sampler.check_epoch(length, size, mode)
        return
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
        fed = Counter(int(i) for share in shares for part in share for i in part.ids)
        assert fed == Counter(whole.ids.tolist())  # the ranks share it, whatever their number
        assert len(whole.ids) == size or mode == "exact"
        stream += zip(whole.epochs.tolist(), whole.ids.tolist(), strict=True)
    assert sampler.finished_epochs(steps, size, length, mode) >= 2
    for number in range(2):
        ids = [i for e, i in stream if e == number]
        want = sampler.epoch_order(length, seed, number, True).tolist()
        if mode == "dropped":
            assert ids == want[: length // size * size]
        elif mode == "padded":
            assert ids == [want[i % length] for i in range(-(-length // size) * size)]
        else:
            assert ids == want


def test_a_rank_reads_the_same_by_sample_and_by_batch() -> None:
    """One law: the batches of a rank, one after another, are its part of the epoch."""
    for mode in ("padded", "dropped"):
        order = loader.Order(103, 12, 1, 5, True, mode)
        steps = sampler.steps_per_epoch(103, 12, mode)
        by_batch = [order.share(s, 4, 1)[0].ids for s in range(steps)]
        slots = sampler.epoch_slots(103, 12, mode)
        by_sample = sampler.rank_ids(slots, 4, 1, 5, 0, mode="exact", shuffle=False)
        want = sampler.epoch_order(103, 5, 0, True)[by_sample % 103]
        assert np.array_equal(np.concatenate(by_batch), want)


def test_an_empty_data_set_has_no_batches() -> None:
    with pytest.raises(UsageError, match="no samples"):
        sampler.check_epoch(0, 4, "continuous")


@given(
    epochs=st.integers(1, 7),
    size=st.integers(1, 40),
    length=st.integers(1, 300),
    mode=st.sampled_from(EPOCHS),
)
def test_steps_of_epochs_read_them_and_no_more(
    epochs: int, size: int, length: int, mode: str
) -> None:
    if mode == "dropped" and length < size:
        return  # refused: nothing is left of an epoch
    steps = sampler.steps_of_epochs(epochs, size, length, mode)
    assert sampler.finished_epochs(steps, size, length, mode) >= epochs
    assert sampler.finished_epochs(steps - 1, size, length, mode) < epochs


def test_a_part_of_an_epoch() -> None:
    assert sampler.steps_of_epochs(0.1, 1, 30, "continuous") == 3
    assert sampler.steps_of_epochs(0.5, 8, 60, "exact") == 4
    assert sampler.steps_of_epochs(1e-9, 8, 60, "continuous") == 1
    assert sampler.steps_of_epochs(10, 512, 50_000, "continuous") == 977
