"""Collectives: found in each rank's trace, matched across ranks, and who waited for whom.

A collective of ours is known by its place among those of its group, kind and label in a step, a
message by its two ends too. (The ledger's numbers differ between ranks that send messages.) Others
are known by NCCL's number within their group, else by their place in the order of their group's
collectives in a step.
"""

from __future__ import annotations

import functools
import json
import operator
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shardlab.numbers import wire_bytes
from shardlab.trace import activity, clocks, model
from shardlab.trace.intervals import NOTHING, Intervals, union
from shardlab.trace.model import Ints, Trace

_LEDGER = re.compile(r"shardlab::(?:wait:)?(\w+) #(\d+) ?(.*?)(?: \(ranks ([\d >]+)\))?$")
_FLAT = {
    "allreduce": "all_reduce", "allgather": "all_gather", "reducescatter": "reduce_scatter",
    "broadcast": "broadcast", "alltoall": "all_to_all", "alltoallv": "all_to_all",
    "reduce": "reduce", "barrier": "barrier", "gather": "gather", "scatter": "scatter",
    "send": "send", "recv": "recv", "sendrecv": "send_recv",
}  # fmt: skip
_MICRO = re.compile(r" of micro-batch \d+")
_POINT_TO_POINT = ("send", "recv", "send_recv")
# They end at about the same time on every rank, so they can set the clocks.
_ENDS_TOGETHER = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")

# Bytes of one element, by the names that profilers give to types.
_BYTES = {
    "float": 4, "double": 8, "half": 2, "bfloat16": 2, "c10::half": 2, "c10::bfloat16": 2,
    "long": 8, "int": 4, "short": 2, "char": 1, "byte": 1, "bool": 1, "long int": 8,
    "signed char": 1, "unsigned char": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "complexfloat": 8, "complexdouble": 16,
}  # fmt: skip
SLACK_NS = 1_000_000  # of clocks that were aligned


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
    # When a message of ours over Gloo was begun: its start and end are those of the wait for it.
    begun_ns: int | None = None
    is_between: bool = False  # a pipeline launched it between two of its actions


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


# ------------------------------------------------------------------ one rank


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
        )
        part = _described(part, about, trace)
        found = _LEDGER.match(trace.names[events.name[span]]) if span is not None else None
        if found:
            part = _from_ledger(part, found, ledger)
        if part.is_message and events.kind[row] == model.ANNOTATION:
            start, end = waits.get(part.ledger, (moment, moment))
            part = replace(part, begun_ns=moment, start_ns=start, end_ns=end)
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
        kind=found[1],
        emulates="" if found[1] == part.emulates else part.emulates,
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


# ------------------------------------------------------------------ all ranks


Key = tuple[str, str, Any]  # how a collective is known, its group, its number in the group
Spans = Mapping[tuple[int, str], Intervals]
Errors = Mapping[tuple[int, int], int]  # of two ranks' clocks against each other, in nanoseconds


@dataclass(frozen=True)
class Matched:
    """The collectives of all ranks on one clock."""

    collectives: tuple[model.Collective, ...]
    offsets: Mapping[int, int]  # to be subtracted from a rank's times
    # Per rank, on its own clock: when it was in a collective and others were not, by the rank
    # that came last and the phase that this one was in.
    waits: Mapping[int, Spans]
    bubbles: Mapping[int, Intervals]  # per rank, on its own clock: a pipeline's
    warnings: tuple[str, ...] = ()

    def waited(self, rank: int) -> Intervals:
        return functools.reduce(operator.or_, self.waits.get(rank, {}).values(), NOTHING)


