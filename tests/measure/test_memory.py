"""The peak of memory, and what it is made of."""

from __future__ import annotations

from shardlab.measure.estimate import fullest
from shardlab.measure.memory import Allocation, Causes, at_peak, lives


def test_lives_of_allocations() -> None:
    events = [(1, 0xA, 10), (2, 0xB, 20), (3, 0xA, -10), (4, 0xB, 5), (5, 0xC, -7)]
    assert lives(events) == [
        Allocation(0xA, 10, 1, 3),
        Allocation(0xB, 20, 2, 4),  # released unseen: its address was given out again
        Allocation(0xB, 5, 4, None),
    ]  # what was there before, at 0xC, is not ours


def test_the_peak_is_a_moment() -> None:
    first, second = Allocation(1, 10, 0, 5), Allocation(2, 20, 3, None)
    after = Allocation(3, 9, 5, None)
    assert at_peak([first, second, after]) == [first, second]
    assert at_peak([]) == []


def test_the_peak_of_a_part_of_the_time() -> None:
    """While building there was more; what is left of it counts in the steps."""
    model, whole, batch = (
        Allocation(1, 10, 0, None),
        Allocation(2, 90, 1, 5),
        Allocation(3, 5, 7, 9),
    )
    everything = [model, whole, batch]
    assert at_peak(everything) == at_peak(everything, until=6) == [model, whole]
    assert at_peak(everything, since=6) == [model, batch]
    assert at_peak(everything, since=4) == [model, whole]  # it was still there
    assert at_peak(everything, until=1) == [model]


def test_causes_follow_time_not_addresses_alone() -> None:
    causes = Causes(
        looks=[(10, "parameters", {1}), (20, "gradients", {1, 2}), (15, "buckets", {3})],
        forwards=[(11, 14)],
    )
    allocations = [
        Allocation(1, 100, 0, None),  # a parameter, though the gradients' look saw it too
        Allocation(2, 50, 12, None),
        Allocation(2, 7, 12, 13),  # gone before anyone looked: made in forward
        Allocation(3, 30, 14, 16),
        Allocation(9, 1, 16, None),
    ]
    assert causes.of(allocations) == {
        "total": 188, "parameters": 100, "optimizer": 0, "gradients": 50, "buckets": 30,
        "activations": 7, "other": 1,
    }  # fmt: skip
    one, two = {"total": 1, "parameters": 1}, {"total": 3, "parameters": 1, "other": 2}
    assert fullest([one, two]) == two
