"""Memory over time, from the profiler's ``[memory]`` events."""

from __future__ import annotations

import numpy as np

from shardlab.trace.activity import Phases
from shardlab.trace.model import Ints, Memory, Trace

_TYPES = {0: "cpu", 1: "cuda", 6: "hip", 9: "xla", 12: "xpu", 13: "mps"}


def timelines(trace: Trace) -> list[Memory]:
    """One for each device that the trace has memory events of.

    On a GPU the events carry the allocator's own total. On a CPU they carry a total too, but
    from when the profiler began: memory that was there before is not counted.
    """
    events = trace.memory
    phases = Phases(trace)
    result = []
    keys = events.device_type * 1000 + np.maximum(events.device_id, 0)
    for key in np.unique(keys).tolist():
        mine = np.flatnonzero(keys == key)
        mine = mine[np.argsort(events.at_ns[mine], kind="stable")]
        at = events.at_ns[mine]
        held = events.total_allocated[mine]
        if (held < 0).any():
            held = np.cumsum(events.bytes[mine])
            held -= min(0, int(held.min()))
        kind, number = divmod(key, 1000)
        name = _TYPES.get(kind, f"device type {kind}")
        top = int(held.argmax())
        step = phases.step_at(int(at[top]))
        result.append(
            Memory(
                rank=trace.rank,
                device=name if kind == 0 else f"{name}:{number}",
                peak_bytes=int(held[top]),
                peak_at_ns=int(at[top]),
                peak_step=None if step is None else step.number,
                peak_phase=phases.at(int(at[top])),
                p50_bytes=_percentile(at, held, 0.5),
                p95_bytes=_percentile(at, held, 0.95),
                resident_bytes=int(held.min()),
                at_ns=at,
                bytes=held,
            )
        )
    return result


def _percentile(at: Ints, held: Ints, share: float) -> int:
    """What is held for this share of the time or less."""
    if len(at) < 2:
        return int(held[-1])
    time = np.append(np.diff(at), 0)
    order = np.argsort(held, kind="stable")
    passed = np.cumsum(time[order])
    return int(held[order][min(int(np.searchsorted(passed, share * passed[-1])), len(held) - 1)])
