"""Collectives: found in each rank's trace, matched across ranks, and who waited for whom.

A collective is known by the ledger's number where our capture put one, else by NCCL's number
within its group, else by its place in the order of its group's collectives in a step.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from shardlab.numbers import wire_bytes
from shardlab.trace import activity
from shardlab.trace.decode import bytes_of
from shardlab.trace.intervals import NOTHING, Intervals, union
from shardlab.trace.model import (
    ANNOTATION,
    CPU_OP,
    KERNEL,
    Collective,
    CollectiveSummary,
    CommArgs,
    Participant,
    Straggler,
    Trace,
)  # fmt: skip

_LEDGER = re.compile(r"shardlab::(?!wait:)(\w+) #(\d+) ?(.*)")
_FLAT = {
    "allreduce": "all_reduce", "allgather": "all_gather", "reducescatter": "reduce_scatter",
    "broadcast": "broadcast", "alltoall": "all_to_all", "alltoallv": "all_to_all",
    "reduce": "reduce", "barrier": "barrier", "gather": "gather", "scatter": "scatter",
    "send": "send", "recv": "recv", "sendrecv": "send_recv",
}  # fmt: skip
_POINT_TO_POINT = ("send", "recv", "send_recv")
# They end at about the same time on every rank, so they can set the clocks.
_ENDS_TOGETHER = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")

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
    rows = np.flatnonzero(activity.communication_rows(trace))
    rows = rows[np.argsort(events.start_ns[rows], kind="stable")]
    if not len(rows):
        return []
    launches = _launches(trace, rows)
    args = {a.event: a for a in trace.comm_args}
    phases = activity.Phases(trace)
    nccl = _Spans(trace, "nccl:")
    ours = _Spans(trace, "shardlab::", without=activity.WAIT)
    ledger = _read_ledger(trace)
    parts = []
    for row in rows.tolist():
        launch = launches.get(row)
        about, kind, span = args.get(row), kind_of(trace.names[events.name[row]]), None
        if launch is not None:
            span = ours.around(*launch)
            if (call := nccl.around(*launch)) is not None and events.kind[row] == KERNEL:
                about = about or args.get(call)
                kind = kind_of(trace.names[events.name[call]])
        moment = int(events.start_ns[row]) if launch is None else launch[0]
        index = phases.step_at(moment)
        part = Part(
            rank=trace.rank,
            start_ns=int(events.start_ns[row]),
            end_ns=int(events.end_ns[row]),
            launch_ns=None if launch is None else launch[0],
            kind=kind,
            step=None if index is None else trace.steps[index].number,
            phase=phases.at(moment),
        )
        part = _described(part, about, trace)
        found = _LEDGER.match(trace.names[events.name[span]]) if span is not None else None
        if found:
            part = _from_ledger(part, found, ledger)
        parts.append(part)
    return _joined(parts)


class _Spans:
    """Named spans on threads: which one is around a moment?"""

    def __init__(self, trace: Trace, prefix: str, without: str = "-") -> None:
        events = trace.events
        rows = (events.kind == ANNOTATION) & activity.named(trace, prefix=prefix)
        rows &= ~activity.named(trace, prefix=without)
        self._by_thread: dict[int, tuple[Any, Any, Any]] = {}
        for thread in np.unique(events.tid[rows]).tolist():
            here = np.flatnonzero(rows & (events.tid == thread))
            here = here[np.argsort(events.start_ns[here], kind="stable")]
            self._by_thread[thread] = (here, events.start_ns[here], events.end_ns[here])

    def around(self, moment: int, thread: int) -> int | None:
        """The innermost, by its row."""
        rows, starts, ends = self._by_thread.get(thread, ((), np.empty(0), np.empty(0)))
        i = int(np.searchsorted(starts, moment, side="right")) - 1
        for back in range(i, max(-1, i - 4), -1):
            if ends[back] >= moment:
                return int(rows[back])
        return None


def _launches(trace: Trace, rows: Any) -> dict[int, tuple[int, int]]:
    """For each collective, when and on which thread the host launched it."""
    events = trace.events
    result: dict[int, tuple[int, int]] = {}
    calls = activity.launch_rows(trace)
    gloo = []
    for row in rows.tolist():
        if calls[row] >= 0:
            call = calls[row]
            result[row] = (int(events.start_ns[call]), int(events.tid[call]))
        elif events.kind[row] == ANNOTATION:
            gloo.append(row)
    # Gloo takes what was enqueued in that order; a call enqueues one piece of work.
    enqueued = np.flatnonzero((events.kind == CPU_OP) & activity.named(trace, prefix="c10d::"))
    enqueued = enqueued[np.argsort(events.start_ns[enqueued], kind="stable")]
    if len(enqueued) == len(gloo):
        for row, call in zip(gloo, enqueued.tolist(), strict=True):
            result[row] = (int(events.start_ns[call]), int(events.tid[call]))
    return result


def _described(part: Part, about: CommArgs | None, trace: Trace) -> Part:
    if about is None:
        return replace(part, group_size=trace.world)
    size = bytes_of(about.dtype)
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
        ledger=int(found[2]),
        label=found[3],
        bytes=row.get("bytes", part.bytes if found[1] == part.kind else None),
        dtype=row.get("dtype", part.dtype),
        group_size=row.get("ranks", part.group_size),
    )


def _joined(parts: Sequence[Part]) -> list[Part]:
    """One of our collectives may be several messages: they are one part."""
    result: dict[Any, Part] = {}
    for i, part in enumerate(parts):
        key = ("alone", i) if part.ledger is None else ("ledger", part.ledger)
        if key not in result:
            result[key] = part
            continue
        first = result[key]
        result[key] = replace(
            first,
            end_ns=max(first.end_ns, part.end_ns),
            bytes=first.bytes if first.bytes is not None else part.bytes,
        )
    return list(result.values())


# ------------------------------------------------------------------ all ranks


@dataclass(frozen=True)
class Matched:
    """The collectives of all ranks on one clock."""

    collectives: tuple[Collective, ...]
    offsets: Mapping[int, int]  # to be subtracted from a rank's times
    waits: Mapping[int, Intervals]  # per rank, on its own clock: in a collective, others not
    warnings: tuple[str, ...] = ()
    culprits: Mapping[tuple[int, str, int], Intervals] = field(default_factory=dict)


def match(traces: Sequence[Trace]) -> Matched:
    """Match the collectives of these ranks (one trace each)."""
    parts = {trace.rank: parts_of(trace) for trace in traces}
    keyed, warnings = _keyed(parts)
    offsets = {t.rank: t.base_ns for t in traces}
    low = min(offsets.values(), default=0)
    offsets = {rank: low - base for rank, base in offsets.items()}  # subtracted: adds the base
    bases, offsets = offsets, _aligned(traces, keyed, offsets)
    if impossible := _impossible(keyed, offsets):
        offsets = _aligned(traces, keyed, bases)  # by what is left
        warnings.append(
            f"{impossible} collectives would have ended on one rank before another began: the "
            "order of collectives in these traces cannot be trusted, and they are not matched"
        )
    collectives, waits, culprits = [], defaultdict(list), defaultdict(list)
    for (how, _, number), members in keyed.items():
        row, late = _collective(how, str(number), members, offsets)
        collectives.append(row)
        for rank, (start, end) in late.items():
            own = (start + offsets[rank], end + offsets[rank])
            waits[rank].append(own)
            assert row.last_rank is not None
            culprits[(row.last_rank, row.phase, rank)].append(own)
    missing = {c.group_size for c in collectives if c.group_size} - {len(traces)}
    if len(traces) > 1 and missing and max(missing) > len(traces):
        warnings.append(
            f"the traces of {len(traces)} ranks are here, collectives have up to {max(missing)}: "
            "who came last may be another, and waits are at least what is said"
        )
    collectives.sort(key=lambda c: min(p.start_ns for p in c.participants))
    return Matched(
        tuple(collectives),
        offsets,
        {rank: _as_intervals(spans) for rank, spans in waits.items()},
        tuple(warnings),
        {key: _as_intervals(spans) for key, spans in culprits.items()},
    )


def _as_intervals(spans: Iterable[tuple[int, int]]) -> Intervals:
    table = np.array(list(spans), np.int64).reshape(-1, 2)
    return union(table[:, 0], table[:, 1]) if len(table) else NOTHING


def _keyed(
    parts: Mapping[int, Sequence[Part]],
) -> tuple[dict[tuple[str, str, Any], list[Part]], list[str]]:
    """Parts that are of one collective, under one key: how it is known, group, number."""
    keyed: dict[tuple[str, str, Any], list[Part]] = defaultdict(list)
    ordered: dict[tuple[Any, ...], dict[int, list[Part]]] = defaultdict(lambda: defaultdict(list))
    for rank, mine in parts.items():
        for i, part in enumerate(mine):
            if part.kind in _POINT_TO_POINT or part.step is None:
                keyed[("alone", str(rank), i)].append(part)
            elif part.ledger is not None:
                keyed[("ledger", f"{part.group_size}", part.ledger)].append(part)
            elif part.seq is not None:
                keyed[("seq", part.group + part.members, part.seq)].append(part)
            else:
                ordered[(part.step, part.group + part.members, part.kind)][rank].append(part)
    uneven = 0
    for (step, group, kind), by_rank in ordered.items():
        counts = {len(mine) for mine in by_rank.values()}
        if len(counts) > 1:
            uneven += 1
            for rank, mine in by_rank.items():
                for i, part in enumerate(mine):
                    keyed[("alone", str(rank), f"{step}:{group}:{kind}:{i}")].append(part)
            continue
        for mine in by_rank.values():
            for i, part in enumerate(mine):
                keyed[("order", group, f"{step}:{kind}:{i}")].append(part)
    for key in [k for k, members in keyed.items() if len(members) > (members[0].group_size or 1e9)]:
        for part in keyed.pop(key):  # several groups under one number: which is whose is not known
            keyed[("alone", str(part.rank), key[2])].append(part)
    warnings = []
    if uneven:
        warnings.append(
            f"in {uneven} cases the ranks have different numbers of collectives of a kind in a "
            "step: those are not matched"
        )
    return keyed, warnings


def _impossible(keyed: dict[tuple[str, str, Any], list[Part]], offsets: Mapping[int, int]) -> int:
    """Undo matches by order that cannot be: parts of events missing shift everything after.

    Where one of a step's collectives of a kind is impossible, the others are not to be trusted.
    """
    wrong = set()
    for key, members in keyed.items():
        if key[0] == "order" and members[0].kind in _ENDS_TOGETHER:
            begin = max(p.start_ns - offsets[p.rank] for p in members)
            if begin > min(p.end_ns - offsets[p.rank] for p in members) + SLACK_NS:
                wrong.add((key[1], key[2].rpartition(":")[0]))
    suspects = [k for k in keyed if k[0] == "order" and (k[1], k[2].rpartition(":")[0]) in wrong]
    for key in suspects:
        for part in keyed.pop(key):
            keyed[("alone", str(part.rank), f"{key[1]}:{key[2]}")].append(part)
    return len(suspects)


def _aligned(
    traces: Sequence[Trace],
    keyed: Mapping[tuple[str, str, Any], Sequence[Part]],
    offsets: Mapping[int, int],
) -> dict[int, int]:
    """Clocks of different hosts, set by the ends of collectives; one host has one clock."""
    hosts = {t.rank: t.shardlab.get("host", t.metadata.get("host_name")) for t in traces}
    if len(traces) < 2 or (None not in hosts.values() and len(set(hosts.values())) == 1):
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
    how: str, number: str, members: Sequence[Part], offsets: Mapping[int, int]
) -> tuple[Collective, dict[int, tuple[int, int]]]:
    """One row, and for each rank that waited from when to when, on the common clock."""
    starts = {p.rank: p.start_ns - offsets[p.rank] for p in members}
    ends = {p.rank: p.end_ns - offsets[p.rank] for p in members}
    last = max(starts, key=lambda rank: (starts[rank], rank))
    arrived = starts[last]
    together = len(members) > 1
    late: dict[int, tuple[int, int]] = {}
    if together:
        for rank, start in starts.items():
            until = min(arrived, ends[rank])
            if until > start:
                late[rank] = (start, until)
    transfer = max(0, max(ends.values()) - arrived)
    first = next((p for p in members if p.bytes is not None), members[0])
    culprit = next(p for p in members if p.rank == last)
    algorithm, bus = _bandwidth(first, transfer)
    return Collective(
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
            Participant(
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


def summarize(collectives: Sequence[Collective], by: str) -> tuple[CollectiveSummary, ...]:
    """Totals by kind, or by kind and label; the longest first."""
    groups: dict[str, list[Collective]] = defaultdict(list)
    for row in collectives:
        groups[row.kind if by == "kind" else f"{row.kind} {row.label}".strip()].append(row)
    result = []
    for name, rows in groups.items():
        known = [row for row in rows if row.bytes is not None]
        transfer = sum(row.transfer_us for row in known if row.bus_gbps is not None)
        moved = sum(row.bytes or 0 for row in known if row.bus_gbps is not None)
        carried = sum((row.bus_gbps or 0) * row.transfer_us for row in known)
        result.append(
            CollectiveSummary(
                name,
                len(rows),
                sum(row.bytes or 0 for row in known) if known else None,
                sum(_duration_us(row) for row in rows),
                sum(row.transfer_us for row in rows),
                sum(row.wait_us for row in rows),
                moved / transfer / 1000 if transfer and moved else None,
                carried / transfer if transfer and carried else None,
            )
        )
    return tuple(sorted(result, key=lambda row: -row.time_us))


def _duration_us(row: Collective) -> float:
    ends = max(p.end_ns for p in row.participants)
    return (ends - min(p.start_ns for p in row.participants)) / 1000


def stragglers(matched: Matched, lost: Mapping[int, Intervals]) -> tuple[Straggler, ...]:
    """Who made others wait, the worst first. ``lost``: per rank, the time it waited idle."""
    table: dict[tuple[int, str], list[Collective]] = defaultdict(list)
    for row in matched.collectives:
        if row.last_rank is not None and row.wait_us > 0:
            table[(row.last_rank, row.phase)].append(row)
    result = []
    for (rank, phase), rows in table.items():
        victims = {
            victim: spans
            for (culprit, in_phase, victim), spans in matched.culprits.items()
            if (culprit, in_phase) == (rank, phase)
        }
        worst = max(rows, key=lambda row: max(p.wait_us for p in row.participants))
        result.append(
            Straggler(
                rank,
                phase,
                len(rows),
                others_waited_us=sum(spans.length for spans in victims.values()) / 1000,
                lost_us=sum(
                    (spans & lost[victim]).length
                    for victim, spans in victims.items()
                    if victim in lost
                )
                / 1000,
                worst_us=max(p.wait_us for p in worst.participants),
                worst_collective=worst.id,
                worst_label=f"{worst.kind} {worst.label}".strip(),
            )
        )
    return tuple(sorted(result, key=lambda row: -row.others_waited_us))
