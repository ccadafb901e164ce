"""How long a step takes: its events, played back on a machine that has prices instead of parts.

A rank has two lanes: its own work, and the collectives that are under way beside it. On a CPU both
need the same cores. Gloo copies and adds on threads of its own, and the rank's thread gets what
they leave it. On a GPU a collective has an engine of its own, but takes some of the memory's
bandwidth: work beside it is slower by a factor.

All ranks of a data-parallel world do the same at the same time, so one is played back for all of
them. The stages of a pipeline do not: one rank of each is played back, each with a clock of its
own, and one that needs what another has not sent yet waits until it has. A message travels as soon
as it is sent, and keeps nobody from working.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from shardlab.plan.graph import Cost, Event, Mark, Start, Step, Wait, Work

TINY = 1e-12  # seconds: less is rounding


@dataclass(frozen=True)
class Lanes:
    """What a rank's work and its collectives have to share."""

    cores: float | None = None  # of one rank; None: collectives do not need the cores
    channels: int = 1  # collectives that are under way at once; the others wait for their turn
    slowdown: float = 1.0  # times that work takes longer while a collective is under way
    meeting_s: float = 0.0  # what all of them wait for takes this much longer
    # The last rank comes later to what all of them wait for: by this many seconds, times the root
    # of the seconds of work since they last met.
    late: float = 0.0


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of a lane, in seconds since the step began."""

    lane: str  # "work", "wait", "bubble" or "comm"
    name: str
    begin: float
    end: float
    rank: int = 0  # whose it is


@dataclass(frozen=True)
class Played:
    """A step in its times. ``work_s``, ``wait_s`` and ``bubble_s`` add up to ``step_s``. In a
    pipeline they are means over the stages."""

    step_s: float
    work_s: float  # the rank's thread was at work, or wanted to be
    wait_s: float  # it stood still: exposed communication
    bubble_s: float  # it stood still: another stage was not there yet
    comm_s: float  # some collective was under way
    spans: tuple[Span, ...]


Stretch = tuple[str, float]  # work that nothing interrupts: its name, and its seconds


def replay(
    steps: Sequence[Step],
    work: Callable[[Work], float],
    cost: Callable[[Start, bool], Cost],
    lanes: Lanes,
) -> Played:
    """The second of two steps in a row: what the first leaves under way, the second waits for.

    ``steps``: of one rank of each kind that there is. ``cost`` is told whether a collective begins
    while others are under way.
    """
    meetings = _Meetings()
    players = [_Player(step.rank, lanes, cost, meetings) for step in steps]
    events = [merged(step.events, work) for step in steps]
    _play_together(player.play(own) for player, own in zip(players, events, strict=True))
    begins = [player.now for player in players]
    for player in players:
        player.spans.clear()
    _play_together(player.play(own) for player, own in zip(players, events, strict=True))
    length = max(p.now - begin for p, begin in zip(players, begins, strict=True))
    start = min(begins)  # of the pictures
    spans: list[Span] = []
    sums = []
    for player, begin in zip(players, begins, strict=True):
        own = player.spans
        until = begin + length
        if until - player.now > TINY * (1 + until):  # it begins the next step with the others
            own.append(Span("bubble", "", player.now, until))
        lost = {lane: sum(s.end - s.begin for s in own if s.lane == lane)
                for lane in ("wait", "bubble")}  # fmt: skip
        sums.append((*lost.values(), _covered(own, begin, begin + length)))
        spans += [Span(s.lane, s.name, max(0.0, s.begin - start), s.end - start, player.rank)
                  for s in own]  # fmt: skip
    waited, idle, sent = map(statistics.fmean, zip(*sums, strict=True))
    return Played(length, length - waited - idle, waited, idle, sent, tuple(spans))


def _play_together(runs: Iterator[Iterator[_Meeting]]) -> None:
    """Every player goes on as far as it can, until all are done."""
    waiting = [(run, meeting) for run in runs if (meeting := next(run, None)) is not None]
    while waiting:
        able = [meeting.end is not None for _, meeting in waiting]
        assert any(able), "every stage waits for what another has not sent"
        left = []
        for (run, meeting), is_able in zip(waiting, able, strict=True):
            then = next(run, None) if is_able else meeting
            if then is not None:
                left.append((run, then))
        waiting = left


def merged(events: Sequence[Event], work: Callable[[Work], float]) -> list[Stretch | Start | Wait]:
    """The events with prices; work that nothing interrupts is one stretch."""
    found: list[Stretch | Start | Wait] = []
    action = ""  # of a pipeline
    for event in events:
        if isinstance(event, Mark):
            action = f"{event.name} {event.micro}, stage {event.stage}" if event.name else ""
        elif not isinstance(event, Work):
            found.append(event)
        else:
            name = action or event.phase
            if found and isinstance(found[-1], tuple) and found[-1][0] == name:
                found[-1] = name, found[-1][1] + work(event)
            else:
                found.append((name, work(event)))
    return found


def _covered(spans: Sequence[Span], begin: float, end: float) -> float:
    """Seconds in which at least one collective was under way."""
    total, until = 0.0, begin
    for span in sorted((s for s in spans if s.lane == "comm"), key=lambda s: s.begin):
        total += max(0.0, min(span.end, end) - max(span.begin, until))
        until = max(until, span.end)
    return total


@dataclass
class _Meeting:
    """What several stages do together: a message, or a collective among them."""

    begin: float | None = None  # when all that it needs were there
    end: float | None = None
    starts: list[float] = field(default_factory=list)


class _Meetings:
    """Those of all players. Both ends of a message give it the same label, and the messages of one
    label in the same order."""

    def __init__(self) -> None:
        self._made: dict[tuple[object, ...], _Meeting] = {}
        self._turns: Counter[tuple[object, ...]] = Counter()
        self._free: dict[tuple[object, ...], float] = {}  # when a link has sent what it was given

    def join(self, rank: int, start: Start, now: float, cost: Cost) -> _Meeting:
        """A rank is there. A message begins when it is sent, whoever receives it later; a
        collective when the last rank has come."""
        turn = rank, start.op, start.among, start.label
        number = self._turns[turn]
        self._turns[turn] += 1
        key = start.is_message, start.among, start.label, number
        meeting = self._made.setdefault(key, _Meeting())
        if start.op == "recv":
            return meeting
        meeting.starts.append(now)
        if start.is_message or len(meeting.starts) == len(start.among):
            link = start.among, start.label.partition(" ")[0]  # each kind has a way of its own
            meeting.begin = max(meeting.starts)
            sent = max(meeting.begin, self._free.get(link, 0.0)) + cost.wire_s
            self._free[link], meeting.end = sent, sent + cost.latency_s
        return meeting


class _Collective:
    """One that is under way: first its latency passes, then its share of cores and link does."""

    def __init__(self, start: Start, cost: Cost) -> None:
        self.start = start
        self.latency = cost.latency_s
        self.host, self.wire = cost.host_s, cost.wire_s
        self.channels = cost.channels
        self.left = 1.0 if cost.host_s > 0 or cost.wire_s > 0 else 0.0
        self.begin: float | None = None  # when it got a channel

    @property
    def is_done(self) -> bool:
        return self.latency <= TINY and self.left <= TINY

    @property
    def moves(self) -> bool:
        return self.latency <= TINY and self.left > 0


class _Player:
    """The two lanes of a rank, and the clock that both have."""

    def __init__(
        self,
        rank: int,
        lanes: Lanes,
        cost: Callable[[Start, bool], Cost],
        meetings: _Meetings,
    ) -> None:
        self.rank, self.lanes, self.cost, self.meetings = rank, lanes, cost, meetings
        self.now = 0.0
        self._apart_s = 0.0  # work since this rank last waited for all others
        self.spans: list[Span] = []
        self._active: list[_Collective] = []
        self._queue: deque[_Collective] = deque()
        self._under_way: dict[int, _Collective] = {}  # by the number of the call
        self._met: dict[int, tuple[Start, _Meeting]] = {}  # likewise

    def play(self, events: Sequence[Stretch | Start | Wait]) -> Iterator[_Meeting]:
        """Yields what it has to wait for, as long as other players have not come that far."""
        for event in events:
            if isinstance(event, Start):
                cost = self.cost(event, bool(self._active))
                if event.among:
                    meeting = self.meetings.join(self.rank, event, self.now, cost)
                    if event.op != "send":
                        self._met[event.call] = event, meeting
                    continue
                one = _Collective(event, cost)
                self._under_way[event.call] = one
                self._queue.append(one)
                self._let_in()
            elif isinstance(event, Wait):
                if event.call in self._met:
                    start, meeting = self._met.pop(event.call)
                    while meeting.end is None:
                        yield meeting
                    self._meet(start, meeting)
                one_or_none = self._under_way.pop(event.call, None)
                if one_or_none is not None:
                    self._wait(one_or_none)
            else:
                self._work(*event)

    def _meet(self, start: Start, meeting: _Meeting) -> None:
        """Wait for other stages, and then for what travels."""
        assert meeting.begin is not None
        assert meeting.end is not None
        name = start.label or start.op
        self.spans.append(Span("comm", name, meeting.begin, meeting.end))
        for lane, until in (("bubble", meeting.begin), ("wait", meeting.end)):
            begin = self.now
            while self.now < until - TINY:
                self._advance(until - self.now, self._speeds(works=False)[1])
            if self.now > begin:
                self.spans.append(Span(lane, name, begin, self.now))

    def _work(self, phase: str, seconds: float) -> None:
        begin, left = self.now, seconds
        self._apart_s += seconds
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
            self.now += self.lanes.meeting_s + self.lanes.late * math.sqrt(self._apart_s)
            self._apart_s = 0.0
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
        while self._queue:
            free = self.lanes.channels - sum(one.channels for one in self._active)
            if free < min(self._queue[0].channels, self.lanes.channels):
                break
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
