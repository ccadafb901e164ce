"""Collectives, matched across ranks, and who waited for whom.

A collective of ours is known by its place among those of its group, kind and label in a step, a
message by its two ends too. (The ledger's numbers differ between ranks that send messages.) Others
are known by NCCL's number within their group, else by their place in the order of their group's
collectives in a step. ``parts`` reads them from each rank's trace, ``groups`` finds the group of
what Gloo did, ``messages`` the other end of a message.
"""

from __future__ import annotations

import functools
import operator
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shardlab.trace import clocks, groups, messages, model
from shardlab.trace.intervals import NOTHING, Intervals, union
from shardlab.trace.model import Trace
from shardlab.trace.parts import POINT_TO_POINT, Errors, Key, Part, begun_at, parts_of
from shardlab.wire import bus_bytes

_MICRO = re.compile(r" of micro-batch \d+")
# They end at about the same time on every rank, so they can set the clocks.
_ENDS_TOGETHER = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
_ON_ONE_LINK = ("broadcast", "reduce", *POINT_TO_POINT)  # the whole tensor, for any group
SLACK_NS = 1_000_000  # of clocks that were aligned
SAME_CLOCK_NS = 100_000  # what times of two processes on one host may differ by

Spans = Mapping[tuple[int | None, str], Intervals]


@dataclass(frozen=True)
class Matched:
    """The collectives of all ranks on one clock."""

    collectives: tuple[model.Collective, ...]
    offsets: Mapping[int, int]  # to be subtracted from a rank's times
    # Per rank, on its own clock: when it was in a collective and others were not, by the rank
    # that came last (None: it is not known which) and the phase that this one was in.
    waits: Mapping[int, Spans]
    bubbles: Mapping[int, Intervals]  # per rank, on its own clock: a pipeline's
    warnings: tuple[str, ...] = ()

    def waited(self, rank: int) -> Intervals:
        return functools.reduce(operator.or_, self.waits.get(rank, {}).values(), NOTHING)


def match(traces: Sequence[Trace]) -> Matched:
    """Match the collectives of these ranks (one trace each)."""
    parts, unknown = _grouped(traces, {trace.rank: parts_of(trace) for trace in traces})
    keyed, uneven = _keyed(parts)
    warnings = []
    if unknown:
        warnings.append(
            f"the process groups of {unknown} calls over Gloo are not known: these traces do not "
            "say which of a rank's groups did them, and they are not matched"
        )
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
    is_one_clock = on_one_clock(traces)
    if unknown := messages.pair(keyed, traces, offsets, errors, is_one_clock=is_one_clock):
        warnings.append(
            f"the other end of {unknown} sends and receives is not known: they have no "
            "bandwidth, and more of their exposed time may be waiting "
            "(record_shapes=True names the ranks)"
        )
    collectives = []
    waits: dict[int, dict[tuple[int | None, str], list[tuple[int, int]]]] = {}
    bubbles: dict[int, list[tuple[int, int]]] = {}
    for (how, _, number), members in keyed.items():
        judge = _message if how == "message" and len(members) == 2 else _collective
        number = number if members[0].ledger is None else members[0].ledger
        row, late = judge(how, str(number), members, offsets, errors)
        between = {p.rank for p in members if p.is_between}
        collectives.append(replace(row, bubble=bool(between)))
        for rank, (start, end) in late.items():
            if rank in between:
                mine = bubbles.setdefault(rank, [])
            else:
                mine = waits.setdefault(rank, {}).setdefault((row.last_rank, row.phase), [])
            mine.append((start + offsets[rank], end + offsets[rank]))
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


def _grouped(
    traces: Sequence[Trace], parts: Mapping[int, list[Part]]
) -> tuple[dict[int, list[Part]], int]:
    """What Gloo did, each with its group; and the number of parts whose group is not known."""
    lists = {t.rank: groups.listed(t) for t in traces}
    every = {t.rank: tuple(range(t.world or 0)) for t in traces}
    if all(set(lists[rank]) <= {every[rank]} for rank in lists):
        return dict(parts), 0  # no others, or none that the trace knows
    of_gloo = {rank: [p for p in mine if _has_no_group(p)] for rank, mine in parts.items()}
    base = {t.rank: t.base_ns for t in traces}
    calls = {
        rank: [
            groups.Call(
                thread=p.thread or 0,
                step=p.step,
                what=p.kind if p.kind == "all_gather" else f"{p.kind} {p.bytes}",
                start_ns=p.start_ns + base[rank],
                end_ns=p.end_ns + base[rank],
                ends_together=p.kind in _ENDS_TOGETHER,
            )
            for p in mine
        ]
        for rank, mine in of_gloo.items()
    }
    is_one_host = len(set(_hosts(traces).values())) == 1
    found = groups.of_threads(lists, calls, SAME_CLOCK_NS if is_one_host else None)
    result = {
        rank: [
            _of_group(p, found[rank, p.thread or 0], every[rank]) if _has_no_group(p) else p
            for p in mine
        ]
        for rank, mine in parts.items()
    }
    return result, sum(p.is_of_unknown_group for mine in result.values() for p in mine)


