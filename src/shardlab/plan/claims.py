"""What each strategy claims to hold, to send and to overlap. Formulas, nothing measured.

In the notation of the papers: Ψ bytes of parameters that train, and as many of gradients,
n ranks, k micro-batches in a step. What is not sent in every step counts with its average over
the steps of a round. A strategy of your own claims what one of these does with
a class attribute: ``claim = "zero1"``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardlab.axes import cut_evenly
from shardlab.wire import wire_bytes


@dataclass(frozen=True)
class Parameter:
    name: str
    shape: tuple[int, ...]
    itemsize: int
    trains: bool
    block: str  # the block it lies in; "" outside of all
    state: float = 2.0  # tensors of its size that the optimizer keeps for it: two for Adam
    is_whole: bool = False  # the optimizer must be given all of it at once, as Muon its matrices
    # In which part of the micro-batches some rank runs its block, some backward comes to that, and
    # some backward gives it a gradient: layers may be left out by chance (LayerDrop).
    forward: float = 1.0
    backward: float = 1.0
    arrives: float = 1.0

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.itemsize

    def padded(self, parts: int) -> int:
        """Bytes once its rows are dealt out evenly, as fully_shard does it."""
        rows = self.shape[0] if self.shape else 1
        return self.bytes // max(rows, 1) * -(-rows // parts) * parts


@dataclass(frozen=True)
class Job:
    """A model and how it is run: what the formulas need to know."""

    params: tuple[Parameter, ...]
    buffers: int  # bytes
    ranks: int
    micro: int
    options: Mapping[str, Any] = field(default_factory=dict)  # of the strategy
    ranks_per_node: int = 0  # 0: there is one node, or it is not known
    leaves_out: bool = False  # some rank does not run every block in every micro-batch

    @property
    def held(self) -> int:
        """Bytes of all parameters."""
        return sum(p.bytes for p in self.params)

    @property
    def psi(self) -> int:
        """Ψ: bytes of those that train."""
        return sum(p.bytes for p in self.params if p.trains)

    @property
    def state(self) -> float:
        """Bytes of the optimizer's state for all that trains."""
        return sum(p.bytes * p.state for p in self.params if p.trains)


Bytes = Callable[[Job], float]
FEW = 0.5  # of a model's parameters: what some blocks of many may hold


@dataclass(frozen=True)
class Claim:
    """What one rank holds and sends. ``moved`` is by collective, in bytes of the tensors that it is
    about; what that makes on the wire follows from the collective and the ranks that take part."""

    moved: Mapping[str, Bytes] = field(default_factory=dict)
    # "none" or "some": whether gradients are sent before backward has ended. Of workers: whether
    # what they exchange is still on its way when a step has ended.
    overlap: str | Callable[[Job], str] = "none"
    params: Bytes = lambda job: job.held
    gradients: Bytes = lambda job: job.psi
    optimizer: Bytes = lambda job: job.state
    keeps_gradients: bool = False  # their buffers stay allocated from step to step
    beside: Bytes = lambda _job: 0.0  # held all the time beside parameters and optimizer state
    # The most that gradients() may hold beyond what is there between steps; None: no promise.
    peak: Bytes | None = None
    groups: Callable[[Job], Mapping[str, int]] = lambda _job: {}  # ranks, where not all take part
    # By collective, the most that may be moved, where it depends on how the model runs; and how
    # many times as much where blocks run again, or some parameters in some micro-batches only.
    most: Mapping[str, Bytes] = field(default_factory=dict)
    if_irregular: float = 1.0
    # The least that the fullest rank holds, where it depends on what lies where: "gradients",
    # "optimizer", "beside". Of what is not here, it is as much as is claimed.
    least: Mapping[str, Bytes] = field(default_factory=dict)

    def of(self, job: Job) -> dict[str, Any]:
        """The claim in numbers."""
        among = self.groups(job)
        gradients, beside = self.gradients(job), self.beside(job)
        least_gradients = self.least.get("gradients", self.gradients)(job)
        least_beside = self.least.get("beside", self.beside)(job)

        def on_the_wire(moved: Mapping[str, Bytes]) -> dict[str, float]:
            return {
                op: wire_bytes(op, round(size(job)), among.get(op, job.ranks))
                for op, size in moved.items()
                if size(job)
            }

        return {
            "params": self.params(job),
            "gradients": gradients + beside,
            "optimizer": self.optimizer(job),
            "kept": beside + (gradients if self.keeps_gradients else 0),
            "least": {
                "params": self.params(job),
                "gradients": least_gradients + least_beside,
                "optimizer": self.least.get("optimizer", self.optimizer)(job),
                "kept": least_beside + (least_gradients if self.keeps_gradients else 0),
            },
            "peak": None if self.peak is None else self.peak(job),
            "moved": on_the_wire(self.moved),
            "most": on_the_wire({**self.moved, **self.most}),
            "if_irregular": self.if_irregular,
            "overlap": self.overlap if isinstance(self.overlap, str) else self.overlap(job),
        }


