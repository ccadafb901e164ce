"""The collectives of one rank: what its trace says of each, before ranks are matched."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shardlab.trace import activity, model
from shardlab.trace.model import Ints, Trace

_LEDGER = re.compile(r"shardlab::(?:wait:)?(\w+) #(\d+) ?(.*?)(?: \(ranks ([\d >]+)\))?$")
_FLAT = {
    "allreduce": "all_reduce", "allgather": "all_gather", "reducescatter": "reduce_scatter",
    "broadcast": "broadcast", "alltoall": "all_to_all", "alltoallv": "all_to_all",
    "reduce": "reduce", "barrier": "barrier", "gather": "gather", "scatter": "scatter",
    "send": "send", "recv": "recv", "sendrecv": "send_recv",
}  # fmt: skip
POINT_TO_POINT = ("send", "recv", "send_recv")

# Bytes of one element, by the names that profilers give to types.
_BYTES = {
    "float": 4, "double": 8, "half": 2, "bfloat16": 2, "c10::half": 2, "c10::bfloat16": 2,
    "long": 8, "int": 4, "short": 2, "char": 1, "byte": 1, "bool": 1, "long int": 8,
    "signed char": 1, "unsigned char": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "complexfloat": 8, "complexdouble": 16,
}  # fmt: skip
Key = tuple[str, str, Any]  # how a collective is known, its group, its number in the group
Errors = Mapping[tuple[int, int], int]  # of two ranks' clocks against each other, in nanoseconds


@dataclass(frozen=True)
class Part:
    """One rank's part in one collective, before matching. Times on the rank's own clock."""

    rank: int
    start_ns: int
    end_ns: int
    launch_ns: int | None
    kind: str
    label: str = ""
    ledger: int | None = None
    group: str = ""
    members: str = ""  # the group's ranks, as the trace says: groups may share a name
    group_size: int | None = None
    seq: int | None = None
    bytes: int | None = None
    dtype: str = ""
    step: int | None = None  # the step's number
    phase: str = "other"
    emulates: str = ""  # what was asked of Gloo, where it does something else for it
    is_message: bool = False  # of ours: ``members`` are its two ends, "0>1"
    # When a message over Gloo was begun: its start and end are those of the wait for it.
    begun_ns: int | None = None
    # Of a message of others: the ranks that can be its other end (empty: any), and where it is not
    # known which it is, the time before which none of them had begun it.
    peers: frozenset[int] = frozenset()
    other_ns: int | None = None
    is_between: bool = False  # a pipeline launched it between two of its actions
    thread: int | None = None  # of Gloo's, that did it
    is_of_unknown_group: bool = False


def begun_at(part: Part, offsets: Mapping[int, int]) -> int:
    """When it began its message, on the common clock."""
    return (part.start_ns if part.begun_ns is None else part.begun_ns) - offsets[part.rank]


def kind_of(name: str) -> str:
    """``ncclDevKernel_AllReduce_Sum_f32_RING_LL`` and ``_allgather_base`` to the usual words."""
    text = name.partition("(")[0].removeprefix("void ")
    text = re.sub(r"^(gloo|nccl):", "", text)
    text = re.sub(r"^.*?(nccl|rccl)(Dev)?Kernel_", "", text, flags=re.IGNORECASE)
    flat = re.sub(r"[^a-z]", "", text.lower().replace("_base", "").replace("_coalesced", ""))
    for word in sorted(_FLAT, key=len, reverse=True):
        if flat.startswith(word):
            return _FLAT[word]
    return "collective" if not flat or flat.startswith(("nccl", "rccl", "generic")) else flat


def parts_of(trace: Trace) -> list[Part]:
    """This rank's collectives, in the order in which they began."""
    events = trace.events
    rows = events.in_order(activity.communication_rows(trace))
    if not len(rows):
        return []
    launches = _launches(trace, rows)
    phases = activity.Phases(trace)
    nccl, ours = _Spans(trace, "nccl:"), _Spans(trace, r"shardlab::\w+ #")
    pipelines, actions = _Spans(trace, activity.PIPELINE), _Spans(trace, activity.ACTION)
    ledger, waits = _read_ledger(trace), _waits(trace, "send|recv")
    checks = _waits(trace, "check") if trace.device == "cpu" else {}
    sent = rows[activity.named(trace, activity.MESSAGE)[rows]]
    waited_from = dict(zip(sent.tolist(), activity.waited_from(trace, sent).tolist(), strict=True))
    parts = []
    for row in rows.tolist():
        launch = launches.get(row)
        about, kind, span = trace.comm_args.get(row), kind_of(trace.names[events.name[row]]), None
        if launch is not None:
            span = ours.around(*launch[:2])
            if (call := nccl.around(*launch[:2])) is not None and events.kind[row] == model.KERNEL:
                about = about or trace.comm_args.get(call)
                kind = kind_of(trace.names[events.name[call]])
        emulates = ""
        if launch is not None and events.kind[row] == model.ANNOTATION and kind == "all_reduce":
            asked = kind_of(trace.names[events.name[launch[2]]].removeprefix("c10d::"))
            emulates = asked if asked == "reduce_scatter" else ""
        is_between = (
            launch is not None
            and pipelines.around(*launch[:2]) is not None
            and actions.around(*launch[:2]) is None
        )
        moment = int(events.start_ns[row]) if launch is None else launch[0]
        step = phases.step_at(moment)
        thread = trace.threads[events.tid[row]] if events.kind[row] == model.ANNOTATION else None
        part = Part(
            rank=trace.rank,
            start_ns=int(events.start_ns[row]),
            end_ns=int(events.end_ns[row]),
            launch_ns=None if launch is None else launch[0],
            kind=kind,
            step=None if step is None else step.number,
            phase=phases.at(moment),
            emulates=emulates,
            is_between=is_between,
            thread=thread if isinstance(thread, int) else None,
        )
        part = _described(part, about, trace)
        found = _LEDGER.match(trace.names[events.name[span]]) if span is not None else None
        if found:
            part = _from_ledger(part, found, ledger)
        if part.is_message and events.kind[row] == model.ANNOTATION:
            start, end = waits.get(part.ledger, (moment, moment))
            part = replace(part, begun_ns=moment, start_ns=start, end_ns=end)
        elif part.ledger is None and row in waited_from:
            start = waited_from[row]
            part = replace(
                part,
                begun_ns=moment,
                start_ns=moment if start == part.start_ns else start,
                is_between=is_between or not pipelines,
                peers=_peers(trace, None if launch is None else trace.comm_args.get(launch[2])),
            )
        elif part.ledger in checks:  # the guard lets nobody in before all have come
            part = replace(part, start_ns=checks[part.ledger][0])
        parts.append(part)
    return _joined(parts)


