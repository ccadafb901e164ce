"""Traces as one page that needs nothing else: the answer in words, charts, tables, a timeline.

The numbers come from the ``TraceSet``; here they are put into sentences and places. Charts use
percentages across and pixels down, so that they stretch with the window while their text keeps
its size. The timeline's spans travel as binary columns in base64: 13 bytes each.
"""

from __future__ import annotations

import base64
import functools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import numpy as np
from markupsafe import Markup

from shardlab import __version__
from shardlab.record import write_text
from shardlab.report import format as fmt
from shardlab.trace import activity, model

if TYPE_CHECKING:
    from shardlab.trace import TraceSet

MAX_SPANS = 100_000  # on the timeline: 1.3 MB
MAX_NAMES = 3_000
MAX_RANKS = 64  # on the timeline, and in the stacked chart
MAX_NAME = 160  # characters: names of templated kernels are longer than a screen
MAX_STACKS = 64  # rows of the stacked chart
MAX_COLLECTIVES, MAX_TRACKS = 48, 600  # rows of the bucket timeline, and lines in all
MAX_ROWS = 200  # of a table
CURVE_POINTS = 500

PART_NAMES = {
    "compute_us": "compute",
    "exposed_comm_us": "exposed communication",
    "wait_us": "waiting for a slower rank",
    "memory_us": "memory copies",
    "idle_host_us": "host-bound idle",
    "idle_us": "other idle",
}
NOTABLE = 0.03  # of the step: less waiting than this is not worth a name


def write_html(path: Path, traces: TraceSet) -> None:
    """The page, whole or not there at all."""
    write_text(path, html(traces))