def match(traces: Sequence[Trace]) -> Matched:
    """Match the collectives of these ranks (one trace each)."""
    keyed, uneven = _keyed({trace.rank: parts_of(trace) for trace in traces})
    warnings = []
    if uneven:
        warnings.append(
            f"in {uneven} cases the ranks have different numbers of collectives of a kind in a "
            "step: those are not matched"
        )
    low = min((t.base_ns for t in traces), default=0)
    bases = {t.rank: low - t.base_ns for t in traces}  # subtracted: adds the base
    offsets = _aligned(traces, keyed, bases)
    errors = _errors(traces)
    if len(known := set(_hosts(traces).values()) - {None}) > 1 and not errors:
        warnings.append(
            f"the traces are of {len(known)} hosts whose clocks were not measured: they are set by "
            "the ends of collectives, and waits are as exact as those end together"
        )
    if impossible := _impossible(keyed, offsets, errors):
        offsets = _aligned(traces, keyed, bases)  # by what is left
        warnings.append(
            f"{impossible} collectives would have ended on one rank before another began: the "
            "order of collectives in these traces cannot be trusted, and they are not matched"
        )
    collectives = []
    waits: dict[int, dict[tuple[int, str], list[tuple[int, int]]]] = {}
    bubbles: dict[int, list[tuple[int, int]]] = {}
    for (how, _, number), members in keyed.items():
        judge = _message if how == "message" and len(members) == 2 else _collective
        number = number if members[0].ledger is None else members[0].ledger
        row, late = judge(how, str(number), members, offsets, errors)
        between = {p.rank for p in members if p.is_between}
        collectives.append(replace(row, bubble=bool(between)))
        for rank, (start, end) in late.items():
            assert row.last_rank is not None
            if rank in between:
                mine = bubbles.setdefault(rank, [])
            else:
                mine = waits.setdefault(rank, {}).setdefault((row.last_rank, row.phase), [])
            mine.append((start + offsets[rank], end + offsets[rank]))
        # PyTorch's pipelines do not say which message is which: all of it is bubble.
        for p in members:
            if p.is_between and p.kind in _POINT_TO_POINT and p.ledger is None:
                bubbles.setdefault(p.rank, []).append((p.start_ns, p.end_ns))
    missing = {c.group_size for c in collectives if c.group_size} - {len(traces)}
    if len(traces) > 1 and missing and max(missing) > len(traces):
        warnings.append(
            f"the traces of {len(traces)} ranks are here, collectives have up to {max(missing)}: "
            "another may have come last, and waits may be longer than shown"
        )
    collectives.sort(key=lambda c: min(p.start_ns for p in c.participants))
    return Matched(
        tuple(collectives),
        offsets,
        {rank: {key: _union(spans) for key, spans in mine.items()} for rank, mine in waits.items()},
        {rank: _union(spans) for rank, spans in bubbles.items()},
        tuple(warnings),
    )


def _union(spans: Sequence[tuple[int, int]]) -> Intervals:
    return union(*np.array(spans, np.int64).T)


def _keyed(parts: Mapping[int, Sequence[Part]]) -> tuple[dict[Key, list[Part]], int]:
    """Parts that are of one collective, under one key; and in how many series the ranks differ.

    A series is what is matched by order: the collectives of a kind and group in one step.
    """
    keyed: dict[Key, list[Part]] = defaultdict(list)
    lengths: dict[tuple[str, str], Counter[int]] = defaultdict(Counter)  # of series, by rank
    ours: Counter[tuple[int, str, str]] = Counter()  # by rank, group, and step, kind and label
    for rank, mine in parts.items():
        for i, part in enumerate(mine):
            group = part.group + part.members
            is_alone = part.kind in _POINT_TO_POINT and not part.is_message
            if is_alone or part.step is None:
                keyed["alone", str(rank), i].append(part)
            elif part.ledger is not None:
                how, kind = ("message", "") if part.is_message else ("ledger", part.kind)
                group, what = f"{part.group_size} {group}", f"{part.step}:{kind}:{part.label}"
                keyed[how, group, f"{what}:{ours[rank, group, what]}"].append(part)
                ours[rank, group, what] += 1
            elif part.seq is not None:
                keyed["seq", group, part.seq].append(part)
            else:
                series = f"{part.step}:{part.kind}"
                keyed["order", group, f"{series}:{lengths[group, series][rank]}"].append(part)
                lengths[group, series][rank] += 1
    uneven = {series for series, counts in lengths.items() if len(set(counts.values())) > 1}
    _part(keyed, [key for key in keyed if _series(key) in uneven])
    # Several groups under one number: which is whose is not known.
    _part(
        keyed, [k for k, members in keyed.items() if len(members) > (members[0].group_size or 1e9)]
    )
    return keyed, len(uneven)


def _series(key: Key) -> tuple[str, str] | None:
    return (key[1], key[2].rpartition(":")[0]) if key[0] == "order" else None


def _part(keyed: dict[Key, list[Part]], keys: Sequence[Key]) -> None:
    """Undo matches: each rank's part is a collective of its own."""
    for key in keys:
        for part in keyed.pop(key):
            keyed["alone", str(part.rank), f"{key[1]}:{key[2]}"].append(part)


def _errors(traces: Sequence[Trace]) -> Errors:
    """By how many nanoseconds times of two ranks may be wrong against each other."""
    return {
        (a.rank, b.rank): clocks.between(a.clock, b.clock)
        for a in traces
        if a.clock
        for b in traces
    }


