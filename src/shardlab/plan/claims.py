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

from shardlab.numbers import cut_evenly, wire_bytes


@dataclass(frozen=True)
class Parameter:
    name: str
    shape: tuple[int, ...]
    itemsize: int
    trains: bool
    block: str  # the block it lies in; "" outside of all
    state: float = 2.0  # tensors of its size that the optimizer keeps for it: two for Adam
    is_whole: bool = False  # the optimizer must be given all of it at once, as Muon its matrices

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
    # The least optimizer state of the fullest rank, where it depends on what lies where; None: it
    # does not.
    least_optimizer: Bytes | None = None

    def of(self, job: Job) -> dict[str, Any]:
        """The claim in numbers."""
        among = self.groups(job)
        gradients, beside = self.gradients(job), self.beside(job)

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
            "least_optimizer": (self.least_optimizer or self.optimizer)(job),
            "kept": beside + (gradients if self.keeps_gradients else 0),
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
    return job.micro * job.psi


def now_and_then(job: Job) -> float:
    """Workers that take steps of their own: all of it once in a round, on average in a step."""
    return job.psi / float(job.options["every"])


def in_collectives(job: Job) -> float:
    return now_and_then(job) if job.options["min_workers"] is None else 0.0


def at_a_table(job: Job) -> float:
    """Workers that may be late or lost exchange through the store."""
    return (
        0.0
        if job.options["min_workers"] is None
        # Buffers travel with the parameters there.
        else (now_and_then(job) + job.buffers / float(job.options["every"]))
    )