class _Spans:
    """Named spans on threads: which one is around a moment?"""

    def __init__(self, trace: Trace, pattern: str) -> None:
        events = trace.events
        rows = (events.kind == model.ANNOTATION) & activity.named(trace, pattern)
        self._by_thread: dict[int, tuple[Any, Any, Any]] = {}
        for thread in np.unique(events.tid[rows]).tolist():
            here = events.in_order(rows & (events.tid == thread))
            self._by_thread[thread] = (here, events.start_ns[here], events.end_ns[here])

    def __len__(self) -> int:
        return len(self._by_thread)

    def around(self, moment: int, thread: int) -> int | None:
        """The innermost, by its row."""
        rows, starts, ends = self._by_thread.get(thread, ((), np.empty(0), np.empty(0)))
        i = int(np.searchsorted(starts, moment, side="right")) - 1
        for back in range(i, max(-1, i - 4), -1):
            if ends[back] >= moment:
                return int(rows[back])
        return None


def _waits(trace: Trace, what: str) -> dict[int | None, tuple[int, int]]:
    """When this rank waited for calls of ours, by their numbers in the ledger."""
    events = trace.events
    found: dict[int | None, tuple[int, int]] = {}
    rows = (events.kind == model.ANNOTATION) & activity.named(trace, f"shardlab::wait:({what}) #")
    for row in np.flatnonzero(rows).tolist():
        if name := _LEDGER.match(trace.names[events.name[row]]):
            found[int(name[2])] = int(events.start_ns[row]), int(events.end_ns[row])
    return found


