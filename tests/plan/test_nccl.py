"""Costs of collectives from datasheets: what must hold whatever the constants are."""

from __future__ import annotations

import pytest

from shardlab.errors import UsageError
from shardlab.plan.devices import machine
from shardlab.plan.graph import Group
from shardlab.plan.nccl import cost, spread


def seconds(op: str, size: float, group: Group, name: str = "h100", link: str = "ndr") -> float:
    found = cost(op, size, group, machine(name, link))
    return found.latency_s + found.wire_s


def test_large_messages_take_what_the_link_carries() -> None:
    # 8 GPUs: 7/8 of 8 GB at 80% of 450 GB/s, once for a gather and twice for a sum.
    assert seconds("all_gather", 8e9, Group(8)) == pytest.approx(7e9 / 360e9, rel=0.01)
    assert seconds("all_reduce", 8e9, Group(8)) == pytest.approx(14e9 / 360e9, rel=0.01)
    # Sixteen ranks of two nodes with one port of 4 Gbit/s each.
    slow = seconds("all_reduce", 1e9, Group(16), link="4gbit")
    assert slow == pytest.approx(2 * 15 / 16 * 1e9 / (0.5e9 * 0.95), rel=0.02)


def test_groups_across_nodes_share_the_ports_of_a_node() -> None:
    # One rank of each of four nodes; the seven other groups send at the same time.
    assert spread(Group(4, 8), 8) == (1, 4)
    one = cost("all_gather", 1e9, Group(4, 8), machine("h100", "8gbit")).wire_s
    assert one == pytest.approx(0.75 * 1e9 / (1e9 * 0.95 / 8))
    of_its_own = cost("all_gather", 1e9, Group(4, 8), machine("h100", "ndr")).wire_s
    assert of_its_own == pytest.approx(0.75 * 1e9 / (50e9 * 0.9))


def test_small_messages_take_hops_and_trees_have_fewer() -> None:
    ring, tree = (cost(op, 8, Group(16384), machine("h100", "ndr")).latency_s
                  for op in ("all_gather", "all_reduce"))  # fmt: skip
    assert tree < ring / 20
    assert cost("barrier", 0, Group(64), machine("h100", "ndr")).wire_s == 0


@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "all_to_all", "broadcast", "send"])
@pytest.mark.parametrize("link", ["ndr", "1kbit,10s", "1gbe", "400gbe"])
def test_more_bytes_never_take_less_and_one_rank_takes_nothing(op: str, link: str) -> None:
    times = [seconds(op, 10.0**power, Group(24, 3), link=link) for power in range(12)]
    assert times == sorted(times)
    assert times[0] > 0
    assert seconds(op, 1e9, Group(1), link=link) == 0


def test_a_wrong_collective_is_refused() -> None:
    with pytest.raises(UsageError, match="did you mean 'all_reduce'"):
        cost("allreduce", 1, Group(2), machine("h100"))