@functools.cache  # a template takes longer to compile than to fill
def _templates() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.PackageLoader("shardlab.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def html(traces: TraceSet) -> str:
    environment = _templates()
    ranks = traces.breakdown(per="rank")
    steps = traces.breakdown(per="step")
    collectives = traces.collectives()
    shifts = _shifts(traces)
    timeline = _timeline(traces, shifts)
    by_kind = traces.collective_summary(by="kind")
    by_label = [row for row in traces.collective_summary(by="label") if row.name]
    if {row.name for row in by_label} <= {row.name for row in by_kind}:
        by_label = []  # nothing was labelled
    memory = traces.memory()
    return environment.get_template("trace.html.j2").render(
        fmt=fmt,
        ms=ms,
        css=asset("timeline.css") + asset("trace.css"),
        js=asset("tables.js") + asset("timeline.js"),
        version=__version__,
        title=title(traces, ranks),
        verdict=verdict(traces),
        facts=_facts(traces, ranks, timeline),
        parts=PART_NAMES,
        ranks=ranks,
        stacks=_stacks(ranks, steps),
        timeline=timeline,
        by_kind=by_kind[:MAX_ROWS],
        by_label=by_label[:MAX_ROWS],
        buckets=_buckets(collectives, traces, steps, shifts),
        stragglers=traces.stragglers(),
        several_ranks=len(ranks) > 1,
        n_steps=_steps(ranks),
        memory=memory,
        curves=_curves(memory, traces),
        what_if=traces.what_if(),
        kernels=_kernels(traces),
        warnings=list(traces.warnings)[:MAX_ROWS],
        files=[str(trace.path) for trace in traces.traces],
    )


def asset(name: str) -> Markup:
    """A file of ours beside the template. Not from a trace, so not escaped."""
    text = resources.files("shardlab.report").joinpath("templates", name).read_text("utf-8")
    return Markup(text)


def ms(us: float | None) -> str:
    """Microseconds as milliseconds, for reading."""
    return fmt.NOTHING if us is None else fmt.number(us / 1000)


# ------------------------------------------------------------------ the answer


def title(traces: TraceSet, ranks: Sequence[model.Breakdown]) -> str:
    stamps = {str(t.shardlab.get("strategy", "")) for t in traces.traces} - {""}
    name = fmt.names(sorted(stamps)) if stamps else traces.traces[0].path.parent.name or "Traces"
    return (
        f"{name}: where {fmt.count(_steps(ranks), 'step')} on {fmt.count(len(ranks), 'rank')} went"
    )


def verdict(traces: TraceSet) -> str:
    """Where a step's time went, who was slow, and what was hidden: the answer, in words."""
    ranks = traces.breakdown(per="rank")
    return " ".join(
        part for part in (_went(ranks), _slow(traces, ranks), _hidden(traces, ranks)) if part
    )


def _steps(ranks: Sequence[model.Breakdown]) -> int:
    return max((row.steps for row in ranks), default=0)


def _step_us(row: model.Breakdown) -> float:
    return row.wall_us / max(row.steps, 1)


def _went(ranks: Sequence[model.Breakdown]) -> str:
    wall = sum(row.wall_us for row in ranks)
    if not wall:
        return "The traces hold no time at all."
    shares = {part: sum(getattr(row, part) for row in ranks) / wall for part in PART_NAMES}
    said = [(share, PART_NAMES[part]) for part, share in shares.items() if share >= 0.005]
    said.sort(reverse=True)
    texts = [f"{100 * share:.0f}% {name}" for share, name in said]
    listed = fmt.names(texts, at_most=len(texts))
    took = f"{ms(statistics.mean(map(_step_us, ranks)))} ms"
    if len(ranks) == 1 and _steps(ranks) == 1:
        return f"The step took {took}: {listed}."
    return f"A step took {took} on average: {listed}."


def _slow(traces: TraceSet, ranks: Sequence[model.Breakdown]) -> str:
    if not any(row.comm_us for row in ranks):
        return ""
    if len(ranks) == 1:
        return "With the trace of one rank, waiting for others cannot be told from communication."
    waited = {row.rank: 0.0 for row in ranks}
    worst: dict[int, model.Straggler] = {}
    for straggler in traces.stragglers():
        rank = straggler.rank
        waited[rank] = waited.get(rank, 0.0) + straggler.lost_us
        if rank not in worst or straggler.lost_us > worst[rank].lost_us:
            worst[rank] = straggler
    rank, total = max(waited.items(), key=lambda item: item[1])
    others = max(len(ranks) - 1, 1)
    per_step = total / others / max(_steps(ranks), 1)
    if per_step < NOTABLE * statistics.mean(map(_step_us, ranks)):
        return "No rank made the others wait for long."
    everyone = sum(waited.values())
    if total < 0.6 * everyone:
        return (
            f"The ranks waited for each other in turn, {ms(everyone / others / _steps(ranks))} ms "
            "a step: none is the slow one."
        )
    phase = worst[rank].phase
    where = f", mostly in {phase}" if phase in ("forward", "backward") else ""
    if phase == "optimizer":
        where = ", mostly in the optimizer"
    waits = f"each other rank waited {ms(per_step)} ms a step for it{where}"
    return f"Rank {rank} is the slow one: {waits}."


def _hidden(_traces: TraceSet, ranks: Sequence[model.Breakdown]) -> str:
    comm = sum(row.comm_us for row in ranks)
    if not comm:
        return "There was no communication."
    hidden = sum(row.hidden_comm_us for row in ranks)
    if hidden < 0.005 * comm:
        return "None of the communication was hidden behind compute."
    return f"{100 * hidden / comm:.0f}% of the communication was hidden behind compute."


def _facts(
    traces: TraceSet, ranks: Sequence[model.Breakdown], timeline: dict[str, Any]
) -> list[tuple[str, str]]:
    first = traces.traces[0]
    slowest = max(ranks, key=_step_us)
    comm, hidden = (sum(getattr(row, n) for row in ranks) for n in ("comm_us", "hidden_comm_us"))
    facts = [
        ("step, slowest rank", f"{ms(_step_us(slowest))} ms"),
        ("steps", str(_steps(ranks))),
        ("ranks", _ranks_text(traces, ranks)),
        ("overlap", f"{100 * hidden / comm:.0f}%" if comm else fmt.NOTHING),
        ("device", first.device.upper()),
        ("spans drawn", f"{timeline['spans']:,}"),
    ]
    if run := first.shardlab.get("run"):
        facts.insert(0, ("run", str(run)))
    return facts


def _ranks_text(traces: TraceSet, ranks: Sequence[model.Breakdown]) -> str:
    world = max((t.world or 0 for t in traces.traces), default=0)
    return f"{len(ranks)} of {world}" if world > len(ranks) else str(len(ranks))


# ------------------------------------------------------------------ layout of the charts


@dataclass(frozen=True)
class Segment:
    part: str
    x: float  # percent
    width: float
    us: float


@dataclass(frozen=True)
class StackRow:
    rank: int
    step: int | None
    wall_us: float
    segments: list[Segment]
    hidden: tuple[float, float]  # x and width, inside compute, at its end
    text: str  # all of it in words


@dataclass(frozen=True)
class Stacks:
    rows: list[StackRow]
    per_step: bool
    ticks: list[tuple[float, str]]
    parts: list[str]  # those that appear, for the legend
    has_hidden: bool
    left_out: int  # ranks, the fastest


def _stacks(ranks: Sequence[model.Breakdown], steps: Sequence[model.Breakdown]) -> Stacks:
    per_step = len(steps) <= MAX_STACKS
    shown = steps if per_step else sorted(ranks, key=_step_us, reverse=True)[:MAX_RANKS]
    values = [
        (row, 1 if row.step is not None else max(row.steps, 1))
        for row in sorted(shown, key=lambda r: (r.rank, -1 if r.step is None else r.step))
    ]
    most = max((row.wall_us / n for row, n in values), default=0) or 1.0
    rows = []
    for row, n in values:
        x, segments = 0.0, []
        for part in PART_NAMES:
            us = getattr(row, part) / n
            width = 100 * us / most
            if width > 0:
                segments.append(Segment(part, x, width, us))
            x += width
        compute = 100 * row.compute_us / n / most
        hidden = 100 * row.hidden_comm_us / n / most
        said = ", ".join(f"{PART_NAMES[s.part]} {ms(s.us)} ms" for s in segments)
        if hidden:
            said += f"; {ms(row.hidden_comm_us / n)} ms of communication behind compute"
        rows.append(
            StackRow(
                row.rank, row.step, row.wall_us / n, segments, (compute - hidden, hidden), said
            )
        )
    return Stacks(
        rows,
        per_step,
        _ticks(most / 1000),
        [part for part in PART_NAMES if any(s.part == part for r in rows for s in r.segments)],
        any(row.hidden[1] for row in rows),
        0 if per_step else len(ranks) - len(rows),
    )


def _ticks(high: float, about: int = 6) -> list[tuple[float, str]]:
    """Round numbers from 0 to ``high``: place in percent, text."""
    if high <= 0:
        return []
    power = 10.0 ** math.floor(math.log10(high / about))
    step = next(power * factor for factor in (1, 2, 5, 10) if high <= power * factor * about)
    decimals = max(0, -math.floor(math.log10(step)))
    count = math.floor(high / step * (1 + 1e-9))
    return [(100 * i * step / high, f"{i * step:,.{decimals}f}") for i in range(count + 1)]


@dataclass(frozen=True)
class Track:
    """One rank's part in one collective, in percent of the step."""

    rank: int
    ready: float | None
    start: float
    arrived: float  # all ranks are in: the wait ends, the transfer begins
    end: float


@dataclass(frozen=True)
class BucketRow:
    kind: str
    label: str
    id: str
    tracks: list[Track]
    pitch: float  # pixels from one to the next: 12, less for many ranks
    text: str


@dataclass(frozen=True)
class Buckets:
    step: int
    rows: list[BucketRow]
    left_out: int
    ticks: list[tuple[float, str]]
    phases: list[tuple[str, float, float]]  # of the first rank: name, x, width


def _buckets(
    collectives: Sequence[model.Collective],
    traces: TraceSet,
    steps: Sequence[model.Breakdown],
    shifts: Shifts,
) -> Buckets | None:
    """The collectives of the step of median length, from ready to finished."""
    numbers = {c.step for c in collectives if c.step is not None}
    walls: dict[int, float] = {}
    for row in steps:
        if row.step is not None and row.step in numbers:
            walls[row.step] = max(walls.get(row.step, 0.0), row.wall_us)
    if not walls:
        return None
    step = sorted(walls, key=lambda number: (walls[number], number))[(len(walls) - 1) // 2]
    chosen = [c for c in collectives if c.step == step and c.participants]
    low, high = _step_span(traces, step, chosen, shifts)

    def place(ns: float) -> float:
        return min(max(100 * (ns - low) / (high - low), 0.0), 100.0)

    kept = sorted(chosen, key=lambda c: max(p.end_ns - p.start_ns for p in c.participants))
    ranks = max(len(c.participants) for c in chosen)
    kept = kept[-max(min(MAX_COLLECTIVES, MAX_TRACKS // ranks), 4) :]
    kept.sort(key=lambda c: min(p.start_ns for p in c.participants))
    rows = []
    for c in kept:
        tracks = [
            Track(
                p.rank,
                None if p.ready_ns is None else place(p.ready_ns),
                place(p.start_ns),
                place(min(p.start_ns + 1000 * p.wait_us, p.end_ns)),
                place(p.end_ns),
            )
            for p in c.participants
        ]
        last = f", rank {c.last_rank} last" if c.last_rank is not None and c.skew_us > 0 else ""
        text = f"transfer {ms(c.transfer_us)} ms, waits {ms(c.wait_us)} ms{last}"
        rows.append(
            BucketRow(c.kind, c.label, c.id, tracks, min(12, max(3, 120 / len(tracks))), text)
        )
    ticks = _ticks((high - low) / 1e6)
    return Buckets(step, rows, len(chosen) - len(kept), ticks, [])


def _step_span(
    traces: TraceSet, step: int, collectives: Sequence[model.Collective], shifts: Shifts
) -> tuple[int, int]:
    """From the first rank's begin of a step to the last's end, on the common clock."""
    low = min(p.start_ns for c in collectives for p in c.participants)
    high = max(p.end_ns for c in collectives for p in c.participants)
    for trace in traces.traces:
        shift = shifts[trace.path]
        for s in trace.steps:
            if s.number == step:
                low, high = min(low, s.start_ns + shift), max(high, s.end_ns + shift)
    return low, max(high, low + 1)


Shifts = Mapping[Path, int]  # by trace: what turns its own times into the common clock's


def _shifts(traces: TraceSet) -> Shifts:
    """From where its steps lie on the common clock's lane of steps."""
    lanes = [lane for lane in traces.lanes() if lane.lane == "steps"]
    shifts = {}
    for trace in traces.traces:
        own = np.array([step.start_ns for step in trace.steps])
        # A rank has a lane of steps for each of its windows: ours has steps of these lengths.
        shifts[trace.path] = next(
            (
                int(lane.start_ns[0] - own[0])
                for lane in lanes
                if lane.rank == trace.rank
                and len(lane.start_ns) == len(own) > 0
                and np.array_equal(np.diff(lane.start_ns), np.diff(own))
            ),
            0,
        )
    return shifts


@dataclass(frozen=True)
class MemoryCurve:
    memory: model.Memory
    path: str  # in a square of 100 by 100
    peak_x: float
    peak_y: float
    steps: list[tuple[int, float]]  # number and place


@dataclass(frozen=True)
class Curves:
    rows: list[MemoryCurve]
    ticks: list[tuple[float, str]]  # from the bottom


def _curves(memory: Sequence[model.Memory], traces: TraceSet) -> Curves | None:
    shown = [m for m in memory if len(m.at_ns) > 1][:16]
    if not shown:
        return None
    most = max(int(m.bytes.max()) for m in shown) or 1
    unit, name = max(
        (u for u in ((1, "B"), (1 << 10, "KiB"), (1 << 20, "MiB"), (1 << 30, "GiB"))
         if most >= u[0]), key=lambda u: u[0], default=(1, "B"),
    )  # fmt: skip
    ticks = [(100 - x, f"{text} {name}") for x, text in _ticks(most / unit, about=4)]
    rows = []
    for m in shown:
        low, high = int(m.at_ns[0]), max(int(m.at_ns[-1]), int(m.at_ns[0]) + 1)
        at = (m.at_ns - low) / (high - low)
        path = _steps_path(at, m.bytes / most)
        marks = []
        for trace in traces.traces:
            if trace.rank == m.rank:
                for s in trace.steps:
                    x = (s.start_ns - low) / (high - low)
                    if 0 <= x <= 1:
                        marks.append((s.number, 100 * x))
        peak_x = min(max(100 * (m.peak_at_ns - low) / (high - low), 0.0), 100.0)
        rows.append(MemoryCurve(m, path, peak_x, 100 * (1 - m.peak_bytes / most), marks[:24]))
    return Curves(rows, ticks)


def _steps_path(x: Any, y: Any) -> str:
    """A staircase; where points are closer than can be seen, their least and their most."""
    columns = np.minimum((x * CURVE_POINTS).astype(np.int64), CURVE_POINTS - 1)
    parts = []
    for column in np.unique(columns):
        values = y[columns == column]
        place = 100 * column / CURVE_POINTS
        for value in dict.fromkeys((float(values[0]), float(values.max()), float(values.min()),
                                    float(values[-1]))):  # fmt: skip
            parts.append(f"{place:.1f} {100 * (1 - value):.2f}")
    if not parts:
        return ""
    return "M" + " L".join(parts) + f" L100 {100 * (1 - float(y[-1])):.2f}"


def _kernels(traces: TraceSet) -> list[dict[str, Any]]:
    """The top operators, ranks taken together: per rank and step."""
    together: dict[tuple[str, str], list[float]] = {}
    ranks = traces.breakdown(per="rank")
    steps = sum(row.steps for row in ranks) or 1
    for kernel in traces.kernels(top=40):
        entry = together.setdefault((kernel.name, kernel.kind), [0.0, 0.0, 0.0])
        entry[0] += kernel.count
        entry[1] += kernel.sum_us
        entry[2] = max(entry[2], kernel.max_us)
    wall = sum(row.wall_us for row in ranks) or 1
    rows: list[dict[str, Any]] = [
        {
            "name": name,
            "kind": kind,
            "count": count / steps,
            "us": total / steps,
            "mean_us": total / count,
            "max_us": longest,
            "share": 100 * total / wall,
        }
        for (name, kind), (count, total, longest) in together.items()
        if count
    ]
    return sorted(rows, key=lambda row: row["us"], reverse=True)[:25]


# ------------------------------------------------------------------ the timeline


@dataclass(frozen=True)
class _Lane:
    rank: int
    name: str
    start: model.Ints
    end: model.Ints
    names: Any  # array of str, one for each span; or empty


def timeline(traces: TraceSet, max_spans: int) -> dict[str, Any]:
    """The data of timeline.js, for a page that has more than one."""
    return _timeline(traces, _shifts(traces), max_spans)


def _timeline(traces: TraceSet, shifts: Shifts, max_spans: int = MAX_SPANS) -> dict[str, Any]:
    """Spans as columns: for each lane start and length (32 bits) and the number of its name."""
    lanes = list(_lanes(traces, shifts))
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


def _lanes(traces: TraceSet, shifts: Shifts) -> Iterable[_Lane]:
    """The analysis' lanes, in our order, with phases, operators or kernels, and collectives by
    name.
    """
    lanes: dict[tuple[int, str], list[_Lane]] = {}
    shown = _shown(traces)
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
