"""Every strategy equals one plain process, and every planted bug is caught."""

from __future__ import annotations

import pytest

from conformance import ALL_CASES, OPTIONS, REFUSED, Case, conform
from conftest import GetRanks, long_unless
from saboteurs import RUNG_SABOTEURS, SABOTEURS
from shardlab.errors import RankFailure
from shardlab.naming import STRATEGIES

FEW_CASES = [c for c in ALL_CASES if c.micro == 2 and c.optimizer == "adamw"]
# Each toy with each number of micro-batches and each optimizer, but not with each pair of them.
SOME_CASES = [c for c in ALL_CASES if (c.micro == 2) == (c.optimizer == "adamw")]
WORLDS = [
    (name, world) for name in STRATEGIES for world in (1, 2, 3, 4) if world == 1 or name != "single"
]


def is_quick(name: str, world: int) -> bool:
    return world == 2 and not name.startswith("pytorch_")


@pytest.mark.parametrize(("strategy", "world"), long_unless(is_quick, WORLDS))
def test_equals_one_process(
    strategy: str, world: int, ranks: GetRanks, request: pytest.FixtureRequest
) -> None:
    # More ranks than cores pay milliseconds for each collective: there, fewer cases of each toy.
    pool = {3: SOME_CASES, 4: FEW_CASES}.get(world, ALL_CASES)
    if not request.config.getoption("whole"):
        pool = FEW_CASES
    cases = [c for c in pool if c.toy not in REFUSED.get(strategy, ())]
    options = {"shards": 3} if (strategy, world) == ("pytorch_hsdp", 3) else OPTIONS.get(strategy)
    assert conform(ranks(world), strategy, cases, options) == []


@pytest.mark.parametrize("world", long_unless(lambda world: world == 2, [2, 3, 4]))
@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_muons_matrices_stay_whole(strategy: str, world: int, ranks: GetRanks) -> None:
    """Of tied, frozen and unused ones too, and with several buckets."""
    cases = [Case(c.toy, c.micro, "muon") for c in (SOME_CASES if world < 4 else FEW_CASES)]
    buckets = {"bucket_mb": 1e-4, "first_bucket_mb": 1e-4}
    assert conform(ranks(world), strategy, cases, buckets) == []


def test_pytorch_ddp_as_recommended(ranks: GetRanks) -> None:
    """Without the search for unused parameters, which the comparison does not pay for."""
    cases = [c for c in FEW_CASES if c.toy not in ("unused", "branches")]
    assert conform(ranks(2), "pytorch_ddp", cases) == []


@pytest.mark.parametrize("saboteur", [*SABOTEURS, *RUNG_SABOTEURS], ids=lambda s: s.__name__)
def test_catches(saboteur: type, ranks: GetRanks) -> None:
    try:
        complaints = conform(ranks(2), saboteur, FEW_CASES)
    except RankFailure as failure:  # ranks out of step: a crash is caught too
        complaints = [str(failure)]
    assert complaints, f"nobody noticed: {saboteur.__doc__}"


def test_the_bug_shows_where_it_should(ranks: GetRanks) -> None:
    """A saboteur is not caught by accident: what it does not touch is right."""
    from saboteurs import NoBufferBroadcast, ReducesOnlyTheLast

    plain = [Case("mlp", 1, "sgd")]
    assert conform(ranks(2), ReducesOnlyTheLast, plain) == []
    assert conform(ranks(2), NoBufferBroadcast, plain) == []
