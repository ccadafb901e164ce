"""Which kernels (on a CPU: operators) take the time; HTA's kernel types and idle categories."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shardlab.trace import activity, hta, model
from shardlab.trace.intervals import Intervals
from shardlab.trace.model import Bools, Ints, Trace

BETWEEN_KERNELS_NS = 30_000  # HTA: a shorter gap is what it takes to start the next kernel


def longest(trace: Trace, top: int) -> list[model.Kernel]:
    """The kernels that take the most time in the steps, with true statistics of each launch.

    (HTA's become sums of sums once there are more than it shows.)
    """
    events = trace.events
    if trace.device == "gpu":
        rows = np.flatnonzero(events.on_gpu & _in_steps(trace))
        times = events.dur_ns[rows]
    else:
        rows = np.flatnonzero((events.kind == model.CPU_OP) & _in_steps(trace))
        times = _own_time(trace, rows)
    if not len(rows):
        return []
    names = events.name[rows]
    count = np.bincount(names, minlength=len(trace.names))
    total = np.bincount(names, times, minlength=len(trace.names))
    communicates = activity.communication_rows(trace)
    result = []
    for name in np.argsort(-total)[:top].tolist():
        if not count[name]:
            break
        mine = times[names == name] / 1000
        first = rows[names == name][0]
        text = trace.names[name]
        kind = "compute"
        if communicates[first] or text.startswith("c10d::"):
            kind = "communication"
        elif trace.device == "gpu" and events.kind[first] != model.KERNEL:
            kind = "memory"
        result.append(
            model.Kernel(
                trace.rank, text, kind, int(count[name]), float(mine.sum()), float(mine.mean()),
                float(mine.min()), float(mine.max()),
                float(mine.std(ddof=1)) if len(mine) > 1 else 0.0,
            )
        )  # fmt: skip
    return result


def _in_steps(trace: Trace) -> Bools:
    result: Bools = np.searchsorted(trace.edges, trace.events.start_ns, side="right") % 2 == 1
    return result


def _own_time(trace: Trace, rows: Ints) -> Ints:
    """Durations without the operators inside: each moment belongs to the innermost."""
    events = trace.events
    own = events.dur_ns[rows].copy()
    order = np.lexsort((-events.dur_ns[rows], events.start_ns[rows], events.tid[rows]))
    thread = events.tid[rows].tolist()
    starts, ends = events.start_ns[rows].tolist(), events.end_ns[rows].tolist()
    around: list[int] = []
    for i in order.tolist():
        while around and (thread[around[-1]] != thread[i] or ends[around[-1]] <= starts[i]):
            around.pop()
        if around:
            own[around[-1]] -= ends[i] - starts[i]
        around.append(i)
    return np.maximum(own, 0)


def together(
    kernels: Sequence[model.Kernel], ranks: Sequence[model.Breakdown]
) -> list[dict[str, Any]]:
    """Kernels of several ranks, summed by name and kind: per rank and step, the longest first."""
    steps, wall = sum(row.steps for row in ranks) or 1, sum(row.wall_us for row in ranks) or 1
    sums: dict[tuple[str, str], tuple[int, float, float]] = {}
    for k in kernels:
        count, us, longest = sums.get((k.name, k.kind), (0, 0.0, 0.0))
        sums[k.name, k.kind] = (count + k.count, us + k.sum_us, max(longest, k.max_us))
    rows: list[dict[str, Any]] = [
        {
            "name": name,
            "kind": kind,
            "count": count / steps,
            "us": us / steps,
            "mean_us": us / count,
            "max_us": longest,
            "share": 100 * us / wall,
        }
        for (name, kind), (count, us, longest) in sums.items()
        if count
    ]
    return sorted(rows, key=lambda row: row["us"], reverse=True)


# ------------------------------------------------------------------ HTA's tables


def types(traces: Sequence[Trace], steps_in_set: int | None = None) -> tuple[model.KernelType, ...]:
    """Time on the GPU by what runs, alone or at once, summed over ranks (and GPUs)."""
    sums: dict[str, int] = {}
    kinds = (hta.COMPUTATION, hta.COMMUNICATION, hta.MEMORY)
    for trace in traces:
        gpu = hta.gpu_events(trace, steps_in_set=steps_in_set)
        for device in np.unique(gpu.device).tolist():
            busy = {kind: gpu.busy(kind, device) for kind in kinds}
            for chosen in range(1, 8):
                inside = [k for i, k in enumerate(kinds) if chosen >> i & 1]
                part: Intervals = busy[inside[0]]
                for kind in inside[1:]:
                    part = part & busy[kind]
                for kind in set(kinds) - set(inside):
                    part = part - busy[kind]
                name = " overlapping ".join(hta.TYPES[k] for k in inside)
                sums[name] = sums.get(name, 0) + part.length
    total = sum(sums.values())
    return tuple(
        model.KernelType(name, time / 1000, 100 * time / total)
        for name, time in sorted(sums.items(), key=lambda item: -item[1])
        if time
    )


def idle(trace: Trace, steps_in_set: int | None = None) -> list[model.Idle]:
    """Each stream's idle time: the host was late, the next kernel was starting, or other."""
    gpu = hta.gpu_events(trace, steps_in_set=steps_in_set)
    events = trace.events
    launches = activity.launch_times(trace)
    result = []
    keys = gpu.device * 100_000 + events.stream[gpu.row]
    for key in np.unique(keys).tolist():
        mine = np.flatnonzero(keys == key)
        mine = mine[np.argsort(gpu.start[mine], kind="stable")]
        row = gpu.row[mine]
        gap = gpu.start[mine][1:] - gpu.end[mine][:-1]
        host = launches[row][1:] > gpu.end[mine][:-1]
        short = ~host & (gap < BETWEEN_KERNELS_NS)
        result.append(
            model.Idle(
                trace.rank,
                device=int(gpu.device[mine[0]]),
                stream=int(events.stream[row[0]]),
                host_wait_us=float(gap[host].sum() / 1000),
                kernel_wait_us=float(gap[short].sum() / 1000),
                other_us=float(gap[~host & ~short].sum() / 1000),
            )
        )
    return result
