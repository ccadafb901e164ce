"""HTA's numbers: temporal breakdown, overlap, kernel types, idle time; by its definitions.

By default they are exact. HTA's own figures differ where one of the rules below applies, each an
error of HTA's that docs/traces.md describes; ``compat=True`` applies them all.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardlab.trace.decode import to_ns
from shardlab.trace.intervals import Intervals, union
from shardlab.trace.model import (
    ANNOTATION,
    CPU_OP,
    GPU_ANNOTATION,
    MEMCPY,
    MEMSET,
    RUNTIME,
    SYNC,
    Bools,
    Hta,
    Ints,
    Trace,
)  # fmt: skip

ROUNDING = "ns-rounding"  # start rounded up and end down to whole microseconds
FLOATS = "float64-timestamps"  # microseconds since 1970 in a float: a quarter of one is kept
OPERATORS = "stream-on-operator"  # an operator on the host that names a stream is GPU work
SYNCS = "sync-is-work"  # waiting for a stream or an event keeps the GPU busy
GPU_MARKERS = "gpu-step-markers"  # the last step begins where its marker on the GPU does
MERGED = "gpus-merged"  # the GPUs of one process are one
NAMES = "kind-by-name"  # hip* is communication; *Sync*, *dma*, *Memcpy* and *Memset* no compute
RULES = (ROUNDING, FLOATS, OPERATORS, SYNCS, GPU_MARKERS, MERGED, NAMES)

COMMUNICATION, MEMORY, COMPUTATION, OTHER = range(4)
TYPES = ("COMMUNICATION", "MEMORY", "COMPUTATION", "OTHER")

_HTA_COMM = re.compile(r"(^nccl.*)|(^hip)|(^hccl)|(.*ncclKernel.*)")
_HTA_MEMORY = re.compile(r"(^(hip)?Memcpy)|(^(hip)?Memset)|(^dma)")
_HTA_NO_COMPUTE = re.compile(
    r"(^nccl)|(.*Memcpy)|(.*Memset)|(.*dma)|(^.*Sync)|(^Stream Wait Event)|(cuda.*LaunchKernel)"
    r"|(^runFunction)|(^hip)|(^job_exe)|(^packet)|(^pe_exe)|(^cpum_exe_subgraph)|(^hccl)"
    r"|(^collective_subgraph_execution)"
)
_COMM = re.compile(
    r"^(void )?(nccl|rccl|hccl|msccl)|ncclKernel|ncclDevKernel|mscclKernel|mscclpp|nvshmem"
    r"|(one|two)_shot_all_reduce|multimem_(all|one)_|cross_device_reduce",
    re.IGNORECASE,
)


@functools.lru_cache(maxsize=100_000)  # names are long and few, and many ranks have the same
def is_communication(name: str) -> bool:
    """Whether a GPU kernel of this name moves data between GPUs."""
    return _COMM.search(name) is not None


def _type_by_name(name: str) -> int:
    if _HTA_COMM.match(name):
        return COMMUNICATION
    if _HTA_MEMORY.match(name):
        return MEMORY
    return OTHER if _HTA_NO_COMPUTE.match(name) else COMPUTATION


@dataclass(frozen=True)
class GpuEvents:
    """The GPU events that HTA looks at, by the chosen rules; times in ns."""

    row: Ints  # in Trace.events
    start: Ints
    end: Ints
    type: Ints  # of TYPES
    device: Ints

    def busy(self, type_: int | None = None, device: int | None = None) -> Intervals:
        chosen = np.ones(len(self.row), bool)
        if type_ is not None:
            chosen &= self.type == type_
        if device is not None:
            chosen &= self.device == device
        return union(self.start[chosen], self.end[chosen])


def gpu_events(
    trace: Trace, rules: Sequence[str] = (), steps_in_set: int | None = None
) -> GpuEvents:
    """What HTA calls GPU events: with two or more steps, those launched before the last.

    ``steps_in_set``: over all ranks that are analysed together, as HTA counts them.
    """
    events = trace.events
    wanted = events.on_gpu
    # HTA knows a GPU event by its stream.
    if SYNCS in rules:
        wanted |= (events.kind == SYNC) & (events.stream >= 0)
    if OPERATORS in rules:
        wanted |= (events.kind == CPU_OP) & (events.stream >= 0)
    if (steps_in_set or len({step.number for step in trace.steps})) >= 2:
        wanted &= _launched_before_last_step(trace, GPU_MARKERS in rules)
    row = np.flatnonzero(wanted)
    start, end = events.start_ns[row], events.end_ns[row]
    if ROUNDING in rules or FLOATS in rules:
        start, end = _hta_times(start, end, trace.rounded, ROUNDING in rules)
    device = events.device[row].astype(np.int64)
    if MERGED in rules:
        device = np.zeros(len(row), np.int64)
    return GpuEvents(row, start, end, _types(trace, row, NAMES in rules), device)


def _launched_before_last_step(trace: Trace, gpu_markers: bool) -> Bools:
    """Rows whose launch is in the trace and came before the last step's marker."""
    events = trace.events
    marks = np.zeros(len(trace.names), bool)
    marks[[i for i, name in enumerate(trace.names) if name.startswith("ProfilerStep#")]] = True
    kinds = (ANNOTATION, GPU_ANNOTATION) if gpu_markers else (ANNOTATION,)
    markers = np.isin(events.kind, kinds) & marks[events.name]
    if not markers.any():
        return np.ones(len(events), bool)
    last = events.start_ns[markers].max()
    on_host = np.isin(events.kind, (RUNTIME, ANNOTATION, GPU_ANNOTATION, CPU_OP))
    early = on_host & (events.start_ns < last)
    launched = events.correlation[early & (events.correlation >= 0)]
    by_launch = (events.correlation >= 0) & np.isin(events.correlation, launched)
    # What has no launch (an operator on the host that names a stream) counts by its own time.
    alone = (events.correlation < 0) & (events.start_ns < last)
    result: Bools = (by_launch & ~on_host) | alone
    return result


