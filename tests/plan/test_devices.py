"""Devices and links by their names; what an operator and a collective take, by datasheets."""

from __future__ import annotations

import pytest

from shardlab.errors import UsageError
from shardlab.plan.devices import DEVICES, called, device, link, machine, price
from shardlab.plan.graph import Group, Work
from shardlab.plan.nccl import cost, spread


def test_links_as_people_write_them() -> None:
    assert link("ndr").bytes_per_s == 50e9
    assert link("ndr").ports == 0
    assert link("4gbit").bytes_per_s == 0.5e9
    assert link("4gbit").ports == 1
    slow = link("25gbit, 50us")
    assert slow.bytes_per_s == 3.125e9
    assert slow.latency_s == pytest.approx(50e-6)
    assert link("8x200gbit").of_node(8) == pytest.approx(8 * 25e9 * 0.95)
    assert link("10GbE").bytes_per_s == 1.25e9


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nder", "did you mean 'ndr'"),
        ("", "is no link"),
        ("0gbit", "carries nothing"),
        ("..gbit", "cannot be read"),
        ("0xndr", "has no port"),
        ("1gbit,5", "is no link"),
        ("-4gbit", "is no link"),
        ("4gbit,1ms,2ms", "is no link"),
    ],
)
def test_links_that_are_none(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        link(text)


def test_devices_by_name() -> None:
    assert device("A100").name == "a100-80"
    with pytest.raises(UsageError, match="did you mean 'h100'"):
        device("h10")
    with pytest.raises(UsageError, match=r"v100-16 has no bf16; it has fp64, fp32, fp16"):
        device("v100").peak("bf16")
    with pytest.raises(UsageError, match="unknown type"):
        device("h100").peak("bf61")


@pytest.mark.parametrize("name", DEVICES)
def test_a_price_grows_with_the_work_and_never_beats_the_datasheet(name: str) -> None:
    it = device(name)
    dtype = "bf16" if "bf16" in it.tflops else "fp16"
    last = 0.0
    for power in range(16):
        taken = price(Work("aten.mm", 10.0**power, 10.0 ** (power - 2)), it, dtype)
        assert taken >= max(last, 10.0**power / it.peak(dtype))
        last = taken
    copy = price(Work("aten.copy_", 0, 1e9), it, dtype)
    assert copy > 1e9 / it.bandwidth
    assert price(Work("measured", 1e12, 0, seconds=0.5), it, dtype) == 0.5


def test_small_operators_take_what_the_host_needs() -> None:
    tiny = price(Work("aten.add", 0, 4), device("h100"), "bf16")
    assert 1e-6 < tiny < 50e-6
    assert tiny == price(Work("aten.add", 0, 4), device("a100"), "bf16")


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA A100-PCIE-40GB", "a100-40"),
        ("Tesla V100-SXM2-32GB", "v100-32"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA GeForce RTX 4090", "4090"),
        ("AMD Instinct MI300X", "mi300x"),
    ],
)
def test_a_gpu_is_known_by_its_name(name: str, known: str) -> None:
    assert called(name) == known


def test_an_unknown_gpu_is_said_to_be() -> None:
    with pytest.raises(UsageError, match="no datasheet of NVIDIA GB10 is here"):
        called("NVIDIA GB10")


# ------------------------------------------------------------------ collectives, over NCCL


def seconds(op: str, size: float, group: Group, name: str = "h100", over: str = "ndr") -> float:
    found = cost(op, size, group, machine(name, over))
    return found.latency_s + found.wire_s


def test_large_messages_take_what_the_link_carries() -> None:
    # 8 GPUs: 7/8 of 8 GB at 80% of 450 GB/s, once for a gather and twice for a sum.
    assert seconds("all_gather", 8e9, Group(8)) == pytest.approx(7e9 / 360e9, rel=0.01)
    assert seconds("all_reduce", 8e9, Group(8)) == pytest.approx(14e9 / 360e9, rel=0.01)
    # Sixteen ranks of two nodes with one port of 4 Gbit/s each.
    slow = seconds("all_reduce", 1e9, Group(16), over="4gbit")
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
@pytest.mark.parametrize("over", ["ndr", "1kbit,10s", "1gbe", "400gbe"])
def test_more_bytes_never_take_less_and_one_rank_takes_nothing(op: str, over: str) -> None:
    times = [seconds(op, 10.0**power, Group(24, 3), over=over) for power in range(12)]
    assert times == sorted(times)
    assert times[0] > 0
    assert seconds(op, 1e9, Group(1), over=over) == 0


def test_a_wrong_collective_is_refused() -> None:
    with pytest.raises(UsageError, match="did you mean 'all_reduce'"):
        cost("allreduce", 1, Group(2), machine("h100"))
