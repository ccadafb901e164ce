"""What one rank did when: computing, communicating, copying, as sets of time; and its phases.

On a GPU: its kernels and copies, stream by stream laid over one another. On a CPU: operators are
computation, ``gloo:*`` spans on Gloo's own threads are communication.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardlab.trace.hta import is_communication
from shardlab.trace.intervals import NOTHING, Intervals, union
from shardlab.trace.model import ANNOTATION, CPU_OP, KERNEL, RUNTIME, Bools, Ints, Trace

# Hooks run inside these spans of the autograd engine: waiting there is no computation.
_CARRIES_HOOKS = ("AccumulateGrad", "RegisterPostBackward")
WAIT = "shardlab::wait:"


@dataclass(frozen=True)
class Device:
    """One GPU of the rank, or its CPU."""

    name: str
    compute: Intervals
    comm: Intervals
    memory: Intervals
    late: Intervals  # idle time in which the next kernel had not even been launched


def named(trace: Trace, *, prefix: str = "", exact: str = "", has: str = "") -> Bools:
    """Rows of events by name. (Names are few: each is looked at once.)"""
    wanted = np.array(
        [
            bool((prefix and n.startswith(prefix)) or (exact and n == exact) or (has and has in n))
            for n in trace.names
        ]
        or [False]
    )
    result: Bools = wanted[trace.events.name]
    return result


def spans(trace: Trace, rows: Bools) -> Intervals:
    return union(trace.events.start_ns[rows], trace.events.end_ns[rows])


def communication_rows(trace: Trace) -> Bools:
    """Events that are a collective at work: its kernel, or Gloo's span."""
    names = np.array([is_communication(name) for name in trace.names] or [False])
    events = trace.events
    kernels = (events.kind == KERNEL) & names[events.name]
    result: Bools = kernels | ((events.kind == ANNOTATION) & named(trace, prefix="gloo:"))
    return result


def devices(trace: Trace) -> list[Device]:
    """What the rank computed on, each with what it did."""
    return _gpus(trace) if trace.device == "gpu" else [_cpu(trace)]


def _gpus(trace: Trace) -> list[Device]:
    events = trace.events
    on_gpu = events.on_gpu
    communicates = communication_rows(trace)
    by_gloo = spans(trace, communicates & ~on_gpu)  # tensors on the GPU, sent by the host
    result = []
    for number in np.unique(events.device[on_gpu]).tolist():
        mine = on_gpu & (events.device == number)
        compute = spans(trace, mine & (events.kind == KERNEL) & ~communicates)
        comm = spans(trace, mine & communicates) | by_gloo
        memory = spans(trace, mine & (events.kind != KERNEL))
        late = _late(trace, mine)
        result.append(Device(f"gpu:{max(number, 0)}", compute, comm, memory, late))
    return result


def _late(trace: Trace, mine: Bools) -> Intervals:
    """Gaps of one GPU whose next event was launched after the gap had begun: the host was late.

    So it is for the gap after the last event, when nothing more was launched.
    """
    events = trace.events
    rows = np.flatnonzero(mine)
    rows = rows[np.argsort(events.start_ns[rows], kind="stable")]
    start, end = events.start_ns[rows], np.maximum.accumulate(events.end_ns[rows])
    launch = launch_times(trace)[rows]
    first, last = trace.steps[0].start_ns if trace.steps else start[0], end[-1]
    if trace.steps:
        last = max(int(last), trace.steps[-1].end_ns)
    gap_start = np.concatenate([[min(first, start[0])], end])
    gap_end = np.concatenate([start, [last]])
    launched = np.concatenate([launch, [np.iinfo(np.int64).max]])
    known = np.concatenate([launch >= 0, [True]])
    host = known & (launched > gap_start) & (gap_end > gap_start)
    return union(gap_start[host], gap_end[host])


def launch_times(trace: Trace) -> Ints:
    """For each event, when the host's call that launched it began; -1: not in the trace."""
    row = launch_rows(trace)
    starts = np.append(trace.events.start_ns, -1)
    result: Ints = starts[row]
    return result


