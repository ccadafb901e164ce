"""A step that is played back takes as long as its events, its prices and its lanes say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.plan.graph import Cost, Event, Group, Start, Step, Wait, Work
from shardlab.plan.replay import Lanes, Played, replay

PAIR = Group(2)


def work(seconds: float, phase: str = "forward") -> Work:
    return Work("measured", 0, 0, seconds=seconds, phase=phase)


def start(call: int) -> Start:
    return Start(call, "all_reduce", 8, PAIR)


def played(*events: Event, cost: Cost, lanes: Lanes = Lanes()) -> Played:
    step = Step(2, events)
    return replay([step], lambda w: w.seconds or 0.0, lambda _start, _queued: cost, lanes)


AT_ONCE = (start(0), start(1), Wait(0), Wait(1))
SLOW = Cost(1.0, 0.0, 2.0)  # a latency, no work of the host's, the link
CASES: list[tuple[tuple[Event, ...], Cost, Lanes, float]] = [
    # What is waited for at once adds to the work; work hides what is under way.
    ((work(1.0), start(0), Wait(0)), Cost(0.5, 0.0, 1.5), Lanes(), 3.0),
    ((start(0), work(3.0), Wait(0)), Cost(0.5, 0.0, 1.5), Lanes(), 3.0),
    # Two seconds of work and one of Gloo's copying on one core are three.
    ((start(0), work(2.0), Wait(0)), Cost(0.0, 1.0, 1.0), Lanes(cores=1.0), 3.0),
    ((start(0), work(2.0), Wait(0)), Cost(0.0, 1.0, 1.0), Lanes(cores=2.0), 2.0),
    # What the link holds up for 10 s takes a tenth of a core meanwhile.
    ((start(0), work(9.0), Wait(0)), Cost(0.0, 1.0, 10.0), Lanes(cores=1.0), 10.0),
    # Under way together: one latency, the link twice; in turn; each needs all channels there are.
    (AT_ONCE, SLOW, Lanes(channels=2), 5.0),
    (AT_ONCE, SLOW, Lanes(channels=1), 6.0),
    (AT_ONCE, Cost(1.0, 0.0, 2.0, 2), Lanes(channels=1), 6.0),
    (AT_ONCE, Cost(1.0, 0.0, 2.0, 2), Lanes(channels=2), 6.0),
    # A gather that is left under way is waited for before the next forward: the work after it
    # hides nothing.
    ((Wait(0), work(1.0), start(0)), Cost(0.0, 0.0, 2.0), Lanes(), 3.0),
    ((work(2.0), Wait(0), work(1.0), start(0)), Cost(0.0, 0.0, 2.0), Lanes(), 3.0),
    # Ranks are late where they wait. The longer they work between two meetings, the later is the
    # last: with the root of that time.
    ((work(1.0), start(0), Wait(0)), Cost(0.0, 0.0, 1.0), Lanes(late=0.25), 2.25),
    ((work(4.0), start(0), Wait(0), work(1.0), start(1), Wait(1)), Cost(0.0, 0.0, 1.0),
     Lanes(late=0.25), 4 + 1 + 0.5 + 1 + 1 + 0.25),
    ((start(0), work(1.0), Wait(0)), Cost(0.0, 0.0, 0.5), Lanes(late=0.25), 1.0),
]  # fmt: skip


@pytest.mark.parametrize(("events", "cost", "lanes", "step_s"), CASES)
def test_how_long_a_step_takes(
    events: tuple[Event, ...], cost: Cost, lanes: Lanes, step_s: float
) -> None:
    assert played(*events, cost=cost, lanes=lanes).step_s == pytest.approx(step_s)


def test_what_a_step_consists_of() -> None:
    found = played(work(1.0), start(0), Wait(0), cost=Cost(0.5, 0.0, 1.5))
    assert (found.work_s, found.wait_s, found.comm_s) == pytest.approx((1.0, 2.0, 2.0))
    hidden = played(start(0), work(3.0), Wait(0), cost=Cost(0.5, 0.0, 1.5))
    assert hidden.wait_s == 0.0
    # On a GPU, work beside a collective is slower.
    beside = played(start(0), work(1.0), Wait(0), cost=Cost(0.0, 0.0, 5.0), lanes=Lanes(slowdown=2))
    assert (beside.work_s, beside.step_s) == pytest.approx((2.0, 5.0))


@given(st.lists(st.floats(1e-9, 1e3), min_size=1, max_size=6), st.floats(1e-9, 1e3))
def test_ranks_that_are_alike_have_no_bubble(seconds: list[float], sent: float) -> None:
    events = [event for i, s in enumerate(seconds) for event in (work(s), start(i), Wait(i))]
    assert played(*events, cost=Cost(sent, 0.0, sent / 3)).bubble_s == 0


def test_spans_tell_the_step_again() -> None:
    found = played(work(1.0), start(0), work(1.0, "backward"), Wait(0), cost=Cost(0.0, 0.0, 3.0))
    lanes = {lane: [s for s in found.spans if s.lane == lane] for lane in ("work", "wait", "comm")}
    assert [(s.begin, s.end) for s in lanes["work"]] == [(0.0, 1.0), (1.0, 2.0)]
    assert [(s.begin, s.end) for s in lanes["wait"]] == [(2.0, 4.0)]
    assert [(s.begin, s.end) for s in lanes["comm"]] == [(1.0, 4.0)]
