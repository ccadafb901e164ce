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

from shardlab.trace import model
from shardlab.trace.intervals import Intervals, to_ns, union
from shardlab.trace.model import Bools, Floats, Ints, Trace

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
        wanted |= (events.kind == model.SYNC) & (events.stream >= 0)
    if OPERATORS in rules:
        wanted |= (events.kind == model.CPU_OP) & (events.stream >= 0)
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
    kinds = (model.ANNOTATION, model.GPU_ANNOTATION) if gpu_markers else (model.ANNOTATION,)
    markers = np.isin(events.kind, kinds) & marks[events.name]
    if not markers.any():
        return np.ones(len(events), bool)
    last = events.start_ns[markers].max()
    on_host = np.isin(
        events.kind, (model.RUNTIME, model.ANNOTATION, model.GPU_ANNOTATION, model.CPU_OP)
    )
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
    result[(kind == model.MEMCPY) | (kind == model.MEMSET)] = MEMORY
    result[kind == model.SYNC] = OTHER
    return result


# ------------------------------------------------------------------ the numbers


def temporal(
    windows: Sequence[Trace], *, compat: bool = False, steps_in_set: int | None = None
) -> model.Hta:
    """Temporal breakdown and overlap of one rank, summed over its windows; without ``compat``
    with the names of the rules that would change them."""
    times = [_times(trace, RULES if compat else (), steps_in_set) for trace in windows]
    found = _hta(windows[0].rank, times)
    if compat:
        return found
    changed = {
        rule
        for trace, exact in zip(windows, times, strict=True)
        for rule in _applicable(trace)
        if _differs(exact, _times(trace, (rule,), steps_in_set))
    }
    return replace(found, rules=tuple(rule for rule in RULES if rule in changed))


def _hta(rank: int, windows: Sequence[Floats | None]) -> model.Hta:
    """The sum over windows; ``windows`` has None for one without GPU events."""
    known = [times for times in windows if times is not None]
    if not known:
        return model.Hta(rank, None, None, None, None, None)
    kernel, idle, compute, comm, overlap = np.sum(known, axis=0).tolist()
    hidden = 100 * overlap / comm if comm else None
    return model.Hta(rank, idle, compute, kernel - idle - compute, kernel, hidden, comm_us=comm)


def _times(trace: Trace, rules: Sequence[str], steps_in_set: int | None) -> Floats | None:
    """Kernel, idle, compute and communication time and overlap in µs; several GPUs: their mean."""
    gpu = gpu_events(trace, rules, steps_in_set)
    if not len(gpu.row):
        return None
    if ROUNDING in rules:
        return np.array(_rounded(gpu)) / 1000
    devices = []
    for device in np.unique(gpu.device).tolist():
        mine = gpu.device == device
        span = int(gpu.end[mine].max() - gpu.start[mine].min())
        compute, comm = gpu.busy(COMPUTATION, device), gpu.busy(COMMUNICATION, device)
        idle = span - gpu.busy(device=device).length
        devices.append((span, idle, compute.length, comm.length, (compute & comm).length))
    mean: Floats = np.mean(devices, axis=0) / 1000
    return mean


def _rounded(gpu: GpuEvents) -> tuple[int, int, int, int, int]:
    """The same as HTA computes it: a kernel of less than a microsecond may end before it begins,
    and then counts negative. In ns."""
    start, end = _hta_merge(gpu.start, gpu.end)
    compute, comm = (
        _hta_merge(gpu.start[chosen], gpu.end[chosen])
        for chosen in (gpu.type == COMPUTATION, gpu.type == COMMUNICATION)
    )
    span = int(end[-1] - start[0])
    times = np.concatenate((*comm, *compute))
    change = np.repeat([1, -1, 2, -2], [len(edge) for edge in (*comm, *compute)])
    order = np.argsort(times, kind="stable")
    both = np.cumsum(change[order])[:-1] == 3
    overlap = int(np.diff(times[order])[both].sum())
    busy, computing, communicating = (
        int((end - start).sum()) for start, end in ((start, end), compute, comm)
    )
    return span, span - busy, computing, communicating, overlap


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
    can_matter = {
        ROUNDING: trace.rounded,
        FLOATS: trace.rounded and (events.start_ns > 2**43 * 1000).any(),
        OPERATORS: ((events.kind == model.CPU_OP) & (events.stream >= 0)).any(),
        SYNCS: (events.kind == model.SYNC).any(),
        GPU_MARKERS: (events.kind == model.GPU_ANNOTATION).any(),
        MERGED: len(np.unique(events.device[events.on_gpu])) > 1,
        NAMES: True,
    }
    return [rule for rule, can in can_matter.items() if can]


def _differs(a: Floats | None, b: Floats | None) -> bool:
    """Whether any number differs by more than a hundredth of a percentage point."""
    if a is None or b is None:
        return a is not b
    far = abs(a[0] - b[0]) > 1e-4 * (a[0] or 1)
    return bool(far or (abs(_shares(a) - _shares(b)) > 0.01).any())


def _shares(times: Floats) -> Floats:
    """Idle, compute and other time in percent of kernel time, overlap of communication."""
    kernel, idle, compute, comm, overlap = times
    parts = (idle, compute, kernel - idle - compute)
    return 100 * np.array([*(part / (kernel or 1) for part in parts), overlap / (comm or 1)])