# ------------------------------------------------------------------ formulas


def once(job: Job) -> float:
    return job.psi


def each_time(job: Job) -> float:
    return job.micro * sum(p.bytes * p.arrives for p in job.params if p.trains)


def now_and_then(job: Job) -> float:
    """Workers that take steps of their own: all of it once in a round, on average in a step."""
    return job.psi / float(job.options["every"])


def in_fragments(job: Job) -> float:
    """streaming_diloco: the anchor, the outer momentum, and the fragments that are on their way."""
    sizes = {p.name: p.bytes for p in job.params if p.trains}
    fragments, delay, every = (int(job.options[k]) for k in ("fragments", "delay", "every"))
    cut = cut_evenly(sizes, fragments)
    together = -(-delay * fragments // every)
    largest = max(sum(sizes[name] for name in names) for names in cut)
    return 2.0 * job.psi + min(job.psi, together * largest)


def one_nth(size: Bytes) -> Bytes:
    return lambda job: size(job) / job.ranks


def at_most_one_more(size: Bytes, of: Callable[[Parameter], float]) -> Bytes:
    """One n-th; but what the optimizer needs whole is dealt out, each to the rank that has least.
    The fullest then has the average and at most one more of them."""

    def fullest(job: Job) -> float:
        largest = max((of(p) for p in job.params if p.is_whole and p.trains), default=0.0)
        return (size(job) + (job.ranks - 1) * largest) / job.ranks

    return fullest


def a_few_units(job: Job) -> float:
    """This rank's gradients, and what is on its way: some blocks or buckets. All parameters, or
    all gradients, would be the whole of ``held``; of the 16 blocks that are weighed, these are 5 to
    7, for Gloo's threads let go of them late on busy processors."""
    return job.psi / job.ranks + FEW * job.held


def gathered_by_zero3(job: Job) -> float:
    """All parameters for forward, and again for backward but for what is still there: the root
    and the last block. Where blocks are left out, each rank may end with another one."""
    blocks: dict[str, int] = {}
    for p in job.params:
        if p.block:
            blocks[p.block] = blocks.get(p.block, 0) + p.bytes
    sizes = sorted(blocks.values()) if job.leaves_out else [*blocks.values()]
    kept = sum(sizes[-(job.ranks if job.leaves_out else 1) :])
    first = sum(p.bytes * p.forward for p in job.params)
    again = sum(p.bytes * p.backward for p in job.params if p.block)
    return job.micro * (first + max(0.0, again - kept))


def dealt_out(job: Job) -> float:
    """ZeroRedundancyOptimizer gives each parameter, the largest first, to the rank with the least:
    the share of the fullest."""
    shares, states = [0] * job.ranks, [0.0] * job.ranks
    trained = (p for p in job.params if p.trains)
    for p in sorted(trained, key=lambda p: p.bytes, reverse=True):
        least = shares.index(min(shares))
        shares[least] += p.bytes
        states[least] += p.bytes * p.state
    return max(states)


def all_ranks(job: Job) -> int:
    return job.ranks


def within_group(job: Job) -> int:
    """Hybrid sharding: the ranks of one group."""
    shards: int = job.options.get("shards") or max(2, job.ranks_per_node)
    return min(shards, job.ranks)


def two_levels(job: Job) -> dict[str, int]:
    """Hybrid sharding gathers and scatters inside its groups; sums go between them."""
    size = within_group(job)
    return {"all_gather": size, "reduce_scatter": size, "all_reduce": job.ranks // size}


def fully_sharded(
    gathers: int,
    peak: Bytes,
    parts: Callable[[Job], int] = all_ranks,
    moved: Mapping[str, Bytes] | None = None,
    groups: Callable[[Job], Mapping[str, int]] = lambda _job: {},
) -> Claim:
    """FSDP2: every parameter cut into parts, gathered ``gathers`` times for each micro-batch."""

    def padded(job: Job, only_trained: bool = False) -> int:
        return sum(p.padded(parts(job)) for p in job.params if p.trains or not only_trained)

    def gathered(job: Job) -> float:
        again = gathers - 1
        sizes = (p.padded(parts(job)) * (p.forward + again * p.backward) for p in job.params)
        return job.micro * sum(sizes)

    def scattered(job: Job) -> float:
        return job.micro * sum(p.padded(parts(job)) * p.arrives for p in job.params if p.trains)

    return Claim(
        {"all_gather": gathered, "reduce_scatter": scattered, **(moved or {})},
        "some",
        params=lambda job: padded(job) / parts(job),
        gradients=lambda job: padded(job, only_trained=True) / parts(job),
        optimizer=lambda job: sum(
            p.state * p.padded(parts(job)) / parts(job) for p in job.params if p.trains
        ),
        peak=peak,
        groups=groups,
        if_irregular=8.0,  # each call of a block gathers it anew
    )


# ------------------------------------------------------------------ the table

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
        optimizer=at_most_one_more(FULL.optimizer, lambda p: p.bytes * p.state),
        least={"optimizer": one_nth(FULL.optimizer)},
    ),
    "zero2": Claim(
        {"reduce_scatter": each_time, "all_gather": once},
        "some",
        gradients=at_most_one_more(FULL.gradients, lambda p: p.bytes),
        optimizer=at_most_one_more(FULL.optimizer, lambda p: p.bytes * p.state),
        least={"gradients": one_nth(FULL.gradients), "optimizer": one_nth(FULL.optimizer)},
        peak=a_few_units,
    ),
    "zero3": Claim(
        {"reduce_scatter": each_time, "all_gather": gathered_by_zero3},
        "some",
        params=one_nth(FULL.params),
        gradients=one_nth(FULL.gradients),
        optimizer=one_nth(FULL.optimizer),
        peak=a_few_units,
        # The root and the last block too are gathered again if the model comes back to them; what
        # the order learnt so far does not foresee is sent once more.
        most={"all_gather": lambda job: 2 * job.micro * job.held},
        if_irregular=2.0,
    ),
    "pytorch_ddp": Claim({"all_reduce": once}, "some", keeps_gradients=True),
    "pytorch_zero1": Claim(
        {"all_reduce": once, "broadcast": once}, "some", optimizer=dealt_out, keeps_gradients=True
    ),
    # Parameters stay for backward: the whole of them is there once.
    "pytorch_zero2": fully_sharded(1, peak=lambda job: job.held + a_few_units(job)),
    "pytorch_zero3": fully_sharded(2, peak=a_few_units),
    "pytorch_hsdp": fully_sharded(
        2,
        # The parts of the other replicas' gradients come besides.
        peak=lambda job: 2 * job.psi / within_group(job) + FEW * job.held,
        parts=within_group,
        moved={"all_reduce": lambda job: each_time(job) / within_group(job)},
        groups=two_levels,
    ),
    "local_sgd": Claim({"all_reduce": now_and_then}),
    "diloco": Claim(
        {"all_reduce": now_and_then},
        beside=lambda job: 2.0 * job.psi,  # the anchor, and the outer momentum
    ),
    "streaming_diloco": Claim(
        {"all_reduce": now_and_then},
        lambda job: "some" if job.options["delay"] else "none",
        beside=in_fragments,
        least={"beside": lambda job: 2.0 * job.psi},
    ),
}
