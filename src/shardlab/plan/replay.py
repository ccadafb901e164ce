"""How long a step takes: its events, played back on a machine that has prices instead of parts.

A rank has two lanes: its own work, and the collectives that are under way beside it. On a CPU both
need the same cores. Gloo copies and adds on threads of its own, and the rank's thread gets what
they leave it. On a GPU a collective has an engine of its own, but takes some of the memory's
bandwidth: work beside it is slower by a factor.

All ranks of a data-parallel world do the same at the same time, so one is played back for all of
them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardlab.plan.graph import Cost, Event, Start, Step, Wait, Work

TINY = 1e-12  # seconds: less is rounding


@dataclass(frozen=True)
class Lanes:
    """What a rank's work and its collectives have to share."""

    cores: float | None = None  # of one rank; None: collectives do not need the cores
    channels: int = 1  # collectives that are under way at once; the others wait for their turn
    slowdown: float = 1.0  # times that work takes longer while a collective is under way
    late_s: float = 0.0  # by which the last rank comes later to what all of them wait for


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of a lane, in seconds since the step began."""

    lane: str  # "work", "wait" or "comm"
    name: str
    begin: float
    end: float


@dataclass(frozen=True)
class Played:
    """A step in its times. ``work_s`` and ``wait_s`` add up to ``step_s``."""

    step_s: float
    work_s: float  # the rank's thread was at work, or wanted to be
    wait_s: float  # it stood still: communication that nothing hides
    comm_s: float  # some collective was under way
    spans: tuple[Span, ...]


def replay(
    step: Step,
    work: Callable[[Work], float],
    cost: Callable[[Start, bool], Cost],
    lanes: Lanes,
) -> Played:
    """The second of two steps in a row: what the first leaves under way, the second waits for.

    ``cost`` is told whether a collective begins while others are under way.
    """
    events = merged(step.events, work)
    player = _Player(lanes, cost)
    player.play(events)
    begin = player.now
    player.spans.clear()
    player.play(events)
    spans = tuple(
        Span(s.lane, s.name, max(0.0, s.begin - begin), s.end - begin) for s in player.spans
    )
    length = player.now - begin
    waited = sum(s.end - s.begin for s in spans if s.lane == "wait")
    return Played(length, length - waited, waited, _covered(spans, length), spans)


def merged(
    events: Sequence[Event], work: Callable[[Work], float]
) -> list[tuple[str, float] | Start | Wait]:
    """The events with prices; work that nothing interrupts is one stretch."""
    found: list[tuple[str, float] | Start | Wait] = []
    for event in events:
        if not isinstance(event, Work):
            found.append(event)
        elif found and isinstance(found[-1], tuple) and found[-1][0] == event.phase:
            found[-1] = event.phase, found[-1][1] + work(event)
        else:
            found.append((event.phase, work(event)))
    return found


def _covered(spans: Sequence[Span], length: float) -> float:
    """Seconds in which at least one collective was under way."""
    total, end = 0.0, 0.0
    for span in sorted((s for s in spans if s.lane == "comm"), key=lambda s: s.begin):
        total += max(0.0, min(span.end, length) - max(span.begin, end))
        end = max(end, span.end)
    return total


class _Collective:
    """One that is under way: first its latency passes, then its share of cores and link does."""

    def __init__(self, start: Start, cost: Cost) -> None:
        self.start = start
        self.latency = cost.latency_s
        self.host, self.wire = cost.host_s, cost.wire_s
        self.left = 1.0 if cost.host_s > 0 or cost.wire_s > 0 else 0.0
        self.begin: float | None = None  # when it got a channel

    @property
    def is_done(self) -> bool:
        return self.latency <= TINY and self.left <= TINY

    @property
    def moves(self) -> bool:
        return self.latency <= TINY and self.left > 0


class _Player:
    """The two lanes, and the clock that both have."""

    def __init__(self, lanes: Lanes, cost: Callable[[Start, bool], Cost]) -> None:
        self.lanes, self.cost = lanes, cost
        self.now = 0.0
        self.spans: list[Span] = []
        self._active: list[_Collective] = []
        self._queue: deque[_Collective] = deque()
        self._under_way: dict[int, _Collective] = {}  # by the number of the call

    def play(self, events: Sequence[tuple[str, float] | Start | Wait]) -> None:
        for event in events:
            if isinstance(event, Start):
                one = _Collective(event, self.cost(event, bool(self._active)))
                self._under_way[event.call] = one
                self._queue.append(one)
                self._let_in()
            elif isinstance(event, Wait):
                one_or_none = self._under_way.pop(event.call, None)
                if one_or_none is not None:
                    self._wait(one_or_none)
            else:
                self._work(*event)

    def _work(self, phase: str, seconds: float) -> None:
        begin, left = self.now, seconds
        while left > TINY:
            speed, rates = self._speeds(works=True)
            left -= speed * self._advance(left / speed, rates)
        if self.now > begin:
            self.spans.append(Span("work", phase, begin, self.now))

    def _wait(self, one: _Collective) -> None:
        begin = self.now
        while one in self._active or one in self._queue:
            self._advance(float("inf"), self._speeds(works=False)[1])
        if self.now > begin:
            self.now += self.lanes.late_s
            self.spans.append(Span("wait", one.start.label or one.start.op, begin, self.now))

    # ------------------------------------------------------------------ sharing

    def _speeds(self, works: bool) -> tuple[float, list[float]]:
        """Of the rank's work, and of each active collective: parts of it in a second."""
        moving = [one for one in self._active if one.moves]
        wires = sum(1 for one in moving if one.wire > 0)
        # What a collective would do in a second with all the cores that it wants.
        rates = [
            0.0 if not one.moves else 1.0 / max(one.wire * max(1, wires), one.host, TINY)
            for one in self._active
        ]
        if self.lanes.cores is None:
            return (1.0 / self.lanes.slowdown if self._active else 1.0), rates
        wanted = [rate * one.host for rate, one in zip(rates, self._active, strict=True)]
        given = _fairly([1.0 if works else 0.0, *wanted], self.lanes.cores)
        slowed = [
            rate * (got / want if want > 0 else 1.0)
            for rate, want, got in zip(rates, wanted, given[1:], strict=True)
        ]
        return max(given[0], TINY), slowed

    def _advance(self, at_most: float, rates: Sequence[float]) -> float:
        """Let time pass until something ends, and say how much."""
        passes = at_most
        for one, rate in zip(self._active, rates, strict=True):
            if one.latency > TINY:
                passes = min(passes, one.latency)
            elif rate > 0:
                passes = min(passes, one.left / rate)
        assert passes < float("inf"), "a collective is waited for that does not move"
        self.now += passes
        for one, rate in zip(self._active, rates, strict=True):
            if one.latency > TINY:
                one.latency -= passes
            else:
                one.left -= rate * passes
        for one in [o for o in self._active if o.is_done]:
            self._active.remove(one)
            name = one.start.label or one.start.op
            self.spans.append(Span("comm", name, one.begin or 0.0, self.now))
        self._let_in()
        return passes

    def _let_in(self) -> None:
        while self._queue and len(self._active) < self.lanes.channels:
            one = self._queue.popleft()
            one.begin = self.now
            if one.latency > TINY or one.left > 0:  # else it costs nothing, and is done
                self._active.append(one)


def _fairly(wanted: Sequence[float], cores: float) -> list[float]:
    """What each gets: all that it wants, or else the same as the others that want more."""
    given = [0.0] * len(wanted)
    open_ = [i for i, want in enumerate(wanted) if want > 0]
    while open_:
        share = cores / len(open_)
        content = [i for i in open_ if wanted[i] <= share]
        if not content:
            for i in open_:
                given[i] = share
            break
        for i in content:
            given[i] = wanted[i]
            cores -= wanted[i]
        open_ = [i for i in open_ if i not in content]
    return given