def _hta_times(start: Ints, end: Ints, floats: bool, rounded: bool) -> tuple[Ints, Ints]:
    """Times as HTA has them: floats of microseconds, then rounded; back in ns."""
    if not floats:
        return start, end
    start_us = start // 1000 + (start % 1000) / 1000
    end_us = start_us + (end - start) / 1000
    if rounded:
        start_us, end_us = np.ceil(start_us), np.floor(end_us)
        return start_us.astype(np.int64) * 1000, end_us.astype(np.int64) * 1000
    return to_ns(start_us), to_ns(end_us)


def _types(trace: Trace, row: Ints, by_name: bool) -> Ints:
    events = trace.events
    if by_name:
        of_name = np.array([_type_by_name(name) for name in trace.names] or [0], np.int64)
        return of_name[events.name[row]]
    comm = np.array([is_communication(name) for name in trace.names] or [False])
    kind = events.kind[row]
    result = np.where(comm[events.name[row]], COMMUNICATION, COMPUTATION)
    result[(kind == MEMCPY) | (kind == MEMSET)] = MEMORY
    result[kind == SYNC] = OTHER
    return result


# ------------------------------------------------------------------ the numbers


def temporal(trace: Trace, *, compat: bool = False, steps_in_set: int | None = None) -> Hta:
    """Temporal breakdown and overlap of one rank; names the rules that would change them."""
    if compat:
        return _numbers(trace, RULES, steps_in_set)
    exact = _numbers(trace, (), steps_in_set)
    changed = tuple(
        rule
        for rule in _applicable(trace)
        if _differs(exact, _numbers(trace, (rule,), steps_in_set))
    )
    return replace(exact, rules=changed)


def _numbers(trace: Trace, rules: Sequence[str], steps_in_set: int | None) -> Hta:
    gpu = gpu_events(trace, rules, steps_in_set)
    if not len(gpu.row):
        return Hta(trace.rank, None, None, None, None, None)
    if ROUNDING in rules:
        return _hta(trace.rank, *_rounded(gpu))
    devices = np.unique(gpu.device)
    kernel = idle = compute = comm_time = overlap = 0
    for device in devices.tolist():
        mine = gpu.device == device
        span = int(gpu.end[mine].max() - gpu.start[mine].min())
        computing = gpu.busy(COMPUTATION, device)
        communicating = gpu.busy(COMMUNICATION, device)
        kernel += span
        idle += span - gpu.busy(device=device).length
        compute += computing.length
        comm_time += communicating.length
        overlap += (computing & communicating).length
    return _hta(trace.rank, kernel, idle, compute, comm_time, overlap, len(devices))


