"""The timeline of the ranks, as data for timeline.js.

Spans travel as binary columns in base64: 13 bytes each.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from shardlab.trace import activity, model

if TYPE_CHECKING:
    from shardlab.trace import TraceSet

MAX_SPANS = 100_000  # 1.3 MB
MAX_NAMES = 3_000
MAX_RANKS = 64
MAX_NAME = 160  # characters: names of templated kernels are longer than a screen


@dataclass(frozen=True)
class _Lane:
    rank: int
    name: str
    start: model.Ints
    end: model.Ints
    names: Any  # array of str, one for each span; or empty


def timeline(traces: TraceSet, max_spans: int = MAX_SPANS) -> dict[str, Any]:
    """Spans as columns: for each lane start and length (32 bits) and the number of its name."""
    lanes = list(_lanes(traces))
    spans = sum(len(lane.start) for lane in lanes)
    keeps, longest_left_out = _longest(lanes, max_spans)
    low = min((int(lane.start.min()) for lane in lanes if len(lane.start)), default=0)
    high = max((int(lane.end.max()) for lane in lanes if len(lane.end)), default=1)
    unit = max(1, math.ceil((high - low) / (2**32 - 1)))
    names: dict[str, int] = {}
    out: list[dict[str, Any]] = []
    drawn = 0
    for lane, keep in zip(lanes, keeps, strict=True):
        start = ((lane.start[keep] - low) // unit).astype("<u4")
        length = ((lane.end - lane.start)[keep] // unit).astype("<u4")
        chosen = lane.names[keep] if len(lane.names) else []
        numbers = np.array([_number(name, names) for name in chosen], dtype="<u2")
        drawn += len(start)
        out.append(
            {
                "rank": lane.rank,
                "lane": lane.name,
                "start": _base64(start),
                "length": _base64(length),
                "name": _base64(numbers) if len(numbers) else None,
            }
        )
    return {
        "unit_ns": unit,
        "duration": (high - low) // unit,
        "lanes": out,
        "names": list(names),
        "spans": drawn,
        "left_out": spans - drawn,
        "ranks_left_out": len({trace.rank for trace in traces.traces}) - len(_shown(traces)),
        "longest_left_out_us": longest_left_out / 1000,
    }


def _longest(lanes: Sequence[_Lane], max_spans: int) -> tuple[list[Any], int]:
    """Which spans of each lane are drawn (all, or the longest), and the longest that is not."""
    keeps = [np.ones(len(lane.start), dtype=bool) for lane in lanes]
    if sum(map(len, keeps)) <= max_spans:
        return keeps, 0
    lengths = np.concatenate([lane.end - lane.start for lane in lanes])
    shortest = np.argpartition(lengths, -max_spans)[:-max_spans]
    keep = np.concatenate(keeps)
    keep[shortest] = False
    ends = np.cumsum([len(lane.start) for lane in lanes])
    return np.split(keep, ends[:-1]), int(lengths[shortest].max())


def _number(name: str, names: dict[str, int]) -> int:
    if len(name) > MAX_NAME:
        name = name[: MAX_NAME - 1] + "…"
    if name not in names and len(names) >= MAX_NAMES:
        name = "(another name)"
    return names.setdefault(name, len(names))


def _base64(array: Any) -> str:
    return base64.b64encode(array.tobytes()).decode("ascii")


ORDER = ("steps", "phases", "compute", "operators", "stream", "comm", "wait", "memory")


def _lanes(traces: TraceSet) -> Iterable[_Lane]:
    """The analysis' lanes, in our order, with phases, operators or kernels, and collectives by
    name.
    """
    lanes: dict[tuple[int, str], list[_Lane]] = {}
    shown, shifts = _shown(traces), traces.shifts()
    for lane in traces.lanes():
        if lane.rank not in shown:
            continue
        key = (lane.rank, lane.lane)
        lanes.setdefault(key, []).append(
            _Lane(lane.rank, lane.lane, lane.start_ns, lane.end_ns, np.array(lane.names, object))
        )
    for trace in traces.traces:
        for extra in _extra(trace, shifts[trace.path]) if trace.rank in shown else ():
            lanes.setdefault((trace.rank, extra.name), []).append(extra)
    for found in _collective_lanes(traces):
        if found.rank in shown:
            lanes[found.rank, found.name] = [found]

    def order(key: tuple[int, str]) -> tuple[int, int, str]:
        kind = key[1].partition(" ")[0]
        return key[0], ORDER.index(kind) if kind in ORDER else len(ORDER), key[1]

    for key in sorted(lanes, key=order):
        several = [lane for lane in lanes[key] if len(lane.start)]
        if not several:
            continue
        start = np.concatenate([lane.start for lane in several])
        end = np.concatenate([lane.end for lane in several])
        names = np.concatenate([lane.names for lane in several])
        by_start = np.argsort(start, kind="stable")
        names = names[by_start] if len(names) == len(start) else names[:0]
        yield _Lane(key[0], key[1], start[by_start], end[by_start], names)


def _shown(traces: TraceSet) -> set[int]:
    """The ranks that the timeline has room for: the first."""
    return set(sorted({trace.rank for trace in traces.traces})[:MAX_RANKS])


def _collective_lanes(traces: TraceSet) -> Iterable[_Lane]:
    """Collectives with their names; those at work at the same time on lanes of their own."""
    parts: dict[int, list[tuple[int, int, str]]] = {}
    for c in traces.collectives():
        name = f"{c.kind} {c.label}".rstrip()
        for p in c.participants:
            parts.setdefault(p.rank, []).append((p.start_ns, p.end_ns, name))
    for rank, spans in parts.items():
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
            title = "comm" if number == 0 else f"comm {number + 1}"
            yield _Lane(rank, title, np.array(start), np.array(end), np.array(names, object))


def _extra(trace: model.Trace, shift: int) -> Iterable[_Lane]:
    events = trace.events
    if not len(events):
        return
    names = np.array(trace.names, dtype=object)
    phases = [i for i, name in enumerate(trace.names) if name in model.PHASES]
    rows = np.flatnonzero((events.kind == model.ANNOTATION) & np.isin(events.name, phases))
    if len(rows):
        yield _lane_of(trace, "phases", rows, shift, names)
    if trace.device == "gpu":
        kernels = np.flatnonzero(events.kind == model.KERNEL)
        # Communication has lanes of its own.
        kernels = kernels[~activity.communication_rows(trace)[kernels]]
        for stream in np.unique(events.stream[kernels]):
            rows = kernels[events.stream[kernels] == stream]
            yield _lane_of(trace, f"stream {stream}", rows, shift, names)
        return
    operators = np.flatnonzero(events.kind == model.CPU_OP)
    if len(operators):
        busiest = np.bincount(events.tid[operators]).argmax()
        rows = operators[events.tid[operators] == busiest]
        rows = rows[np.lexsort((-events.dur_ns[rows], events.start_ns[rows]))]
        leaf = np.ones(len(rows), dtype=bool)  # it is one if the next does not begin inside it
        leaf[:-1] = events.start_ns[rows[1:]] >= events.end_ns[rows[:-1]]
        yield _lane_of(trace, "operators", rows[leaf], shift, names)


def _lane_of(trace: model.Trace, lane: str, rows: Any, shift: int, names: Any) -> _Lane:
    events = trace.events
    start = events.start_ns[rows] + shift
    return _Lane(trace.rank, lane, start, start + events.dur_ns[rows], names[events.name[rows]])