def _impossible(keyed: dict[Key, list[Part]], offsets: Mapping[int, int], errors: Errors) -> int:
    """Undo matches by order that cannot be: a missing event shifts all that follow it.

    Where one of a step's collectives of a kind is impossible, the others are not to be trusted.
    """
    wrong = set()
    slack = max(SLACK_NS, *errors.values(), 0)
    for key, members in keyed.items():
        if key[0] == "order" and members[0].kind in _ENDS_TOGETHER:
            begin = max(p.start_ns - offsets[p.rank] for p in members)
            if begin > min(p.end_ns - offsets[p.rank] for p in members) + slack:
                wrong.add(_series(key))
    suspects = [key for key in keyed if _series(key) in wrong]
    _part(keyed, suspects)
    return len(suspects)


def _hosts(traces: Sequence[Trace]) -> dict[int, Any]:
    return {t.rank: t.shardlab.get("host", t.metadata.get("host_name")) for t in traces}


def _aligned(
    traces: Sequence[Trace],
    keyed: Mapping[Key, Sequence[Part]],
    offsets: Mapping[int, int],
) -> dict[int, int]:
    """Clocks of different hosts that were not measured, set by the ends of collectives; one host
    has one clock."""
    hosts = _hosts(traces)
    is_one_host = None not in hosts.values() and len(set(hosts.values())) == 1
    if len(traces) < 2 or is_one_host or all(t.clock for t in traces):
        return dict(offsets)
    reference = traces[0].rank
    differences: dict[int, list[int]] = defaultdict(list)
    for members in keyed.values():
        ends = {p.rank: p.end_ns - offsets[p.rank] for p in members}
        if reference in ends and members[0].kind in _ENDS_TOGETHER:
            for rank, end in ends.items():
                if hosts[rank] is None or hosts[rank] != hosts[reference]:
                    differences[rank].append(end - ends[reference])
    result = dict(offsets)
    for rank, found in differences.items():
        if rank != reference and len(found) >= 3:
            result[rank] += int(np.median(found))
    return result


def _collective(
    how: str, number: str, members: Sequence[Part], offsets: Mapping[int, int], errors: Errors
) -> tuple[model.Collective, dict[int, tuple[int, int]]]:
    """One row, and for each rank that waited from when to when, on the common clock.

    What is shorter than the error of the clocks is no wait.
    """
    starts = {p.rank: p.start_ns - offsets[p.rank] for p in members}
    ends = {p.rank: p.end_ns - offsets[p.rank] for p in members}
    last = max(starts, key=lambda rank: (starts[rank], rank))
    arrived = starts[last]
    together = len(members) > 1
    late = {
        rank: (start, until)
        for rank, start in starts.items()
        if together and (until := min(arrived, ends[rank])) - start > errors.get((rank, last), 0)
    }
    transfer = max(ends.values()) - arrived
    first = next((p for p in members if p.bytes is not None), members[0])
    culprit = next(p for p in members if p.rank == last)
    algorithm, bus = _bandwidth(first, transfer)
    return model.Collective(
        id=f"{first.group or '0'}:{number}" if together else f"r{last}:{number}",
        matched_by=how if together else "alone",
        kind=first.kind,
        label=first.label,
        group=first.group,
        step=culprit.step,
        phase=culprit.phase,
        bytes=first.bytes,
        dtype=first.dtype,
        group_size=first.group_size,
        participants=tuple(
            model.Participant(
                p.rank,
                None if p.launch_ns is None else p.launch_ns - offsets[p.rank],
                starts[p.rank],
                ends[p.rank],
                (late[p.rank][1] - late[p.rank][0]) / 1000 if p.rank in late else 0.0,
            )
            for p in sorted(members, key=lambda p: p.rank)
        ),
        last_rank=last if together else None,
        skew_us=(arrived - min(starts.values())) / 1000,
        transfer_us=transfer / 1000,
        wait_us=sum(end - start for start, end in late.values()) / 1000,
        algorithm_gbps=algorithm,
        bus_gbps=bus,
        emulates=first.emulates,
    ), late