def _launches(trace: Trace, rows: Ints) -> dict[int, tuple[int, int, int]]:
    """For each collective, when and on which thread the host launched it, and by which event."""
    events = trace.events
    calls = activity.launch_rows(trace)
    gloo = rows[(calls[rows] < 0) & (events.kind[rows] == model.ANNOTATION)]
    enqueued = events.in_order((events.kind == model.CPU_OP) & activity.named(trace, "c10d::"))
    # Gloo takes what was enqueued in that order; a call enqueues one piece of work. Messages do not
    # queue with the others.
    is_sent = activity.named(trace, activity.MESSAGE)
    is_sending = activity.named(trace, "c10d::(send|recv)")
    for own, asked in (
        (gloo[is_sent[gloo]], enqueued[is_sending[enqueued]]),
        (gloo[~is_sent[gloo]], enqueued[~is_sending[enqueued]]),
    ):
        if len(own) == len(asked):
            calls[own] = asked
    rows = rows[calls[rows] >= 0]
    when, thread = events.start_ns[calls[rows]].tolist(), events.tid[calls[rows]].tolist()
    launched = zip(when, thread, calls[rows].tolist(), strict=True)
    return dict(zip(rows.tolist(), launched, strict=True))


def _peers(trace: Trace, about: model.CommArgs | None) -> frozenset[int]:
    """The ranks that can be a message's other end. Gloo's arguments give its rank in a group, but
    not in which."""
    if about is None or about.peer < 0:
        return frozenset()
    info = trace.metadata.get("distributedInfo")
    groups = info.get("pg_config") if isinstance(info, Mapping) else None
    found = {about.peer}
    if isinstance(groups, list):
        ranks = [g.get("ranks") for g in groups if isinstance(g, Mapping)]
        mine = [r for r in ranks if isinstance(r, list) and trace.rank in r]
        named = [r[about.peer] for r in mine if about.peer < len(r)]
        found = {rank for rank in named if isinstance(rank, int)} or found
    return frozenset(found - {trace.rank})


def _described(part: Part, about: model.CommArgs | None, trace: Trace) -> Part:
    if about is None:
        return replace(part, group_size=trace.world)
    size = _BYTES.get(about.dtype.lower())
    elements = about.in_elements
    ranks = about.group_size if about.group_size > 0 else trace.world
    if part.kind == "all_gather" and about.in_elements >= 0:
        elements = max(about.out_elements, about.in_elements * (ranks or 1))
    return replace(
        part,
        kind=kind_of(about.collective) if about.collective else part.kind,
        group=about.group or about.group_ranks,
        members=about.group_ranks,
        group_size=ranks,
        seq=about.seq if about.seq >= 0 else None,
        bytes=elements * size if size is not None and elements >= 0 else None,
        dtype=about.dtype,
    )


def _read_ledger(trace: Trace) -> Mapping[int, Mapping[str, Any]]:
    """The run's own record of this rank's collectives, if the trace lies in a run folder."""
    if not trace.shardlab or len(trace.path.parents) < 3:
        return {}
    path = trace.path.parents[2] / f"ledger.rank{trace.rank}.jsonl"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        return {row["seq"]: row for row in map(json.loads, lines)}
    except (OSError, ValueError, KeyError):
        return {}


def _from_ledger(part: Part, found: re.Match[str], rows: Mapping[int, Mapping[str, Any]]) -> Part:
    row = rows.get(int(found[2]), {})
    return replace(
        part,
        kind=part.kind if found[1] == part.emulates else found[1],
        ledger=int(found[2]),
        label=found[3],
        members=found[4] or "",
        is_message=">" in (found[4] or ""),
        bytes=row.get("bytes", part.bytes if found[1] == part.kind else None),
        dtype=row.get("dtype", part.dtype),
        group_size=row.get("ranks", part.group_size),
    )


def _joined(parts: Sequence[Part]) -> list[Part]:
    """One of our collectives may be several messages: they are one part."""
    result: dict[Any, Part] = {}
    for i, part in enumerate(parts):
        key = ("alone", i) if part.ledger is None else ("ledger", part.ledger)
        first = result.setdefault(key, part)
        if first is not part:
            size = part.bytes if first.bytes is None else first.bytes
            result[key] = replace(first, end_ns=max(first.end_ns, part.end_ns), bytes=size)
    return list(result.values())
