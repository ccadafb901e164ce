"""The recognisers of the exercises from asynchronous all-reduce to ZeRO-3, without ranks."""

from __future__ import annotations

import random

import pytest
import torch

from shardlab.learn import mistakes_sharded, overlapped, spy, toys
from shardlab.learn.exercises.buckets import checks as buckets
from shardlab.learn.exercises.ring_allreduce import checks as ring
from shardlab.learn.exercises.zero2 import checks as zero2
from shardlab.learn.exercises.zero3 import checks as zero3

RANKS, SIZE = 2, 20
random.seed(0)
OWN = [[random.uniform(-1, 1) for _ in range(SIZE)] for _ in range(RANKS)]
MEAN = [sum(values) / RANKS for values in zip(*OWN, strict=True)]
LAST = [random.uniform(-1, 1) for _ in range(SIZE)]
HALF = SIZE // 2


def cause(*used: list[float], step: int = 0, max_norm: float | None = None) -> str:
    """What is said of a step of SGD in which each rank used this gradient."""
    before = [0.3] * SIZE
    rows = [
        {
            "before": {"w": before},
            "got": {"w": [b - toys.RATE * g for b, g in zip(before, gradient, strict=True)]},
            "want": {"w": [b - toys.RATE * m for b, m in zip(before, MEAN, strict=True)]},
            "own": [{"w": own} for own in OWN],
            "mean": {"w": MEAN},
            "last": {"w": [2 * x for x in LAST]},
            "micros": 2,
        }
        for gradient in used
    ]
    return mistakes_sharded.explained(rows, step, max_norm).cause


@pytest.mark.parametrize(
    ("used", "named"),
    [
        ([[2 * m for m in MEAN]] * 2, "not-averaged"),
        ([[m / 2 for m in MEAN]] * 2, "averaged-twice"),
        ([[3 * m for m in MEAN]] * 2, "scaled"),
        ([OWN[0][:HALF] + OWN[1][HALF:]] * 2, "not-communicated"),
        ([[0.0] * SIZE] * 2, "not-updated"),
        ([MEAN[:HALF] + [0.0] * HALF, [0.0] * HALF + MEAN[HALF:]], "not-gathered"),
        ([[*MEAN[:-1], 0.0]] * 2, "rest-forgotten"),
        ([LAST] * 2, "microbatches-lost"),
        ([MEAN[HALF:] + MEAN[:HALF]] * 2, "wrong-shard"),
        ([[m + 0.5 for m in MEAN]] * 2, "wrong-update"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_gradient_that_was_used_tells_the_mistake(used: list[list[float]], named: str) -> None:
    assert cause(*used) == named


def test_what_is_wrong_only_later_was_not_set_back() -> None:
    assert cause([2 * m for m in MEAN], [2 * m for m in MEAN], step=1) == "not-reset"


def test_clipping_by_shares_is_told_from_not_clipping() -> None:
    by_share = [m / 2 for m in MEAN[:HALF]] + [m / 3 for m in MEAN[HALF:]]
    assert cause(by_share, by_share, max_norm=1.0) == "local-norm"
    assert cause(MEAN, MEAN, max_norm=1.0) == "not-clipped"


def test_counts_of_the_ring() -> None:
    assert ring.counts(1_001_001.0, 3) == [1, 1, 1]
    assert ring.counts(2_000_001.0, 3) == [1, 0, 2]
    assert ring.counts(0.5, 3) is None
    assert ring.counts(float("nan"), 3) is None


def test_a_wait_in_finish_is_not_a_wait_in_backward() -> None:
    calls = [{"waited": mark} for mark in ("micro 0", spy.CHAINED, "finish", "", None)]
    assert overlapped.waited_in_backward(calls) == calls[:1]


def test_the_weigher_sees_storages_grow_and_go() -> None:
    weigher = toys.Weigher()
    with weigher:
        kept = torch.zeros(1000, dtype=torch.float64)
    assert weigher.count() == 8000

    def work() -> None:
        kept.untyped_storage().resize_(0)
        kept.untyped_storage().resize_(16_000)
        kept.untyped_storage().fill_(0)
        torch.zeros(500, dtype=torch.float64).add_(1)
        kept.untyped_storage().resize_(8)

    _, phase = weigher.phase(work)
    assert (phase.peak, phase.held) == (16_000 + 4000 - 8000, 8)


def test_memory_limits_lie_between_right_and_wrong() -> None:
    """A rank that holds its share and a block or two passes, one that holds all does not."""
    psi, block = 16.0, 1.0
    right = {"psi": psi, "block": block, "held": 8, "between": 1, "forward": 2, "params": 0}
    right |= {"after": 8, "backward": 12, "idle": 24}
    assert zero3.memory([right, right]) is None
    for key, value, named in (
        ("held", 16, "not-sharded"),
        ("between", 16, "not-freed"),
        ("forward", 16, "gathered-at-once"),
        ("after", 16, "gradients-kept"),
        ("backward", 17, "gradients-kept"),
    ):
        wrong = right | {key: value}
        found = zero3.memory([right, wrong])
        assert found is not None
        assert found.cause == named
    share = {"psi": 14.0, "block": 1.0, "after": 7, "backward": 10, "idle": 35}
    assert zero2.memory([share, share]) is None
    for key, value in (("after", 14), ("backward", 14), ("idle", 49)):
        found = zero2.memory([share, share | {key: value}])
        assert found is not None
        assert found.cause == "gradients-kept"


def test_the_layers_that_are_skipped_have_one_size() -> None:
    """Else ranks that send in different orders would crash, and not mix them up."""
    model = toys.Skipping()
    sizes = {sum(p.numel() for p in layer.parameters()) for layer in model.children()}
    assert len(sizes) == 1
    assert sizes.pop() * 8 == buckets.LAYER
