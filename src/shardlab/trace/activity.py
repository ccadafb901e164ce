"""What one rank did when: computing, communicating, copying, as sets of time; and its phases.

On a GPU: its kernels and copies, stream by stream laid over one another. On a CPU: operators are
computation, but for those in which a hook or a collective may wait: of these only the operators
inside are. ``gloo:*`` spans on Gloo's own threads are communication. A message over Gloo is
communication while the rank waits for it: when it moved before that, nobody can tell.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from shardlab.trace.hta import is_communication
from shardlab.trace.intervals import NOTHING, Intervals, union
from shardlab.trace.model import ANNOTATION, CPU_OP, KERNEL, RUNTIME, Bools, Ints, Step, Trace

# Calls of collectives. Functional ones wait in an operator; the wait for others has no mark.
_FUNCTIONAL = "_c10d_functional"
_CALL = f"c10d::|{_FUNCTIONAL}"
# Hooks run inside the last three, spans of the autograd engine: waiting there is no computation.
_NO_COMPUTATION = (
    f"{_CALL}|record_param_comms$|autograd::engine::|.*(AccumulateGrad|RegisterPostBackward)"
)
# The schedule of a pipeline's step, and the work of an action in it: spans of our executor.
PIPELINE = "shardlab::pipeline$"
ACTION = r"shardlab::(forward|backward|input gradient|weight gradient) \d+, stage \d+$"
MESSAGE = "gloo:(send|recv)"
_NEVER = np.iinfo(np.int64).min
# How annotations mark the phases.
_PHASES = {
    "optimizer": r"optimizer$|Optimizer\.step",
    "backward": "backward$",
    "forward": "forward$",
}


@dataclass(frozen=True)
class Device:
    """One GPU of the rank, or its CPU."""

    name: str
    compute: Intervals
    comm: Intervals
    memory: Intervals
    late: Intervals  # idle time in which the next kernel had not even been launched


def named(trace: Trace, pattern: str) -> Bools:
    """Rows of events whose name begins like the pattern. (Names are few: each is tried once.)"""
    return _of_names(trace, re.compile(pattern, re.DOTALL).match)


def _of_names(trace: Trace, test: Callable[[str], object]) -> Bools:
    wanted = np.array([bool(test(name)) for name in trace.names] or [False])
    result: Bools = wanted[trace.events.name]
    return result


def spans(trace: Trace, rows: Bools) -> Intervals:
    return union(trace.events.start_ns[rows], trace.events.end_ns[rows])


def communication_rows(trace: Trace) -> Bools:
    """Events that are a collective at work: its kernel, or Gloo's span."""
    kind = trace.events.kind
    kernels = (kind == KERNEL) & _of_names(trace, is_communication)
    result: Bools = kernels | ((kind == ANNOTATION) & named(trace, "gloo:"))
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

    The gap after the last event counts too: nothing more was launched.
    """
    events = trace.events
    rows = events.in_order(mine)
    start, end = events.start_ns[rows], np.maximum.accumulate(events.end_ns[rows])
    launch = launch_times(trace)[rows]
    gap_start = np.append(min(trace.steps[0].start_ns, start[0]), end)
    gap_end = np.append(start, max(trace.steps[-1].end_ns, end[-1]))
    launched = np.append(launch, np.iinfo(np.int64).max)
    host = (launched >= 0) & (launched > gap_start) & (gap_end > gap_start)
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
    operators = (events.kind == CPU_OP) & ~named(trace, _NO_COMPUTATION)
    annotations = events.kind == ANNOTATION
    waits = annotations & named(trace, "shardlab::wait:")
    messages = communicates & named(trace, MESSAGE)
    communicates &= ~messages
    calls, functional = named(trace, _CALL), named(trace, _FUNCTIONAL)
    unmarked = (calls & ~functional) | (annotations & named(trace, "FSDP::"))
    compute = NOTHING
    for thread in np.unique(events.tid[operators]).tolist():
        here = events.tid == thread
        # An operator that calls a collective may wait for it at any time until it ends.
        starts = events.start_ns[unmarked & here]
        starts = np.sort(starts[~holds(spans(trace, functional & here), starts)])
        rows = np.flatnonzero(operators & here)
        start, end = events.start_ns[rows], events.end_ns[rows]
        works = np.searchsorted(starts, start) == np.searchsorted(starts, end)
        # Gloo's own thread also runs operators: copies inside the collective.
        elsewhere = spans(trace, here & (communicates | waits | calls))
        compute |= union(start[works], end[works]) - elsewhere
    comm = spans(trace, communicates) | spans(trace, calls)
    comm |= _waiting_for(trace, messages) | spans(trace, named(trace, "shardlab::wait:check #"))
    # Blocked in a wait with nothing under way is no fault of Python's.
    whole = union(np.array([trace.steps[0].start_ns]), np.array([trace.steps[-1].end_ns]))
    late = whole - compute - comm - spans(trace, waits)
    return Device("cpu", compute, comm, NOTHING, late)


def _waiting_for(trace: Trace, messages: Bools) -> Intervals:
    """When the rank waited for messages. Gloo's span of one lasts from the call to the end of the
    wait, on the thread of the caller, which may compute meanwhile. Our waits have spans of their
    own."""
    events = trace.events
    annotations = events.kind == ANNOTATION
    calls = spans(trace, annotations & named(trace, "shardlab::(send|recv) #"))
    theirs = np.flatnonzero(messages)
    theirs = theirs[~holds(calls, events.start_ns[theirs])]
    own = spans(trace, annotations & named(trace, "shardlab::wait:(send|recv) #"))
    return own | union(waited_from(trace, theirs), events.end_ns[theirs])


def waited_from(trace: Trace, messages: Ints) -> Ints:
    """When the wait for each message over Gloo began, as far as a trace of others shows it: after
    the last operator that the thread ran before the wait ended."""
    events = trace.events
    result = events.start_ns[messages]
    if not len(messages):
        return result
    operators = (events.kind == CPU_OP) & ~named(trace, "c10d::")
    for thread in np.unique(events.tid[messages]).tolist():
        here = events.tid[messages] == thread
        ended = spans(trace, operators & (events.tid == thread)).end
        before = np.searchsorted(ended, events.end_ns[messages[here]], side="right")
        result[here] = np.maximum(result[here], np.insert(ended, 0, _NEVER)[before])
    return result


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
        self.parts = {
            name: spans(trace, annotations & named(trace, mark)) for name, mark in _PHASES.items()
        }
        self.marked = bool(len(self.parts["backward"]))
        if not self.marked:
            if trace.device == "gpu":
                self.engine = (events.kind == RUNTIME) & (events.tid != trace.main_thread)
            else:
                self.engine = named(trace, "autograd::engine::evaluate_function")
            self.parts["backward"] = self._hulls(trace, self.engine, self.parts["optimizer"].end)
        self._steps = trace.steps
        self._starts = np.array([step.start_ns for step in trace.steps], np.int64)

    @staticmethod
    def _hulls(trace: Trace, rows: Bools, updates: Ints) -> Intervals:
        """From the first of these events to the last, in each step, and in each part of it that
        ends with an update: a trace without step markers may hold several."""
        starts, ends = [], []
        begin, end = trace.events.start_ns[rows], trace.events.end_ns[rows]
        for step in trace.steps:
            updated = updates[(updates > step.start_ns) & (updates < step.end_ns)].tolist()
            for low, high in pairwise((step.start_ns, *updated, step.end_ns)):
                inside = (begin >= low) & (begin < high)
                if inside.any():
                    starts.append(int(begin[inside].min()))
                    ends.append(int(end[inside].max()))
        return union(np.array(starts, np.int64), np.array(ends, np.int64))

    def at(self, moment: int) -> str:
        for name, part in self.parts.items():
            if holds(part, np.array([moment])).all():
                return name
        step = self.step_at(moment)
        if step is None:
            return "other"
        if not self.marked:
            starts = self.parts["backward"].start
            later = starts[starts >= moment]
            return "forward" if len(later) and later[0] < step.end_ns else "other"
        # Between forward and backward, or after them: what waits for gradients is backward's.
        ended = []
        for name, part in self.parts.items():
            before = part.end[: int(np.searchsorted(part.end, moment, side="right"))]
            if len(before) and before[-1] > step.start_ns:
                ended.append((int(before[-1]), name))
        last = max(ended)[1] if ended else "other"
        return "other" if last == "optimizer" else last

    def step_at(self, moment: int) -> Step | None:
        """The step that a moment lies in."""
        i = int(np.searchsorted(self._starts, moment, side="right")) - 1
        return self._steps[i] if i >= 0 and moment < self._steps[i].end_ns else None


def holds(part: Intervals, moments: Ints) -> Bools:
    """Which of the moments lie in the set."""
    at = np.searchsorted(part.end, moments, side="right")
    starts = np.append(part.start, np.iinfo(np.int64).max)
    result: Bools = starts[at] <= moments
    return result