def _message(
    how: str, number: str, members: Sequence[Part], offsets: Mapping[int, int], errors: Errors
) -> tuple[model.Collective, dict[int, tuple[int, int]]]:
    """One row of a message's two ends, and for each that waited from when to when.

    It moves as soon as both have begun it. An end that waits before that waits for the other.
    """
    ends = {p.kind: p for p in members}
    begun = {
        p.rank: (p.start_ns if p.begun_ns is None else p.begun_ns) - offsets[p.rank]
        for p in members
    }
    row, _ = _collective(how, number, [ends["recv"], ends["send"]], offsets, errors)
    receiver, sender = ends["recv"], ends["send"]
    late = {}
    for p, other in ((receiver, sender), (sender, receiver)):
        start, end = (ns - offsets[p.rank] for ns in (p.start_ns, p.end_ns))
        until = min(begun[other.rank], end)
        if until - start > errors.get((p.rank, other.rank), 0):
            late[p.rank] = start, until
    start, end = (ns - offsets[receiver.rank] for ns in (receiver.start_ns, receiver.end_ns))
    transfer = max(end - max(start, begun[sender.rank]), 0)
    # How long a message took that came before it was waited for is not known.
    algorithm, bus = _bandwidth(receiver, transfer if begun[sender.rank] >= start else 0)
    waited = {rank: (until - since) / 1000 for rank, (since, until) in late.items()}
    return replace(
        row,
        kind="send",
        participants=tuple(replace(p, wait_us=waited.get(p.rank, 0.0)) for p in row.participants),
        last_rank=max(begun, key=lambda rank: begun[rank]),
        skew_us=max(waited.values(), default=0.0),
        transfer_us=transfer / 1000,
        wait_us=sum(waited.values()),
        algorithm_gbps=algorithm,
        bus_gbps=bus,
    ), late


def _bandwidth(part: Part, transfer_ns: int) -> tuple[float | None, float | None]:
    """Bytes over time, and the same as what each link carried, as nccl-tests count it."""
    if not part.bytes or transfer_ns <= 0:
        return None, None
    algorithm = part.bytes / transfer_ns  # bytes per ns are GB/s
    if part.kind not in _ENDS_TOGETHER:
        return algorithm, algorithm
    ranks = part.group_size
    return algorithm, wire_bytes(part.kind, part.bytes, ranks) / transfer_ns if ranks else None


# ------------------------------------------------------------------ summaries


def summarize(
    collectives: Sequence[model.Collective], by: str
) -> tuple[model.CollectiveSummary, ...]:
    """Totals by kind, or by kind and label; the longest first."""
    groups: dict[str, list[model.Collective]] = defaultdict(list)
    for row in collectives:
        label = _MICRO.sub("", row.label)  # a pipeline's messages, by where they go
        groups[row.called if by == "kind" else f"{row.called} {label}".strip()].append(row)
    result = []
    for name, rows in groups.items():
        known = [row for row in rows if row.bytes is not None]
        at_least = sum(row.bytes or 0 for row in known)
        transfer = sum(row.transfer_us for row in known if row.bus_gbps is not None)
        moved = sum(row.bytes or 0 for row in known if row.bus_gbps is not None)
        carried = sum((row.bus_gbps or 0) * row.transfer_us for row in known)
        result.append(
            model.CollectiveSummary(
                name,
                len(rows),
                at_least if len(known) == len(rows) else None,
                sum(row.skew_us + row.transfer_us for row in rows),
                sum(row.transfer_us for row in rows),
                sum(row.wait_us for row in rows),
                moved / transfer / 1000 if transfer and moved else None,
                carried / transfer if transfer and carried else None,
                at_least,
            )
        )
    return tuple(sorted(result, key=lambda row: -row.time_us))


def stragglers(
    windows: Iterable[tuple[Matched, Mapping[int, Intervals]]],
) -> tuple[model.Straggler, ...]:
    """Who made others wait, the worst first. With each window, per rank: when it communicated and
    did not compute."""
    table: dict[tuple[int, str], list[model.Collective]] = defaultdict(list)
    waited: Counter[tuple[int, str]] = Counter()
    lost: Counter[tuple[int, str]] = Counter()
    for matched, exposed in windows:
        for row in matched.collectives:
            if row.last_rank is not None and row.wait_us > 0 and not row.bubble:
                table[row.last_rank, row.phase].append(row)
        for victim, waits in matched.waits.items():
            for culprit, spans in waits.items():
                waited[culprit] += spans.length
                lost[culprit] += (spans & exposed[victim]).length
    result = []
    for (rank, phase), rows in table.items():
        worst = max(rows, key=lambda row: max(p.wait_us for p in row.participants))
        result.append(
            model.Straggler(
                rank,
                phase,
                len(rows),
                others_waited_us=waited[rank, phase] / 1000,
                lost_us=lost[rank, phase] / 1000,
                worst_us=max(p.wait_us for p in worst.participants),
                worst_collective=worst.id,
                worst_label=f"{worst.called} {worst.label}".strip(),
            )
        )
    return tuple(sorted(result, key=lambda row: -row.others_waited_us))
