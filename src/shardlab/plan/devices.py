"""Devices and links that need not be here: what their makers say, and what an operator takes there.

``machine("h100", "ndr")`` is a cluster of nodes. ``price`` is a roofline with a round corner: an
operator takes its arithmetic and its memory traffic, one after the other. The shares of the
datasheet that real training reaches stand in FITTED; ``benchmarks/plan_published.py`` fits them to
published runs.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass

from shardlab.errors import UsageError, unknown
from shardlab.plan.graph import Work

TYPES = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8")


@dataclass(frozen=True)
class Link:
    """A connection between GPUs of a node, or between nodes. Rates are of one direction."""

    name: str
    bytes_per_s: float  # of one GPU inside a node, of one port between nodes
    latency_s: float = 0.0  # of one hop, beyond what NCCL's own protocols take
    ports: int = 0  # of a node; 0: one for each GPU
    reached: float = 0.8  # the share of the rate that NCCL reaches with large messages
    kind: str = "net"  # or "nvlink" or "pcie": which row of NCCL's latencies holds

    def of_node(self, gpus: int) -> float:
        """Bytes per second that a node with so many GPUs sends, at best."""
        return self.bytes_per_s * self.reached * (self.ports or gpus)


@dataclass(frozen=True)
class Device:
    """A datasheet. Peaks are of dense matrices: half of what is printed "with sparsity"."""

    name: str
    tflops: Mapping[str, float]
    bandwidth: float  # of its memory, bytes per second
    memory: float  # bytes
    inside: str  # the link between GPUs of a node
    family: str  # whose shares of the peak hold for it, in FITTED
    per_node: int = 8
    between: str = "ndr"

    def peak(self, dtype: str) -> float:
        """FLOP/s of matrix products in that type."""
        if dtype not in TYPES:
            raise unknown("type", dtype, TYPES)
        found = self.tflops.get(dtype, self.tflops["fp32"] if dtype == "tf32" else None)
        if found is None:
            raise UsageError(f"{self.name} has no {dtype}; it has {', '.join(self.tflops)}")
        return found * 1e12


@dataclass(frozen=True)
class Machine:
    """Nodes of one kind of device: any number of them."""

    device: Device
    per_node: int
    inside: Link
    between: Link


def _device(
    name: str, family: str, memory: float, bandwidth: float, inside: str, **tflops: float
) -> Device:
    between = {"volta": "edr", "ampere": "hdr"}.get(family, "ndr")
    if inside.startswith("pcie"):
        between = "100gbe"
    return Device(name, tflops, bandwidth * 1e9, memory * 1e9, inside, family, between=between)


# From the makers' datasheets: memory in GB and its GB/s, then dense TFLOP/s. PyTorch has some in
# torch._inductor.analysis.device_info; its L4 has the bandwidth of an H100, so it is not used.
_SHEETS = [
    # NVIDIA Tesla V100 (2020), SXM2
    _device("v100-16", "volta", 16, 900, "nvlink2", fp64=7.8, fp32=15.7, fp16=125),
    _device("v100-32", "volta", 32, 900, "nvlink2", fp64=7.8, fp32=15.7, fp16=125),
    _device("t4", "volta", 16, 320, "pcie3", fp32=8.1, fp16=65),
    # NVIDIA A100 (2022), SXM4; A10; L4; L40S; GeForce RTX 30 and 40 (GA102, AD102 whitepapers,
    # with accumulation in fp32)
    _device("a100-40", "ampere", 40, 1555, "nvlink3", fp64=19.5, fp32=19.5, tf32=156, bf16=312,
            fp16=312),
    _device("a100-80", "ampere", 80, 2039, "nvlink3", fp64=19.5, fp32=19.5, tf32=156, bf16=312,
            fp16=312),
    _device("a10", "ampere", 24, 600, "pcie4", fp32=31.2, tf32=62.5, bf16=125, fp16=125),
    _device("rtx3090", "ampere", 24, 936, "pcie4", fp32=35.6, tf32=35.6, bf16=71, fp16=71),
    _device("rtx4090", "ada", 24, 1008, "pcie4", fp32=82.6, tf32=82.6, bf16=165.2, fp16=165.2,
            fp8=330.3),
    _device("l4", "ada", 24, 300, "pcie4", fp32=30.3, tf32=60, bf16=121, fp16=121, fp8=242),
    _device("l40s", "ada", 48, 864, "pcie4", fp32=91.6, tf32=183, bf16=362, fp16=362, fp8=733),
    # NVIDIA H100, H200, HGX B200
    _device("h100", "hopper", 80, 3350, "nvlink4", fp64=67, fp32=67, tf32=494.7, bf16=989.4,
            fp16=989.4, fp8=1978.9),
    _device("h100-pcie", "hopper", 80, 2000, "pcie5", fp64=51, fp32=51, tf32=378, bf16=756,
            fp16=756, fp8=1513),
    _device("h200", "hopper", 141, 4800, "nvlink4", fp64=67, fp32=67, tf32=494.7, bf16=989.4,
            fp16=989.4, fp8=1978.9),
    _device("b200", "blackwell", 180, 7700, "nvlink5", fp64=37, fp32=75, tf32=1100, bf16=2250,
            fp16=2250, fp8=4500),
    # AMD Instinct MI300X
    _device("mi300x", "cdna", 192, 5300, "xgmi", fp64=163.4, fp32=163.4, tf32=653.7, bf16=1307.4,
            fp16=1307.4, fp8=2614.9),
]  # fmt: skip
DEVICES = {device.name: device for device in _SHEETS}
ALIASES = {
    "v100": "v100-16", "v100_16gb": "v100-16", "v100_32gb": "v100-32", "a100": "a100-80",
    "a100_40gb": "a100-40", "a100_80gb": "a100-80", "h100-sxm": "h100", "h100_80gb": "h100",
    "h200_141gb": "h200", "4090": "rtx4090", "3090": "rtx3090",
}  # fmt: skip

GBIT = 1e9 / 8
LINKS = {
    link.name: link
    for link in (
        # One direction of all NVLinks of a GPU; NCCL counts on 80% (topo.h), on PCIe on 75%.
        Link("nvlink2", 150e9, kind="nvlink"),
        Link("nvlink3", 300e9, kind="nvlink"),
        Link("nvlink4", 450e9, kind="nvlink"),
        Link("nvlink5", 900e9, kind="nvlink"),
        Link("xgmi", 448e9, reached=0.7, kind="nvlink"),
        Link("pcie3", 16e9, reached=0.75, kind="pcie"),
        Link("pcie4", 32e9, reached=0.75, kind="pcie"),
        Link("pcie5", 64e9, reached=0.75, kind="pcie"),
        # InfiniBand and RoCE, one port for each GPU, as in the makers' own nodes.
        Link("edr", 100 * GBIT, reached=0.9),
        Link("hdr", 200 * GBIT, reached=0.9),
        Link("ndr", 400 * GBIT, reached=0.9),
        Link("xdr", 800 * GBIT, reached=0.9),
        # Ethernet with TCP: one port for each node.
        *(Link(f"{rate}gbe", rate * GBIT, 20e-6, 1, 0.9) for rate in (1, 10, 25, 40, 50, 100, 200,
                                                                      400, 800)),
    )
}  # fmt: skip
_RATE = re.compile(r"(?:(\d+)x)?(?:([\d.]+)\s*([kmgt])bit(?:/s)?|([a-z]+\d*|\d+gbe))$")
_DELAY = re.compile(r"([\d.]+)\s*(us|µs|ms|s)$")


def device(name: str) -> Device:
    key = name.strip().lower()
    known = DEVICES.get(ALIASES.get(key, key))
    if known is None:
        raise unknown("device", name, [*DEVICES, *ALIASES])
    return known


def called(name: str) -> str:
    """The device that a GPU calls itself: "NVIDIA H100 80GB HBM3" is h100."""
    words = name.lower().replace("-", " ").split()
    memory = next((w.removesuffix("gb") for w in words if w.endswith("gb")), "")
    for known in (f"{words[1] if len(words) > 1 else words[0]}-{memory}", *words):
        if known in DEVICES or known in ALIASES:
            if known == "h100" and "pcie" in words:
                return "h100-pcie"
            return known
    raise UsageError(f"no datasheet of {name} is here; name a device like it with --machine")


def link(text: str) -> Link:
    """``ndr``; ``4gbit`` (one port for each node); ``25gbit,50us``; ``8x200gbit`` (eight ports)."""
    rate, *rest = text.strip().lower().split(",")
    found = _RATE.match(rate.strip())
    delay = _DELAY.match(rest[0].strip()) if len(rest) == 1 else None
    if found is None or len(rest) > 1 or (rest and not delay):
        raise UsageError(f"link '{text}' is no link; write ndr, 4gbit, '25gbit,50us' or 8x200gbit")
    try:
        if found[4]:
            if found[4] not in LINKS:
                raise unknown("link", found[4], [*LINKS, "4gbit"])
            made = LINKS[found[4]]
        else:
            bits = float(found[2]) * {"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}[found[3]]
            made = Link(text, bits / 8, ports=1, reached=0.95)
        if delay:
            seconds = float(delay[1]) * {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}[delay[2]]
            made = dataclasses.replace(made, name=text, latency_s=seconds)
        if found[1]:
            made = dataclasses.replace(made, name=text, ports=int(found[1]))
            if not made.ports:
                raise UsageError(f"link '{text}' has no port; write 1x or more")
    except ValueError:
        raise UsageError(f"link '{text}' has a number that cannot be read") from None
    if made.bytes_per_s <= 0:
        raise UsageError(f"link '{text}' carries nothing; give it a rate above 0")
    return made


def machine(name: str, between: str = "") -> Machine:
    """Nodes of a device by its name, with the links that such nodes usually have."""
    chosen = device(name)
    return Machine(chosen, chosen.per_node, link(chosen.inside), link(between or chosen.between))


@dataclass(frozen=True)
class Shares:
    """What training reaches of a datasheet."""

    products: float  # of the peak, in large matrix products
    attention: float  # of the peak, in fused attention, all of whose scores are counted
    fp8: float = 0.805  # of what bf16 reaches of its peak, fp8 of its own: it casts and scales
    memory: float = 0.8  # of the bandwidth, in operators that only read and write
    ramp_s: float = 4e-6  # until a product is at its rate: small ones pay most
    host_s: float = 6e-6  # of the CPU for each operator: none takes less


# Fitted to the 149 runs of llm-foundry on 8 GPUs (A100 with 40 and 80 GB, H100).
FITTED: dict[str, Shares] = {
    "ampere": Shares(0.839, 0.634),
    "hopper": Shares(0.708, 0.357),
}
OTHERS = Shares(0.77, 0.48)  # of devices without published runs: between the two


def shares(device: Device) -> Shares:
    return FITTED.get(device.family, OTHERS)


def price(work: Work, device: Device, dtype: str, by: Shares | None = None) -> float:
    """Seconds that one operator takes on that device."""
    if work.seconds is not None:
        return work.seconds
    reached = by or shares(device)
    moving = work.bytes / (device.bandwidth * reached.memory)
    if work.flops <= 0:
        return max(moving, reached.host_s)
    share = reached.attention if "attention" in work.name else reached.products
    share *= reached.fp8 if dtype == "fp8" else 1.0
    computing = work.flops / (device.peak(dtype) * share) + reached.ramp_s
    return max(computing + moving, reached.host_s)
