"""What each strategy claims to hold, to send and to overlap. Formulas, nothing measured.

In the notation of the papers: Ψ bytes of parameters that train, and as many of gradients,
n ranks, k micro-batches in a step. A strategy of your own claims what one of these does with
a class attribute: ``claim = "zero1"``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardlab.comm import wire_bytes


@dataclass(frozen=True)
class Parameter:
    name: str
    shape: tuple[int, ...]
    itemsize: int
    trains: bool
    block: str  # the block it lies in; "" outside of all

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.itemsize

    def padded(self, parts: int) -> int:
        """Bytes once its rows are dealt out evenly, as FSDP2 does it."""
        if not self.shape or not self.bytes:
            return self.bytes * parts
        rows = self.shape[0]
        return self.bytes // rows * -(-rows // parts) * parts


@dataclass(frozen=True)
class Job:
    """A model and how it is run: what the formulas need to know."""

    params: tuple[Parameter, ...]
    ranks: int
    micro: int
    state: int  # tensors that the optimizer keeps for each parameter: two for Adam

    @property
    def held(self) -> int:
        """Bytes of all parameters."""
        return sum(p.bytes for p in self.params)

    @property
    def psi(self) -> int:
        """Ψ: bytes of those that train."""
        return sum(p.bytes for p in self.params if p.trains)

    def of(self, block: str | None) -> int:
        """Bytes of the parameters of a block, of the root (""), or of every block (None)."""
        return sum(p.bytes for p in self.params if (p.block if block is None else p.block == block))


Bytes = Callable[[Job], float]
NOTHING: Mapping[str, Bytes] = {}


@dataclass(frozen=True)
class Claim:
    """Of one rank. ``moved`` is by collective, in bytes of the tensors it is about (Ψ, not yet
    what that makes on the wire)."""

    moved: Mapping[str, Bytes] = field(default_factory=dict)
    overlap: str = "none"  # or "some": whether gradients are sent before backward has ended
    params: Bytes = lambda job: job.held
    gradients: Bytes = lambda job: job.psi
    optimizer: Bytes = lambda job: job.state * job.psi
    keeps_gradients: bool = False  # their buffers stay allocated from step to step
    # The most that gradients() may hold beyond what is there between steps; none: no promise.
    peak: Bytes | None = None

    def of(self, job: Job) -> dict[str, Any]:
        """The claim in numbers, as the proof's report has it."""
        moved = {op: wire_bytes(op, round(size(job)), job.ranks) for op, size in self.moved.items()}
        return {
            "params": self.params(job),
            "gradients": self.gradients(job),
            "optimizer": self.optimizer(job),
            "kept": self.gradients(job) if self.keeps_gradients else 0,
            "peak": None if self.peak is None else self.peak(job),
            "moved": moved,
            "overlap": self.overlap,
        }


def once(job: Job) -> float:
    return job.psi


def each_time(job: Job) -> float:
    return job.micro * job.psi


def a_share(size: Bytes) -> Bytes:
    """One n-th, and an element of padding for the last rank's sake is not counted."""
    return lambda job: size(job) / job.ranks


def shard_and_half(job: Job) -> float:
    """This rank's gradients, and a few blocks or buckets on their way: with all of the gradients
    or all of the parameters besides it would be Ψ more, so half of that tells them apart."""
    return job.psi / job.ranks + job.held / 2


def gathered_in_zero3(job: Job) -> float:
    """All parameters for forward; for backward again, but not the root and the last block,
    which are still there."""
    blocks = list(dict.fromkeys(p.block for p in job.params if p.block))
    last = job.of(blocks[-1]) if blocks else 0
    return job.micro * (job.held + job.of(None) - last)


FULL = Claim()
CLAIMS: dict[str, Claim] = {
    "single": FULL,
    "simple_ddp": Claim({"all_reduce": each_time}),
    "simple_ddp_ga": Claim({"all_reduce": once}),
    "simple_ddp_hook": Claim({"all_reduce": once}, "some"),
    "simple_ddp_async": Claim({"all_reduce": once}, "some"),
    "bucket_ddp_async": Claim({"all_reduce": once}, "some", keeps_gradients=True),
    "zero1": Claim(
        {"reduce_scatter": once, "all_gather": once},
        "some",
        optimizer=a_share(FULL.optimizer),
        keeps_gradients=True,
    ),
    "zero2": Claim(
        {"reduce_scatter": each_time, "all_gather": once},
        "some",
        gradients=a_share(FULL.gradients),
        optimizer=a_share(FULL.optimizer),
        peak=shard_and_half,
    ),
    "zero3": Claim(
        {"reduce_scatter": each_time, "all_gather": gathered_in_zero3},
        "some",
        params=a_share(FULL.params),
        gradients=a_share(FULL.gradients),
        optimizer=a_share(FULL.optimizer),
        peak=shard_and_half,
    ),
    "pytorch_ddp": Claim({"all_reduce": once}, "some", keeps_gradients=True),
}