def _has_no_group(part: Part) -> bool:
    is_queued = part.thread is not None and part.kind not in POINT_TO_POINT
    return is_queued and part.ledger is None and not part.group + part.members


def _of_group(part: Part, members: groups.Members | None, every: groups.Members) -> Part:
    if members is None:
        size = None if part.kind == "all_gather" else part.bytes
        return replace(part, group_size=None, bytes=size, is_of_unknown_group=True)
    size = part.bytes
    if size is not None and part.kind == "all_gather" and part.group_size:
        size = size // part.group_size * len(members)
    name = "" if members == every else str(list(members))
    return replace(part, group=name, group_size=len(members), bytes=size)


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
            is_alone = part.kind in POINT_TO_POINT and not part.is_message
            if is_alone or part.step is None or part.is_of_unknown_group:
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


def on_one_clock(traces: Sequence[Trace]) -> bool:
    """Whether the times of all ranks are of one clock, or of clocks that were measured."""
    hosts = _hosts(traces).values()
    return (None not in hosts and len(set(hosts)) == 1) or all(t.clock for t in traces)


def _aligned(
    traces: Sequence[Trace],
    keyed: Mapping[Key, Sequence[Part]],
    offsets: Mapping[int, int],
) -> dict[int, int]:
    """Clocks of different hosts that were not measured, set by the ends of collectives; one host
    has one clock."""
    hosts = _hosts(traces)
    if len(traces) < 2 or on_one_clock(traces):
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

    What is shorter than the error of the clocks is no wait. A rank whose trace is missing may have
    come last: who did, and how fast the transfer was, is not known then, and waits are bounds.
    """
    starts = {p.rank: p.start_ns - offsets[p.rank] for p in members}
    ends = {p.rank: p.end_ns - offsets[p.rank] for p in members}
    last = max(starts, key=lambda rank: (starts[rank], rank))
    arrived = starts[last]
    together = len(members) > 1
    if not together and (other := members[0].other_ns) is not None:
        arrived = max(arrived, min(other - offsets[last], ends[last]))
    late = {
        rank: (start, until)
        for rank, start in starts.items()
        if (until := min(arrived, ends[rank])) - start > errors.get((rank, last), 0)
    }
    transfer = max(ends.values()) - arrived
    first = next((p for p in members if p.bytes is not None), members[0])
    culprit = next(p for p in members if p.rank == last)
    # How long a message waited for an end that is not known is not known either.
    is_known = together
    if first.kind not in POINT_TO_POINT:
        is_known = first.group_size == 1 or (together and len(members) >= (first.group_size or 0))
    algorithm, bus = _bandwidth(first, transfer if is_known else 0)
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
        last_rank=last if is_known else None,
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
    begun = {p.rank: begun_at(p, offsets) for p in members}
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
    algorithm, bus = _bandwidth(receiver, transfer if max(begun.values()) >= start else 0)
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
    """Bytes over time, and the same as what each link carried, as nccl-tests count it; None for
    kinds of which the trace does not say whose bytes they are (gather, scatter)."""
    if not part.bytes or transfer_ns <= 0:
        return None, None
    algorithm = part.bytes / transfer_ns  # bytes per ns are GB/s
    if part.kind in _ON_ONE_LINK:
        return algorithm, algorithm
    ranks = part.group_size if part.kind in _ENDS_TOGETHER else None
    return algorithm, bus_bytes(part.kind, part.bytes, ranks) / transfer_ns if ranks else None


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
                together_us(part for row in rows for part in row.participants),
            )
        )
    return tuple(sorted(result, key=lambda row: -row.union_us))


def together_us(parts: Iterable[model.Participant]) -> float:
    """How long at least one of these was under way."""
    return _union([(part.start_ns, part.end_ns) for part in parts]).length / 1000


def stragglers(
    windows: Iterable[tuple[Matched, Mapping[int, Intervals]]],
) -> tuple[model.Straggler, ...]:
    """Who made others wait, the worst first. With each window, per rank: when it communicated and
    did not compute."""
    table: dict[tuple[int, str], list[model.Collective]] = defaultdict(list)
    waited: Counter[tuple[int | None, str]] = Counter()
    lost: Counter[tuple[int | None, str]] = Counter()
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