def launch_rows(trace: Trace) -> Ints:
    """For each event, the row of the host's call that launched it; -1: not in the trace."""
    events = trace.events
    hosts = np.flatnonzero((events.kind == RUNTIME) & (events.correlation >= 0))
    result = np.full(len(events), -1, np.int64)
    if not len(hosts):
        return result
    hosts = hosts[np.argsort(events.correlation[hosts], kind="stable")]
    numbers = events.correlation[hosts]
    gpu = np.flatnonzero(events.on_gpu & (events.correlation >= 0))
    at = np.minimum(np.searchsorted(numbers, events.correlation[gpu]), len(hosts) - 1)
    found = numbers[at] == events.correlation[gpu]
    result[gpu[found]] = hosts[at[found]]
    return result


def _cpu(trace: Trace) -> Device:
    events = trace.events
    communicates = communication_rows(trace)
    operators = (events.kind == CPU_OP) & ~named(trace, prefix="c10d::")
    operators &= ~named(trace, exact="record_param_comms")
    for carrier in _CARRIES_HOOKS:
        operators &= ~named(trace, has=carrier)
    waits = (events.kind == ANNOTATION) & named(trace, prefix=WAIT)
    compute = NOTHING
    for thread in np.unique(events.tid[operators]).tolist():
        here = events.tid == thread
        # Gloo's own thread also runs operators: copies inside the collective.
        busy = spans(trace, operators & here) - spans(trace, here & (communicates | waits))
        compute |= busy
    comm = spans(trace, communicates) | spans(trace, named(trace, prefix="c10d::"))
    # Blocked in a wait with nothing under way is no fault of Python's.
    everything = trace.steps[0].start_ns, trace.steps[-1].end_ns
    whole = union(np.array([everything[0]]), np.array([everything[1]]))
    late = whole - compute - comm - spans(trace, waits)
    return Device("cpu", compute, comm, NOTHING, late)


# ------------------------------------------------------------------ phases


class Phases:
    """Which phase of the step a moment of this rank belongs to.

    As our capture marks them; in other traces ``Optimizer.step`` is marked by PyTorch, and
    backward is where the autograd engine runs: its operators, or on a GPU run the thread of its
    own from which it launches.
    """

    def __init__(self, trace: Trace) -> None:
        events = trace.events
        annotations = events.kind == ANNOTATION
        updates = named(trace, exact="optimizer") | named(trace, prefix="Optimizer.step")
        self._parts = {
            "optimizer": spans(trace, annotations & updates),
            "backward": spans(trace, annotations & named(trace, exact="backward")),
            "forward": spans(trace, annotations & named(trace, exact="forward")),
        }
        self.marked = bool(len(self._parts["backward"]))
        if not self.marked:
            if trace.device == "gpu":
                engine = (events.kind == RUNTIME) & (events.tid != trace.main_thread)
            else:
                engine = named(trace, prefix="autograd::engine::evaluate_function")
            self._parts["backward"] = self._hulls(trace, engine)
        self._steps = trace.steps
        self._starts = np.array([step.start_ns for step in trace.steps], np.int64)

    @staticmethod
    def _hulls(trace: Trace, rows: Bools) -> Intervals:
        """From the first of these events to the last, in each step."""
        starts, ends = [], []
        begin, end = trace.events.start_ns[rows], trace.events.end_ns[rows]
        for step in trace.steps:
            inside = (begin >= step.start_ns) & (begin < step.end_ns)
            if inside.any():
                starts.append(int(begin[inside].min()))
                ends.append(int(end[inside].max()))
        return union(np.array(starts, np.int64), np.array(ends, np.int64))

    def at(self, moment: int) -> str:
        for name, part in self._parts.items():
            if _holds(part, moment):
                return name
        index = self.step_at(moment)
        if index is None:
            return "other"
        step = self._steps[index]
        if not self.marked:
            starts = self._parts["backward"].start
            later = starts[starts >= moment]
            return "forward" if len(later) and later[0] < step.end_ns else "other"
        # Between forward and backward, or after them: what waits for gradients is backward's.
        ended = []
        for name, part in self._parts.items():
            before = part.end[: int(np.searchsorted(part.end, moment, side="right"))]
            if len(before) and before[-1] > step.start_ns:
                ended.append((int(before[-1]), name))
        last = max(ended)[1] if ended else "other"
        return "other" if last == "optimizer" else last

    def step_at(self, moment: int) -> int | None:
        """The index of the step that a moment lies in."""
        i = int(np.searchsorted(self._starts, moment, side="right")) - 1
        return i if i >= 0 and moment < self._steps[i].end_ns else None


def _holds(part: Intervals, moment: int) -> bool:
    i = int(np.searchsorted(part.end, moment, side="right"))
    return i < len(part) and bool(part.start[i] <= moment)
