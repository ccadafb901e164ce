"""The plain tables that trace analysis returns. Rows are frozen dataclasses; times are integer
nanoseconds (``_ns``) on the rank's own clock, or microseconds (``_us``) where they are results.

``Trace`` is what parsing leaves of one file: columns, not objects, because a trace of a GPU run
has millions of events. Everything else is small.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardlab.trace.clocks import Clock

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

# What an event is, from the profiler's category. (``Events.kind`` holds these numbers.)
KERNEL, MEMCPY, MEMSET, SYNC, RUNTIME, CPU_OP, ANNOTATION, GPU_ANNOTATION, OTHER = range(9)
KINDS = (
    "kernel", "memcpy", "memset", "sync", "runtime", "cpu_op", "annotation", "gpu_annotation",
    "other",
)  # fmt: skip
PHASES = ("forward", "backward", "optimizer", "other")


@dataclass(frozen=True)
class Events:
    """One row per complete event that was kept: columns of equal length, in no order.

    On a GPU run the operators on the host are not kept, unless Gloo sent its tensors: nothing else
    that is computed needs them, and they are most of the file. Python's call stacks and the arrows
    between events never are.
    """

    name: NDArray[np.int32]  # index into Trace.names
    kind: NDArray[np.int8]  # KERNEL, MEMCPY, ...
    start_ns: Ints
    dur_ns: Ints
    tid: NDArray[np.int32]  # index into Trace.threads
    stream: NDArray[np.int32]  # -1 if there is none
    device: NDArray[np.int16]  # -1 if there is none
    correlation: Ints  # links a launch on the host to its kernel; -1 if it does not

    def __len__(self) -> int:
        return len(self.name)

    @property
    def end_ns(self) -> Ints:
        return self.start_ns + self.dur_ns

    @property
    def on_gpu(self) -> Bools:
        """Kernels, copies and fills: what a GPU was busy with."""
        return np.isin(self.kind, (KERNEL, MEMCPY, MEMSET))

    def in_order(self, wanted: Bools) -> Ints:
        """Some of the rows, in the order in which they began."""
        rows = np.flatnonzero(wanted)
        return rows[np.argsort(self.start_ns[rows], kind="stable")]


@dataclass(frozen=True)
class Step:
    """An optimizer step as the trace marks it (``ProfilerStep#12``), made contiguous.

    A step lasts until the next begins. The last lasts until its marker's end, or until the last
    GPU event that was launched in it.
    """

    number: int
    start_ns: int
    end_ns: int


@dataclass(frozen=True)
class CommArgs:
    """What the profiler (NCCL, or Gloo with shapes) says of a collective apart from its times."""

    collective: str = ""  # NCCL's name: allreduce, _allgather_base
    dtype: str = ""
    in_elements: int = -1
    out_elements: int = -1
    group_size: int = -1
    group: str = ""
    group_ranks: str = ""
    seq: int = -1
    peer: int = -1  # of a message: the other end, by its rank in the group


@dataclass(frozen=True)
class MemoryEvents:
    """Allocations and releases, from ``[memory]`` events: columns."""

    at_ns: Ints
    bytes: Ints  # negative: released
    total_allocated: Ints  # after it; -1: unknown
    device_type: Ints  # as PyTorch numbers them: 0 CPU, 1 CUDA
    device_id: Ints


@dataclass(frozen=True)
class Trace:
    """One trace file: one rank, one window."""

    path: Path
    rank: int
    world: int | None
    device: str  # "gpu" if anything ran on one, else "cpu"
    events: Events
    names: tuple[str, ...]
    threads: tuple[int | str, ...]  # as the trace calls them; a GPU's are its streams
    main_thread: int  # index into threads: the one with the step markers, else the first; -1: none
    pid: int | str | None  # of the process that marked the steps
    steps: tuple[Step, ...]
    comm_args: Mapping[int, CommArgs]  # by row of events
    memory: MemoryEvents
    metadata: Mapping[str, Any]  # the file's top-level keys, without the events
    base_ns: int  # baseTimeNanoseconds: added to a time, it gives Unix time
    rounded: bool  # timestamps are floats in the file: HTA rounds them to microseconds
    marked: bool = True  # its steps are; else it is one step as a whole
    clock: Clock | None = None  # how its times were corrected; None: they are as in the file

    @property
    def edges(self) -> Ints:
        """Begin and end of each step in turn."""
        return np.array([t for s in self.steps for t in (s.start_ns, s.end_ns)], np.int64)

    @property
    def shardlab(self) -> Mapping[str, Any]:
        """What our capture stamped (rank, world, strategy, steps ...); empty in foreign traces."""
        stamp = self.metadata.get("shardlab")
        return stamp if isinstance(stamp, Mapping) else {}


@dataclass(frozen=True)
class Breakdown:
    """Where one step of one rank went.

    wall = compute + exposed_comm + wait + bubble + memory + idle_host + idle, checked.
    ``hidden_comm`` lies inside compute; comm = hidden_comm + exposed_comm + wait. Definitions:
    docs/traces.md.
    ``step`` is None in the sum over a rank's steps. A rank with several GPUs: their mean.
    """

    rank: int
    step: int | None
    steps: int
    wall_us: float
    compute_us: float
    exposed_comm_us: float
    wait_us: float
    memory_us: float
    idle_host_us: float
    idle_us: float
    hidden_comm_us: float
    comm_us: float
    bubble_us: float = 0.0

    def per_step(self, column: str = "wall_us") -> float:
        """A column in the mean step."""
        return float(getattr(self, column)) / max(self.steps, 1)

    @property
    def overlap_pct(self) -> float | None:
        """The part of communication that compute hid. None: there was no communication."""
        return 100 * self.hidden_comm_us / self.comm_us if self.comm_us else None


PARTS = {
    "compute_us": "compute",
    "exposed_comm_us": "exposed communication",
    "wait_us": "waiting for a slower rank",
    "bubble_us": "pipeline bubble",
    "memory_us": "memory copies",
    "idle_host_us": "host-bound idle",
    "idle_us": "other idle",
}


@dataclass(frozen=True)
class Participant:
    """One rank's part in a collective. Times are nanoseconds on the common, aligned clock."""

    rank: int
    ready_ns: int | None  # its tensors were ready: the call (None: the trace does not say)
    start_ns: int  # this rank was in: the kernel or the Gloo worker began
    end_ns: int
    wait_us: float  # until the last rank was in


@dataclass(frozen=True)
class Collective:
    """One collective, matched across the ranks whose traces are there."""

    id: str  # "0:12": group and number within it
    # "ledger", "seq" (NCCL's), "order", "message" (the two ends), "alone" (one rank's trace only)
    matched_by: str
    kind: str  # all_reduce, all_gather, reduce_scatter, broadcast, all_to_all, ...
    label: str  # bucket or block, where the trace says
    group: str
    step: int | None
    phase: str  # of PHASES, on the rank that was last
    bytes: int | None
    dtype: str
    group_size: int | None
    participants: tuple[Participant, ...]
    last_rank: int | None  # who came last; None if a rank's trace is missing
    skew_us: float  # from the first rank in to the last
    transfer_us: float  # all ranks in, until the last was out
    wait_us: float  # summed over ranks
    algorithm_gbps: float | None  # bytes / transfer
    bus_gbps: float | None  # by the formula of nccl-tests for its kind
    emulates: str = ""  # what was asked for, where the backend does not have it (see ``called``)
    bubble: bool = False  # a pipeline waits in it between its actions: such waits are its bubble

    @property
    def is_one_sided(self) -> bool:
        """Ranks of it have no trace here, or it is not known which ranks it had."""
        is_message = self.kind in ("send", "recv", "send_recv")
        return self.last_rank is None and self.group_size != 1 and not is_message

    @property
    def called(self) -> str:
        """Its kind in tables. Gloo has no reduce-scatter: it all-reduces the whole tensor, and each
        rank copies its part."""
        return f"{self.emulates} ({self.kind} + copy)" if self.emulates else self.kind


@dataclass(frozen=True)
class CollectiveSummary:
    """Collectives of one kind, or of one label."""

    name: str
    count: int
    bytes: int | None  # of all of them together; None if some are not known
    time_us: float  # summed over collectives: from the first in to the last out
    transfer_us: float
    wait_us: float
    algorithm_gbps: float | None
    bus_gbps: float | None
    bytes_at_least: int = 0  # of those whose bytes are known
    union_us: float = 0.0  # with at least one of them under way: a moment counts once


@dataclass(frozen=True)
class Straggler:
    """How long one rank made the others wait, in one phase of the step."""

    rank: int
    phase: str
    collectives: int  # in which it came last, and others waited
    others_waited_us: float  # inside collectives, summed over the other ranks
    lost_us: float  # of that, what no computation covered
    worst_us: float  # the longest that one rank waited for it in one collective
    worst_collective: str  # its id
    worst_label: str  # its kind and label


@dataclass(frozen=True)
class Lateness:
    """Whether a rank that came last was slow. Times are compared with another rank's of the same
    collective, the median of those who came in time."""

    rank: int
    steps: int  # in which ranks could be compared
    steps_last: int  # of these, in which others waited notably for this rank
    steps_slow: int  # of these, in which its own work took longer, by half of the delay or more
    late_us: float  # by how much it came later in those (else in these): the median
    own_us: float  # of that, what its own work took longer
    began_late_us: float  # what its window began later, and others waited for in its first step
    arose: str | None  # where its own work took longer; None: not known
    slow: bool | None  # None: it cannot be told
    reason: str
    began_waits_us: float = 0.0  # what all others together waited because it began later
    idle: float | None = None  # where it arose: the share in which nothing ran; None: not known


@dataclass(frozen=True)
class Memory:
    """A rank's memory on one device, from ``[memory]`` events."""

    rank: int
    device: str
    peak_bytes: int
    peak_at_ns: int
    peak_step: int | None
    peak_phase: str
    p50_bytes: int
    p95_bytes: int
    resident_bytes: int  # the least over the steps: what is never given back
    at_ns: Ints  # the timeline
    bytes: Ints


@dataclass(frozen=True)
class WhatIf:
    """A question to the trace, and the time a step would then take."""

    question: str
    step_us: float
    now_us: float
    assumption: str

    @property
    def speedup(self) -> float:
        return self.now_us / self.step_us if self.step_us else float("inf")


@dataclass(frozen=True)
class Kernel:
    """A GPU kernel, or an operator on a CPU, over the steps of one rank."""

    rank: int
    name: str
    kind: str  # compute, communication, memory
    count: int
    sum_us: float
    mean_us: float
    min_us: float
    max_us: float
    std_us: float


@dataclass(frozen=True)
class KernelType:
    """HTA's kernel types: GPU time by what ran, alone or at once, over all ranks."""

    type: str  # COMPUTATION, "COMPUTATION overlapping COMMUNICATION", ...
    sum_us: float
    percentage: float


@dataclass(frozen=True)
class Idle:
    """HTA's idle time of one stream, by cause."""

    rank: int
    device: int
    stream: int
    host_wait_us: float  # the next kernel was launched after this one had ended
    kernel_wait_us: float  # under 30 µs: what it takes to start the next
    other_us: float


@dataclass(frozen=True)
class Hta:
    """HTA's temporal breakdown and overlap of one rank; None in CPU traces.

    ``rules`` names HTA's rules that would change these numbers (see docs/traces.md).
    """

    rank: int
    idle_time_us: float | None
    compute_time_us: float | None
    non_compute_time_us: float | None
    kernel_time_us: float | None
    comm_comp_overlap_pctg: float | None
    rules: tuple[str, ...] = ()
    comm_us: float = 0.0  # what the overlap is a part of


@dataclass(frozen=True)
class Lane:
    """Spans of one rank for a timeline: not overlapping, in order, on the common clock."""

    rank: int
    lane: str  # compute, comm, wait, bubble, memory, steps; on GPUs of one rank: "compute cuda:1"
    start_ns: Ints
    end_ns: Ints
    names: tuple[str, ...]  # one for each span, or empty where spans were merged


def row(item: Any) -> dict[str, Any]:
    """A row as a plain dict, for JSON and CSV; arrays become lists."""
    values = asdict(item)
    for field in fields(item):
        if isinstance(values[field.name], np.ndarray):
            values[field.name] = values[field.name].tolist()
    if isinstance(item, Breakdown):
        values["overlap_pct"] = item.overlap_pct
    if isinstance(item, WhatIf):
        values["speedup"] = item.speedup
    return values
