"""Every strategy equals one plain process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest

import toys
from conformance import ALL_CASES, MICRO, OPTIMIZERS, OPTIONS, REFUSED, Case, conform, covering
from conftest import GetRanks, long_unless
from shardlab.naming import STRATEGIES

Row = tuple[str, int, str, int, str]  # strategy, world, toy, micro-batches, optimizer


def is_refused(strategy: str, world: int, toy: str, *_: Any) -> bool:
    return toy in REFUSED.get(strategy, ()) or (strategy == "single" and world > 1)


def by_ranks(rows: Iterable[Row]) -> list[tuple[str, int, list[Case]]]:
    """One call of the ranks for all cases of a strategy in a world."""
    cells: dict[tuple[str, int], list[Case]] = {}
    for strategy, world, *case in rows:
        cells.setdefault((strategy, world), []).append(Case(*case))
    return [(*cell, cases) for cell, cases in cells.items()]


def complaints(ranks: GetRanks, strategy: str, world: int, cases: Sequence[Case]) -> list[str]:
    options = {"shards": 3} if (strategy, world) == ("pytorch_hsdp", 3) else OPTIONS.get(strategy)
    return conform(ranks(world), strategy, cases, options)


# Two ranks meet every toy under every strategy; and every pair of two things meets somewhere in
# these, and once more in those of the other worlds.
FACTORS = tuple(toys.TOYS), MICRO, OPTIMIZERS
PAIRS = [
    *covering(tuple(STRATEGIES), (2,), *FACTORS, but=is_refused),
    *covering(tuple(STRATEGIES), (3, 4, 1), *FACTORS, but=is_refused),
]


def is_quick(name: str, world: int, _cases: Any) -> bool:
    return world == 2 and not name.startswith("pytorch_")


@pytest.mark.parametrize(("strategy", "world", "cases"), long_unless(is_quick, by_ranks(PAIRS)))
def test_equals_one_process(strategy: str, world: int, cases: list[Case], ranks: GetRanks) -> None:
    assert complaints(ranks, strategy, world, cases) == []


@pytest.mark.deep
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_case_equals_one_process(strategy: str, world: int, ranks: GetRanks) -> None:
    """More ranks than cores pay milliseconds for each collective: there, fewer cases."""
    if world == 2:
        cases = ALL_CASES
    else:
        cases = [c for c in ALL_CASES if (c.micro == 2) == (c.optimizer == "adamw")]
    cells = by_ranks(
        (strategy, 1 if strategy == "single" else world, c.toy, c.micro, c.optimizer)
        for c in cases
        if not is_refused(strategy, 1, c.toy)
    )
    for cell in cells:
        assert complaints(ranks, *cell) == []


MUON = covering(("zero1", "zero2"), (2, 3, 4), tuple(toys.TOYS), MICRO, ("muon",))


@pytest.mark.parametrize(
    ("strategy", "world", "cases"), long_unless(lambda _, world, __: world == 2, by_ranks(MUON))
)
def test_muons_matrices_stay_whole(
    strategy: str, world: int, cases: list[Case], ranks: GetRanks
) -> None:
    """Of tied, frozen and unused ones too, and with several buckets."""
    buckets = {"bucket_mb": 1e-4, "first_bucket_mb": 1e-4}
    assert conform(ranks(world), strategy, cases, buckets) == []


def test_pytorch_ddp_as_recommended(ranks: GetRanks) -> None:
    """Without the search for unused parameters, which the comparison does not pay for."""
    cases = [Case(toy, 2, "adamw") for toy in toys.TOYS if toy not in ("unused", "branches")]
    assert conform(ranks(2), "pytorch_ddp", cases) == []