def _hta(
    rank: int, kernel: int, idle: int, compute: int, comm: int, overlap: int, devices: int = 1
) -> Hta:
    """From nanoseconds, summed over the rank's GPUs, to their mean in microseconds."""
    scale = 1000 * devices
    return Hta(
        rank,
        idle_time_us=idle / scale,
        compute_time_us=compute / scale,
        non_compute_time_us=(kernel - idle - compute) / scale,
        kernel_time_us=kernel / scale,
        comm_comp_overlap_pctg=100 * overlap / comm if comm else None,
        comm_us=comm / scale,
    )


def _rounded(gpu: GpuEvents) -> tuple[int, int, int, int, int]:
    """Kernel, idle, compute and communication time and overlap as HTA computes them: a kernel of
    less than a microsecond may end before it begins, and then counts negative."""
    merged = {
        kind: _hta_merge(gpu.start[chosen], gpu.end[chosen])
        for kind, chosen in (
            (None, np.ones(len(gpu.row), bool)),
            (COMPUTATION, gpu.type == COMPUTATION),
            (COMMUNICATION, gpu.type == COMMUNICATION),
        )
    }
    length = {kind: int((end - start).sum()) for kind, (start, end) in merged.items()}
    span = int(merged[None][1][-1] - merged[None][0][0])
    edges = (*merged[COMMUNICATION], *merged[COMPUTATION])
    times = np.concatenate(edges)
    change = np.repeat([1, -1, 2, -2], [len(edge) for edge in edges])
    order = np.argsort(times, kind="stable")
    both = np.cumsum(change[order])[:-1] == 3
    overlap = int(np.diff(times[order])[both].sum())
    return span, span - length[None], length[COMPUTATION], length[COMMUNICATION], overlap


def added(a: Hta, b: Hta) -> Hta:
    """Two windows of one rank."""
    if a.kernel_time_us is None or b.kernel_time_us is None:
        return a if b.kernel_time_us is None else b
    comm = a.comm_us + b.comm_us
    hidden = sum((x.comm_comp_overlap_pctg or 0.0) * x.comm_us for x in (a, b))
    times = {
        f"{part}_us": (getattr(a, f"{part}_us") or 0) + (getattr(b, f"{part}_us") or 0)
        for part in ("idle_time", "compute_time", "non_compute_time", "kernel_time")
    }
    return replace(
        a,
        **times,
        comm_comp_overlap_pctg=hidden / comm if comm else None,
        rules=tuple(rule for rule in RULES if rule in a.rules + b.rules),
        comm_us=comm,
    )


def _hta_merge(start: Ints, end: Ints) -> tuple[Ints, Ints]:
    """HTA's union of spans, which keeps those that end before they begin."""
    if not len(start):
        return start, end
    order = np.argsort(start, kind="stable")
    start, end = start[order], end[order]
    before = np.maximum.accumulate(end)
    first = np.concatenate([[True], start[1:] > before[:-1]])
    return start[first], np.maximum.reduceat(end, np.flatnonzero(first))


def _applicable(trace: Trace) -> list[str]:
    """The rules that can matter to this trace: the others need not be tried."""
    events = trace.events
    rules = [NAMES]
    if trace.rounded:
        rules.append(ROUNDING)
        if len(events) and int(events.start_ns.max()) > 2**43 * 1000:
            rules.append(FLOATS)
    if ((events.kind == CPU_OP) & (events.stream >= 0)).any():
        rules.append(OPERATORS)
    if (events.kind == SYNC).any():
        rules.append(SYNCS)
    if (events.kind == GPU_ANNOTATION).any():
        rules.append(GPU_MARKERS)
    if len(np.unique(events.device[events.on_gpu])) > 1:
        rules.append(MERGED)
    return [rule for rule in RULES if rule in rules]


def _differs(a: Hta, b: Hta) -> bool:
    """Whether any number differs by more than a hundredth of a percentage point."""

    def parts(x: Hta) -> list[float]:
        whole = x.kernel_time_us or 1
        values = (x.idle_time_us, x.compute_time_us, x.non_compute_time_us)
        return [100 * (v or 0) / whole for v in values] + [x.comm_comp_overlap_pctg or 0]

    if (a.kernel_time_us is None) != (b.kernel_time_us is None):
        return True
    whole_a, whole_b = a.kernel_time_us or 1, b.kernel_time_us or 1
    if abs(whole_a - whole_b) > 1e-4 * whole_a:
        return True
    return any(abs(x - y) > 0.01 for x, y in zip(parts(a), parts(b), strict=True))