def in_fragments(job: Job) -> float:
    """streaming_diloco: the anchor, the outer momentum, and the fragments that are on their way. In
    few bits every worker's is there, and their sum when they have arrived."""
    sizes = {p.name: p.bytes for p in job.params if p.trains}
    fragments, delay, every = (int(job.options[k]) for k in ("fragments", "delay", "every"))
    cut = cut_evenly(sizes, fragments)
    together = -(-delay * fragments // every)
    largest = max(sum(sizes[name] for name in names) for names in cut)
    if is_rounded(job):
        largest = round(largest * max(1.0, job.ranks * in_few_bits(job) / max(1, job.psi)))
    return 2.0 * job.psi + min(job.psi, together * largest)


def is_rounded(job: Job) -> bool:
    return int(job.options["bits"]) < 32


def in_few_bits(job: Job) -> float:
    """Bytes of one worker's differences: whole numbers, and 4 bytes for each block of 128."""
    bits, total = int(job.options["bits"]), 0
    for p in job.params:
        if p.trains:
            elements = math.prod(p.shape)
            total += -(-elements * bits // 8) + 4 * -(-elements // 128)
    return total


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
    all gradients, would be the whole of ``held``; in a model of many blocks some are much less."""
    return job.psi / job.ranks + 0.6 * job.held


def a_few_units_of_zero3(job: Job) -> float:
    return job.psi / sharing(job) + 0.6 * job.held


def gathered_by_zero3(job: Job) -> float:
    """All parameters for forward, and again for backward but for what is still there: the root
    and the last block."""
    blocks = list(dict.fromkeys(p.block for p in job.params if p.block))
    kept = {"", *blocks[-1:]}
    again = sum(p.bytes for p in job.params if p.block not in kept)
    return job.micro * (job.held + again)


def scattered_by_zero3(job: Job) -> float:
    """Units are sent whole: what is frozen in one that trains travels with it."""
    trained = {p.block for p in job.params if p.trains}
    return job.micro * sum(p.bytes for p in job.params if p.block in trained)


def trained_part(job: Job) -> float:
    """The most of what trains that can lie in one rank's part of all parameters."""
    return min(job.psi, job.held / sharing(job))


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


def sharing(job: Job) -> int:
    """zero3: the ranks of one group, which are all unless its option says otherwise."""
    return int(job.options.get("shards") or job.ranks)


def on_a_node(job: Job) -> int:
    """bucket_ddp_async: the ranks of a node if it is hierarchical; else each is a node."""
    nodes = job.options.get("ranks_per_node") or job.ranks_per_node
    return int(nodes) if job.options.get("hierarchical") else 1


def two_levels(size: Callable[[Job], int]) -> Callable[[Job], Mapping[str, int]]:
    """Gathered and scattered in groups of that size; sums go between the groups."""
    return lambda job: {
        "all_gather": size(job),
        "reduce_scatter": size(job),
        "all_reduce": job.ranks // size(job),
    }


def only_in_groups(size: Callable[[Job], int], moved: Bytes) -> Bytes:
    """What is sent if there are several groups of several ranks."""
    return lambda job: moved(job) if 1 < size(job) < job.ranks else 0.0


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

    return Claim(
        {
            "all_gather": lambda job: gathers * job.micro * padded(job),
            "reduce_scatter": lambda job: job.micro * padded(job, only_trained=True),
            **(moved or {}),
        },
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
    "bucket_ddp_async": Claim(
        {
            "all_reduce": lambda job: job.psi / on_a_node(job),
            "reduce_scatter": only_in_groups(on_a_node, once),
            "all_gather": only_in_groups(on_a_node, once),
        },
        "some",
        keeps_gradients=True,
        groups=two_levels(on_a_node),
    ),
    "zero1": Claim(
        {"reduce_scatter": once, "all_gather": once},
        "some",
        optimizer=at_most_one_more(FULL.optimizer, lambda p: p.bytes * p.state),
        least_optimizer=one_nth(FULL.optimizer),
        keeps_gradients=True,
    ),
    "zero2": Claim(
        {"reduce_scatter": each_time, "all_gather": once},
        "some",
        gradients=at_most_one_more(FULL.gradients, lambda p: p.bytes),
        optimizer=at_most_one_more(FULL.optimizer, lambda p: p.bytes * p.state),
        least_optimizer=one_nth(FULL.optimizer),
        peak=a_few_units,
    ),
    "zero3": Claim(
        {
            "reduce_scatter": each_time,
            "all_gather": gathered_by_zero3,
            "all_reduce": only_in_groups(sharing, lambda job: job.psi / sharing(job)),
        },
        "some",
        params=lambda job: job.held / sharing(job),
        gradients=trained_part,
        optimizer=lambda job: job.state / max(1, job.psi) * trained_part(job),
        least_optimizer=lambda job: job.state / sharing(job),
        peak=a_few_units_of_zero3,
        groups=two_levels(sharing),
        # The root and the last block too are gathered again if the model comes back to them; what
        # the order learnt so far does not foresee is sent once more.
        most={
            "all_gather": lambda job: 2 * job.micro * job.held,
            "reduce_scatter": scattered_by_zero3,
            "all_reduce": only_in_groups(
                sharing, lambda job: scattered_by_zero3(job) / job.micro / sharing(job)
            ),
        },
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
        peak=lambda job: 2 * job.psi / within_group(job) + 0.6 * job.held,
        parts=within_group,
        moved={"all_reduce": lambda job: job.micro * job.psi / within_group(job)},
        groups=two_levels(within_group),
    ),
    "local_sgd": Claim({"all_reduce": in_collectives, "exchange": at_a_table}),
    "diloco": Claim(
        {"all_reduce": in_collectives, "exchange": at_a_table},
        beside=lambda job: 2.0 * job.psi,  # the anchor, and the outer momentum
    ),
    "streaming_diloco": Claim(
        {
            "all_reduce": lambda job: 0.0 if is_rounded(job) else now_and_then(job),
            "all_gather": lambda job: (
                job.ranks * in_few_bits(job) / job.options["every"] if is_rounded(job) else 0.0
            ),
        },
        lambda job: "some" if job.options["delay"] else "none",
        beside=in_fragments,
    ),
}
