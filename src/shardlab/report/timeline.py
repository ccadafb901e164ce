"""The timeline of the ranks, as data for timeline.js.

Spans travel as binary columns in base64: 13 bytes each.
"""

from __future__ import annotations

import base64
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from shardlab.trace import activity, model
from shardlab.trace.model import Lane

if TYPE_CHECKING:
    from shardlab.trace import TraceSet

MAX_SPANS = 100_000  # 1.3 MB
MAX_NAMES = 3_000
MAX_RANKS = 64
MAX_NAME = 160  # characters: names of templated kernels are longer than a screen


def timeline(traces: TraceSet, max_spans: int = MAX_SPANS) -> dict[str, Any]:
    shown = len(_shown(traces))
    left_out = len({trace.rank for trace in traces.traces}) - shown
    return {**columns(list(_lanes(traces)), max_spans), "ranks_left_out": left_out}


def columns(lanes: Sequence[Lane], max_spans: int = MAX_SPANS) -> dict[str, Any]:
    """Spans as columns: for each lane start and length (32 bits) and the number of its name."""
    spans = sum(len(lane.start_ns) for lane in lanes)
    keeps, longest_left_out = _longest(lanes, max_spans)
    low = min((int(lane.start_ns.min()) for lane in lanes), default=0)
    high = max((int(lane.end_ns.max()) for lane in lanes), default=1)
    unit = max(1, math.ceil((high - low) / (2**32 - 1)))
    names: dict[str, int] = {}
    out: list[dict[str, Any]] = []
    for lane, keep in zip(lanes, keeps, strict=True):
        start = ((lane.start_ns[keep] - low) // unit).astype("<u4")
        length = ((lane.end_ns - lane.start_ns)[keep] // unit).astype("<u4")
        numbers = [_number(name, names) for name in itertools.compress(lane.names, keep)]
        out.append(
            {
                "rank": lane.rank,
                "lane": lane.lane,
                "start": _base64(start),
                "length": _base64(length),
                "name": _base64(np.array(numbers, "<u2")) if numbers else None,
            }
        )
    drawn = int(sum(keep.sum() for keep in keeps))
    return {
        "unit_ns": unit,
        "duration": (high - low) // unit,
        "lanes": out,
        "names": list(names),
        "spans": drawn,
        "left_out": spans - drawn,
        "ranks_left_out": 0,
        "longest_left_out_us": longest_left_out / 1000,
    }


def _longest(lanes: Sequence[Lane], max_spans: int) -> tuple[list[Any], int]:
    """Which spans of each lane are drawn (all, or the longest), and the longest that is not."""
    keeps = [np.ones(len(lane.start_ns), dtype=bool) for lane in lanes]
    if sum(map(len, keeps)) <= max_spans:
        return keeps, 0
    lengths = np.concatenate([lane.end_ns - lane.start_ns for lane in lanes])
    shortest = np.argpartition(lengths, -max_spans)[:-max_spans]
    keep = np.concatenate(keeps)
    keep[shortest] = False
    ends = np.cumsum([len(lane.start_ns) for lane in lanes])
    return np.split(keep, ends[:-1]), int(lengths[shortest].max())


def _number(name: str, names: dict[str, int]) -> int:
    if len(name) > MAX_NAME:
        name = name[: MAX_NAME - 1] + "…"
    if name not in names and len(names) >= MAX_NAMES:
        name = "(another name)"
    return names.setdefault(name, len(names))


def _base64(array: Any) -> str:
    return base64.b64encode(array.tobytes()).decode("ascii")


ORDER = (
    "steps", "phases", "actions", "bubble", "compute", "operators", "stream", "comm", "wait",
    "memory",
)  # fmt: skip


def _lanes(traces: TraceSet) -> Iterable[Lane]:
    """The analysis' lanes, in our order, with phases, operators or kernels, and collectives by
    name; empty lanes are left out."""
    shown, shifts = _shown(traces), traces.shifts()
    extra = (_extra(trace, shifts[trace.path]) for trace in traces.traces if trace.rank in shown)
    lanes: dict[tuple[int, str], list[Lane]] = {}
    for lane in itertools.chain(traces.lanes(), *extra):
        lanes.setdefault((lane.rank, lane.lane), []).append(lane)
    lanes |= {(lane.rank, lane.lane): [lane] for lane in _collective_lanes(traces)}

    def order(key: tuple[int, str]) -> tuple[int, int, str]:
        kind = key[1].partition(" ")[0]
        return key[0], ORDER.index(kind) if kind in ORDER else len(ORDER), key[1]

    for key in sorted(lanes, key=order):
        several = [lane for lane in lanes[key] if len(lane.start_ns)]
        if not several or key[0] not in shown:
            continue
        start = np.concatenate([lane.start_ns for lane in several])
        end = np.concatenate([lane.end_ns for lane in several])
        names = np.concatenate([np.array(lane.names, object) for lane in several])
        by_start = np.argsort(start, kind="stable")
        names = names[by_start] if len(names) == len(start) else names[:0]
        yield Lane(*key, start[by_start], end[by_start], tuple(names))


def _shown(traces: TraceSet) -> set[int]:
    """The ranks that the timeline has room for: the first."""
    return set(sorted({trace.rank for trace in traces.traces})[:MAX_RANKS])


def _collective_lanes(traces: TraceSet) -> Iterable[Lane]:
    """Collectives with their names; those at work at the same time on lanes of their own."""
    parts: dict[int, list[tuple[int, int, str]]] = {}
    for c in traces.collectives():
        name = f"{c.called} {c.label}".rstrip()
        for p in c.participants:
            parts.setdefault(p.rank, []).append((p.start_ns, p.end_ns, name))
    for rank, spans in parts.items():
        yield from side_by_side(rank, "comm", spans)


def side_by_side(rank: int, title: str, spans: Iterable[tuple[int, int, str]]) -> Iterable[Lane]:
    """Spans (begin, end, name) on lanes of that title; those at the same time on the next one."""
    lanes: list[list[tuple[int, int, str]]] = []
    for span in sorted(spans):
        free = (lane for lane in lanes if lane[-1][1] <= span[0])
        lane = next(free, None)
        if lane is not None:
            lane.append(span)
        elif len(lanes) < 4:
            lanes.append([span])
    for number, lane in enumerate(lanes):
        start, end, names = zip(*lane, strict=True)
        own = title if number == 0 else f"{title} {number + 1}"
        yield Lane(rank, own, np.array(start), np.array(end), names)


def _extra(trace: model.Trace, shift: int) -> Iterable[Lane]:
    events = trace.events

    def lane(name: str, rows: Any) -> Lane:
        start = events.start_ns[rows] + shift
        names = tuple(trace.names[i].removeprefix("shardlab::") for i in events.name[rows])
        return Lane(trace.rank, name, start, start + events.dur_ns[rows], names)

    phases = [i for i, name in enumerate(trace.names) if name in model.PHASES]
    rows = np.flatnonzero((events.kind == model.ANNOTATION) & np.isin(events.name, phases))
    yield lane("phases", rows)
    rows = np.flatnonzero(
        (events.kind == model.ANNOTATION) & activity.named(trace, activity.ACTION)
    )
    yield lane("actions", rows)
    if trace.device == "gpu":
        kernels = np.flatnonzero(events.kind == model.KERNEL)
        # Communication has lanes of its own.
        kernels = kernels[~activity.communication_rows(trace)[kernels]]
        for stream in np.unique(events.stream[kernels]):
            yield lane(f"stream {stream}", kernels[events.stream[kernels] == stream])
        return
    operators = np.flatnonzero(events.kind == model.CPU_OP)
    if len(operators):
        threads, counts = np.unique(events.tid[operators], return_counts=True)
        rows = operators[events.tid[operators] == threads[counts.argmax()]]
        rows = rows[np.lexsort((-events.dur_ns[rows], events.start_ns[rows]))]
        leaf = np.ones(len(rows), dtype=bool)  # it is one if the next does not begin inside it
        leaf[:-1] = events.start_ns[rows[1:]] >= events.end_ns[rows[:-1]]
        yield lane("operators", rows[leaf])
