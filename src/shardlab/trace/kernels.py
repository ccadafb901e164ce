"""Which kernels (on a CPU: operators) take the time; HTA's kernel types and idle categories."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shardlab.trace import activity, hta, model
from shardlab.trace.intervals import Intervals
from shardlab.trace.model import Bools, Floats, Ints, Trace

_ENGINE = "autograd::engine::evaluate_function: "
BETWEEN_KERNELS_NS = 30_000  # HTA: a shorter gap is what it takes to start the next kernel


def longest(windows: Sequence[Trace], top: int) -> list[model.Kernel]:
    """The kernels of one rank that take the most time in its steps, over all of its windows, with
    true statistics of each launch. (HTA's become sums of sums once there are more than it shows.)
    """
    kinds: dict[str, str] = {}
    launched = [_launched(trace, kinds) for trace in windows]
    names, times = (np.concatenate(column) for column in zip(*launched, strict=True))
    count, total = np.bincount(names), np.bincount(names, times)
    by_name, ends = np.argsort(names, kind="stable"), np.cumsum(count)
    result = []
    for i, (name, kind) in enumerate(kinds.items()):
        us = times[by_name[ends[i] - count[i] : ends[i]]]
        result.append(
            model.Kernel(
                windows[0].rank, name, kind, len(us), float(us.sum()), float(us.mean()),
                float(us.min()), float(us.max()), float(us.std(ddof=1)) if len(us) > 1 else 0.0,
            )
        )  # fmt: skip
    return [result[i] for i in np.argsort(-total, kind="stable")[:top].tolist()]


def _launched(trace: Trace, kinds: dict[str, str]) -> tuple[Ints, Floats]:
    """For each kernel (on a CPU: operator) in the steps, the place of its name in ``kinds``, which
    grows by new names with what they are, and its time in microseconds."""
    events = trace.events
    if trace.device == "gpu":
        rows = np.flatnonzero(events.on_gpu & _in_steps(trace))
        times = events.dur_ns[rows]
    else:
        operators = np.flatnonzero((events.kind == model.CPU_OP) & _in_steps(trace))
        rows, times = _own_time(trace, operators)
    communicates = activity.communication_rows(trace)
    places = {name: i for i, name in enumerate(kinds)}
    place_of = np.zeros(len(trace.names), np.int64)
    for number, first in zip(*np.unique(events.name[rows], return_index=True), strict=True):
        name, row = trace.names[number].removeprefix(_ENGINE), rows[first]
        place_of[number] = places.setdefault(name, len(places))
        if communicates[row] or name.startswith("c10d::"):
            kinds.setdefault(name, "communication")
        elif trace.device == "gpu" and events.kind[row] != model.KERNEL:
            kinds.setdefault(name, "memory")
        else:
            kinds.setdefault(name, "compute")
    return place_of[events.name[rows]], times / 1000


def _in_steps(trace: Trace) -> Bools:
    result: Bools = np.searchsorted(trace.edges, trace.events.start_ns, side="right") % 2 == 1
    return result


def _own_time(trace: Trace, rows: Ints) -> tuple[Ints, Ints]:
    """Rows and durations without the operators inside: each moment belongs to the innermost.

    The autograd engine puts a span of its own around each node: the two are one row, the node's.
    """
    events = trace.events
    own = events.dur_ns[rows].copy()
    order = np.lexsort((-events.dur_ns[rows], events.start_ns[rows], events.tid[rows]))
    thread, names = events.tid[rows].tolist(), events.name[rows].tolist()
    starts, ends = events.start_ns[rows].tolist(), events.end_ns[rows].tolist()
    around: list[int] = []
    nodes: dict[int, int] = {}  # the engine's span to the node in it
    for i in order.tolist():
        while around and (thread[around[-1]] != thread[i] or ends[around[-1]] <= starts[i]):
            around.pop()
        if around:
            outer = around[-1]
            own[outer] -= ends[i] - starts[i]
            is_node = trace.names[names[outer]] == _ENGINE + trace.names[names[i]]
            if is_node and outer not in nodes:
                nodes[outer] = i
        around.append(i)
    own = np.maximum(own, 0)
    for outer, inner in nodes.items():
        own[inner] += own[outer]
    kept = np.ones(len(rows), bool)
    kept[list(nodes)] = False
    return rows[kept], own[kept]


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
