"""Devices and links by their names, and what an operator takes on them."""

from __future__ import annotations

import pytest

from shardlab.errors import UsageError
from shardlab.plan.devices import DEVICES, called, device, link, machine, price
from shardlab.plan.graph import Work


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
    with pytest.raises(UsageError, match="at least one GPU"):
        machine("h100", per_node=0)


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
