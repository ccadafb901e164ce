"""Gloo's prices: what was measured between two ranks comes back, and is carried over from there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardlab.errors import UsageError
from shardlab.plan import gloo
from shardlab.plan.graph import Group, Start

TWO = Group(2)


def points(fixed: float, per_byte: float) -> list[dict[str, Any]]:
    """Every collective costs the same for what a rank sends; queued ones have half the fixed."""
    found = []
    for op in gloo.OPS:
        for size in (256, 2**20, 2**24):
            seconds = per_byte * gloo.sent_by(op, size, 2)
            row = {"op": op, "bytes": size}
            for kind, part in (("", fixed), ("queued_", fixed / 2)):
                row[f"{kind}wall_s"] = part + seconds
                row[f"{kind}host_s"] = (part + seconds) / 2
            found.append(row)
    return found


NEAR = gloo.measured(points(1e-3, 1e-9))
HERE = gloo.Gloo(NEAR, gloo.measured(points(2e-3, 8e-9), rate=125e6))


def test_a_round_that_was_disturbed_does_not_count() -> None:
    calm = points(1e-3, 1e-9)
    rounds = [row for _ in range(7) for row in calm]
    for row in calm:
        late = {key: 20 * value for key, value in row.items() if key.endswith("_s")}
        rounds.append({**row, **late})
    for op in gloo.OPS:
        found = gloo.measured(rounds).alone.wall[op].seconds
        assert found == pytest.approx(NEAR.alone.wall[op].seconds)


def test_a_larger_tensor_never_takes_less() -> None:
    assert gloo.rising([1.0, 2.0, 5.0]) == [1.0, 2.0, 5.0]
    # One number that is too large does not lift all that follow, as a running maximum would.
    assert gloo.rising([4.0, 1.0, 1.0, 8.0]) == [2.0, 2.0, 2.0, 8.0]
    assert gloo.rising([3.0, 4.0, 2.0]) == [3.0, 3.0, 3.0]


def test_two_ranks_pay_what_was_measured() -> None:
    found = HERE.cost("all_reduce", 2**20, TWO)
    assert found.wire_s == pytest.approx(1e-3 + 2**20 * 1e-9)
    assert found.host_s == pytest.approx(found.wire_s / 2)
    queued = HERE.cost("all_reduce", 2**20, TWO, is_queued=True)
    assert queued.wire_s == pytest.approx(0.5e-3 + 2**20 * 1e-9)
    for size in (2**22, 2**26):  # between and beyond the sizes it is a line
        found = HERE.cost("all_reduce", size, TWO)
        assert found.wire_s == pytest.approx(1e-3 + size * 1e-9, rel=1e-6)


def test_more_ranks_send_more_in_more_rounds_and_one_pays_nothing() -> None:
    two, four = (HERE.cost("all_reduce", 2**24, Group(n)).wire_s for n in (2, 4))
    assert four == pytest.approx(3 * 1e-3 + 1.5 * 2**24 * 1e-9, rel=1e-3)
    assert two < four
    assert HERE.cost("all_reduce", 2**20, Group(1)).wire_s == 0.0


def test_a_link_of_another_rate_changes_its_part_alone() -> None:
    slow = HERE.cost("all_reduce", 2**24, TWO, rate=62.5e6)
    fast = HERE.cost("all_reduce", 2**24, TWO, rate=250e6)
    assert slow.wire_s == pytest.approx(2e-3 + 2**24 * 16e-9, rel=1e-3)
    assert fast.wire_s == pytest.approx(2e-3 + 2**24 * 4e-9, rel=1e-3)
    assert slow.host_s == fast.host_s
    made = gloo.Gloo(NEAR, gloo.over_a_link(NEAR))  # a link that was not measured has prices too
    found = made.cost("all_reduce", 2**24, TWO, rate=125e6)
    assert found.wire_s == pytest.approx(2**24 / 125e6, rel=0.05)


def test_latency_counts_as_often_as_gloo_waits_for_it() -> None:
    """Measured over a link of 5 ms: 21 ms for two ranks, 42 for three."""
    two, three = (
        HERE.cost("all_reduce", 1024, Group(n), rate=125e6, latency_s=0.005).latency_s
        for n in (2, 3)
    )
    assert (two, three) == pytest.approx((0.020, 0.040))


def test_a_delay_costs_what_it_was_seen_to() -> None:
    """Each further segment of a ring waits for it; an all-to-all and a gather use both directions,
    which they do not without a delay."""
    record = Path(__file__).parents[2] / "benchmarks" / "records" / "gloo-delay.json"
    rows = json.loads(record.read_text(encoding="utf-8"))["rows"]
    seen = {(r["op"], r["mib"], r["delay_ms"]): r["ms"] / 1e3 for r in rows}
    made, rate = gloo.Gloo(NEAR, gloo.over_a_link(NEAR)), 125e6
    for mib in (1, 4, 8, 16, 24):
        ring, *both_ways = (
            made.cost(op, mib * 2**20, TWO, rate=rate, latency_s=0.005)
            for op in ("all_reduce", "all_to_all", "broadcasts")
        )
        more = seen["all_reduce", mib, 5.0] - seen["all_reduce", mib, 0.0]
        assert ring.latency_s == pytest.approx(more, rel=0.25)
        for cost, op in zip(both_ways, ("all_to_all", "broadcasts"), strict=True):
            assert cost.latency_s + cost.wire_s == pytest.approx(seen[op, mib, 5.0], rel=0.15)
    without, queued = (
        made.cost("broadcasts", 24 * 2**20, TWO, is_queued, rate, latency_s)
        for is_queued, latency_s in ((False, 0.0), (True, 0.005))
    )
    assert without.wire_s == pytest.approx(seen["broadcasts", 24, 0.0], rel=0.05)
    assert queued.wire_s == pytest.approx(without.wire_s, rel=0.05)


def test_a_gather_of_ours_needs_every_channel() -> None:
    """It is a broadcast by each rank: while one is under way, no other can begin."""
    assert HERE.cost("broadcasts", 8, TWO).channels == gloo.CHANNELS == 2
    assert HERE.cost("broadcasts", 8, Group(4), rate=125e6).channels == 2
    assert HERE.cost("all_to_all", 8, TWO).channels == 1
    ours = Start(0, "all_gather", 8, TWO, sent="broadcast")
    theirs = Start(0, "all_gather", 8, TWO, sent="all_gather")
    assert gloo.kind_of(ours) == "broadcasts"
    assert gloo.kind_of(theirs) == "all_gather"
    assert gloo.kind_of(Start(0, "reduce_scatter", 8, TWO, sent="all_to_all")) == "all_to_all"


def test_an_unknown_collective_is_named() -> None:
    with pytest.raises(UsageError, match="no cost of gossip over Gloo"):
        HERE.cost("gossip", 8, TWO)
