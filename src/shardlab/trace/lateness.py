"""Whether a rank that others waited for was slow, or had only begun late; and where it lost time.

A collective shows that a rank came last. Since when? Since the ranks were last together: the end of
the latest collective that both had before, or the beginning of the recorded window. From there on
the rank's own work (without its waits and transfers) is compared with another's: what it took
longer is slowness, what it began later is not, and what it had itself waited for others is theirs.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from shardlab.trace import activity, collectives, model
from shardlab.trace.intervals import NOTHING, Intervals, union
from shardlab.trace.model import ANNOTATION, KERNEL, Collective, Lateness, Participant, Trace
from shardlab.trace.parts import POINT_TO_POINT

NOTABLE = 0.03  # of a step: coming last by less counts as in time
_FORWARD = r"forward$|(Distributed|FullySharded)DataParallel\.forward|FSDP::(root_pre|post)_forward"
_LOADING = r"enumerate\(DataLoader\)"
BETWEEN, LOADING, BEFORE = "between steps", "data loading", "before backward"
MICRO, AFTER = "between micro-batches", "after backward"


@dataclass(frozen=True)
class Window:
    """What was recorded together."""

    collectives: Sequence[Collective]
    traces: Mapping[int, Trace]
    offsets: Mapping[int, int]  # as ``collectives.Matched`` has them
    exposed: Mapping[int, Intervals]  # per rank: it communicated, and did not compute
    running: Mapping[int, Intervals]  # per rank: it computed or copied


@dataclass(frozen=True)
class _Late:
    """A rank came last in a collective, compared with the median of the others; in ns."""

    by: int
    began: int  # of it, what its window began later
    out: int  # of it, what it came later out of the last collective that both had
    unseen: bool  # that was a message: its end is seen when somebody waits for it
    held: int  # of it, what it was longer in other communication since then
    own: int  # of it, what its own work took longer
    by_phase: Mapping[str, int]  # the same, and what it was faster
    idle: Mapping[str, int]  # of that, with nothing running
    waits: int  # what all others waited because its window began later

    @property
    def after(self) -> int:
        """Of it, what is not of the beginning."""
        return self.by - self.began


def of(windows: Iterable[Window]) -> tuple[Lateness, ...]:
    """The ranks that came last notably, a slow one first, then by how much."""
    steps = 0
    found: dict[int, list[_Late]] = defaultdict(list)
    slowed: dict[int, list[_Late]] = defaultdict(list)  # of these: its own work took longer
    one_clock = True
    for window in windows:
        one_clock &= collectives.on_one_clock([*window.traces.values()])
        rounds: dict[int, dict[int, Collective]] = defaultdict(dict)  # by rank: the longest wait
        rows = [
            c
            for c in window.collectives
            if c.last_rank is not None and not c.bubble and len(c.participants) > 1
        ]
        origins = _Origins(window, rows)
        for row in rows:
            last, number = row.last_rank, origins.round_of(row)
            if last is not None and number is not None:
                worst = rounds[number]
                if last not in worst or _wait(row) > _wait(worst[last]):
                    worst[last] = row
        steps += len(rounds)
        walls = [t.steps[-1].end_ns - t.steps[0].start_ns for t in window.traces.values()]
        count = max(len(rounds), *(len(t.steps) for t in window.traces.values()))
        least = NOTABLE * max(walls) / count
        for worst in rounds.values():
            for rank, row in worst.items():
                if 1000 * _wait(row) >= least:
                    late = origins.late(row, rank)
                    if late.by >= least:
                        found[rank].append(late)
                        if 2 * late.own >= late.after >= least:
                            slowed[rank].append(late)
    for rank, worked in slowed.items():
        if alone := _alone(worked):
            found[rank] = [late for late in found[rank] if late not in worked] + alone
            slowed[rank] = alone
    result = [_judged(rank, found[rank], slowed, steps, one_clock) for rank in found]
    return tuple(sorted(result, key=lambda r: (r.slow is not True, -r.late_us * r.steps_last)))


def _wait(row: Collective) -> float:
    return max(p.wait_us for p in row.participants)


def _alone(worked: Sequence[_Late]) -> list[_Late]:
    """The one step in which a rank lost far more time than in all its others, if there is one."""
    *others, worst = sorted(worked, key=lambda late: late.after)
    rest = [late.after for late in others]
    return [worst] if rest and worst.after > max(10 * max(rest), 2 * sum(rest)) else []


def _in_turn(worked: Sequence[_Late], others: Iterable[_Late]) -> bool:
    """Whether the own work of other ranks took longer in so many of the other steps, at least half
    as long as is usual here, that it may be chance who came last more often."""
    usual = median(late.after for late in worked)
    return len(worked) < 2 * sum(2 * late.after >= usual for late in others) + 2


def _judged(
    rank: int,
    lates: Sequence[_Late],
    slowed: Mapping[int, Sequence[_Late]],
    steps: int,
    one_clock: bool,
) -> Lateness:
    worked = slowed.get(rank, ())
    began = sum(late.began for late in lates)
    phases: Counter[str] = Counter()
    for late in worked:
        phases.update(late.by_phase)
    phase = max(phases, key=lambda name: phases[name], default=None)
    own = sum(late.own for late in worked)
    if phase is not None and 2 * phases[phase] < own:
        phase = None
    idle = sum(late.idle.get(phase or "", 0) for late in worked)
    slow: bool | None = False
    by = sum(late.by for late in lates)
    if not worked and 2 * began >= by:
        reason = "it began later, and its own work took no longer"
    elif not worked and 2 * (began + sum(late.out for late in lates)) >= by:
        reason = "it also ended the collective before later, and its own work took no longer"
        if 2 * sum(late.out for late in lates if late.unseen) >= by:
            reason = (
                "one of its messages ended later, too: whether it waited for that or did something "
                "else first is not known"
            )
        elif not one_clock:
            reason += ": the clocks of the traces may differ"
    elif not worked and 2 * sum(late.held for late in lates) >= by:
        reason = "its own work took no longer: it had been held up in communication itself"
    elif not worked:
        reason = "its own work took no longer; why it came later is not known"
    elif steps == 1:
        slow, reason = None, "one step does not show whether it is slow in every step"
    elif 2 * len(worked) <= steps:
        reason = "its own work took longer in half of the steps or fewer"
    elif len(worked) < steps and _in_turn(
        worked, (late for other, own in slowed.items() if other != rank for late in own)
    ):
        reason = "the work of others took longer in other steps: it may be chance"
    else:
        slow, reason = True, "its own work took longer in most of the steps"
    return Lateness(
        rank=rank,
        steps=steps,
        steps_last=len(lates),
        steps_slow=len(worked),
        late_us=median([late.by - late.began for late in worked] or [late.by for late in lates])
        / 1000,
        own_us=median(late.own for late in worked or lates) / 1000,
        began_late_us=began / 1000,
        arose=phase,
        slow=slow,
        reason=reason,
        began_waits_us=sum(late.waits for late in lates) / 1000,
        idle=min(max(idle / phases[phase], 0.0), 1.0) if phase is not None and own else None,
    )


class _Origins:
    """Where the ranks of a window lost time."""

    def __init__(self, window: Window, rows: Sequence[Collective]) -> None:
        self._window, self._rows = window, rows
        # When each rank came to each collective, and was out of it; never, of one it was not in.
        never = np.full(len(rows), np.iinfo(np.int64).max)
        self._starts = {rank: never.copy() for rank in window.traces}
        self._ends = {rank: never.copy() for rank in window.traces}
        for i, row in enumerate(rows):
            for part in row.participants:
                self._starts[part.rank][i], self._ends[part.rank][i] = part.start_ns, part.end_ns
        self._phases = functools.cache(lambda rank: _phases(window.traces[rank]))

    def round_of(self, row: Collective) -> int | None:
        """The step; where none is marked, how many updates a rank had made before. None: it made no
        more."""
        part = row.participants[0]
        if self._window.traces[part.rank].marked:
            return row.step
        updates = self._phases(part.rank).get("optimizer", NOTHING).end
        number = int(np.searchsorted(updates, part.start_ns + self._window.offsets[part.rank]))
        return number if number < max(len(updates), 1) else None

    def late(self, row: Collective, rank: int) -> _Late:
        others = sorted((p for p in row.participants if p.rank != rank), key=lambda p: p.start_ns)
        other = others[(len(others) - 1) // 2]
        mine = _part(row, rank)
        began, begins, before = self._together(mine, other)
        out = 0 if began is not None else begins[0] - begins[1]
        own, idle = self._work(mine, begins[0])
        for counted, theirs in zip((own, idle), self._work(other, begins[1]), strict=True):
            counted.subtract(theirs)
        by = mine.start_ns - other.start_ns
        longer = own.pop("all")
        held = by - (began or 0) - out - longer
        began, out, longer, held = (
            min(max(part or 0, 0), by) for part in (began, out, longer, held)
        )
        waits = sum(min(int(1000 * p.wait_us), began) for p in row.participants)
        unseen = before is not None and before.kind in POINT_TO_POINT
        return _Late(by, began, out, unseen, held, longer, own, idle, waits)

    def _together(
        self, mine: Participant, other: Participant
    ) -> tuple[int | None, tuple[int, int], Collective | None]:
        """When both were last together, for each, on the common clock, and in what; or how much
        later the first began, if that was the beginning."""
        starts = [self._starts[part.rank] for part in (mine, other)]
        ends = [self._ends[part.rank] for part in (mine, other)]
        # Who sends a broadcast may be out of it before another comes: they did not meet there.
        met = np.maximum(*starts) <= np.minimum(*ends)
        before = np.flatnonzero((ends[0] <= mine.start_ns) & (ends[1] <= other.start_ns) & met)
        if len(before):
            latest = before[np.argmax(ends[0][before] + ends[1][before])]
            return None, (int(ends[0][latest]), int(ends[1][latest])), self._rows[latest]
        a, b = (
            self._window.traces[p.rank].steps[0].start_ns - self._window.offsets[p.rank]
            for p in (mine, other)
        )
        return a - b, (a, b), None

    def _work(self, part: Participant, since: int) -> tuple[Counter[str], Counter[str]]:
        """What a rank itself did until it came, by phase and in all; and idle. In ns."""
        moved = self._window.offsets[part.rank]
        whole = union(np.array([since + moved]), np.array([part.start_ns + moved]))
        whole -= self._window.exposed[part.rank]
        spent = {name: whole & own for name, own in self._phases(part.rank).items()}
        work = Counter({name: own.length for name, own in spent.items()})
        work["all"] = whole.length
        running = self._window.running[part.rank]
        return work, Counter({name: (own - running).length for name, own in spent.items()})


def _part(row: Collective, rank: int) -> Participant:
    return next(p for p in row.participants if p.rank == rank)


def _phases(trace: Trace) -> dict[str, Intervals]:
    """When a rank was in which phase. A GPU's work is of the phase that launched it; while it is
    idle, it is in the phase of the host."""
    events = trace.events
    annotations = events.kind == ANNOTATION
    known = activity.Phases(trace)
    marks = {
        "optimizer": known.parts["optimizer"],
        "backward": known.parts["backward"] if known.marked else _backwards(trace, known),
        "forward": activity.spans(trace, annotations & activity.named(trace, _FORWARD)),
        LOADING: activity.spans(trace, annotations & activity.named(trace, _LOADING)),
    }
    ordered = sorted(
        (start, end, name)
        for name, part in marks.items()
        for start, end in zip(part.start.tolist(), part.end.tolist(), strict=True)
    )
    found: dict[str, list[tuple[int, int]]] = defaultdict(list)
    last, at = "", trace.steps[0].start_ns
    unfinished = False  # a backward was, and no update yet
    for start, end, name in (*ordered, (trace.steps[-1].end_ns,) * 2 + ("",)):
        between = _between(last, name)
        begun = next((s.start_ns for s in trace.steps if at < s.start_ns <= start), None)
        unfinished &= begun is None
        if last == "backward" and not len(marks["optimizer"]) and trace.marked and between:
            # Whether the update was before or after that is not known.
            found[AFTER].append((at, begun or start))
            at = begun or start
        found[MICRO if between == BETWEEN and unfinished else between].append((at, start))
        if name in ("backward", "optimizer"):
            unfinished = name == "backward" and len(marks["optimizer"]) > 0
        found[name].append((max(start, at), end))
        last, at = name, max(at, end)
    found.pop("", None)
    host = {name: union(*np.array(spans, np.int64).T) for name, spans in found.items()}
    if trace.device != "gpu":
        return host
    works = events.on_gpu & ~(activity.communication_rows(trace) & (events.kind == KERNEL))
    busy = activity.spans(trace, works)
    launched = activity.launch_times(trace)
    return {
        name: activity.spans(trace, works & activity.holds(part, launched)) | (part - busy)
        for name, part in host.items()
    }


def _backwards(trace: Trace, known: activity.Phases) -> Intervals:
    """Each backward of the autograd engine by itself: while one runs, the main thread begins no
    operator outside the engine's spans."""
    events = trace.events
    engine = activity.spans(trace, known.engine)
    begun = events.start_ns[(events.kind == model.CPU_OP) & (events.tid == trace.main_thread)]
    begun = np.sort(begun[~activity.holds(engine, begun)])
    gaps = np.searchsorted(begun, engine.end[:-1]) == np.searchsorted(begun, engine.start[1:])
    one = union(engine.end[:-1][gaps], engine.start[1:][gaps])
    return (engine | one) & known.parts["backward"]


def _between(last: str, following: str) -> str:
    """The phase of what lies between two marks. Empty: not known."""
    if last == "forward" and following in ("forward", "backward"):
        return "forward"  # the loss
    if following == "backward":
        return BEFORE  # forward is not marked
    if following in ("forward", LOADING) or last == "optimizer":
        return BETWEEN
    return "before the optimizer" if (last, following) == ("backward", "optimizer") else ""
