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


def test_what_is_waited_for_at_once_adds_to_the_work() -> None:
    found = played(work(1.0), start(0), Wait(0), cost=Cost(0.5, 0.0, 1.5))
    assert found.step_s == pytest.approx(3.0)
    assert found.work_s == pytest.approx(1.0)
    assert found.wait_s == pytest.approx(2.0)
    assert found.comm_s == pytest.approx(2.0)


def test_work_hides_what_is_under_way() -> None:
    found = played(start(0), work(3.0), Wait(0), cost=Cost(0.5, 0.0, 1.5))
    assert found.step_s == pytest.approx(3.0)
    assert found.wait_s == 0.0


def test_on_a_cpu_both_need_the_same_core() -> None:
    """Two seconds of work and one of Gloo's copying on one core are three."""
    one_core = Lanes(cores=1.0)
    found = played(start(0), work(2.0), Wait(0), cost=Cost(0.0, 1.0, 1.0), lanes=one_core)
    assert found.step_s == pytest.approx(3.0)
    two_cores = Lanes(cores=2.0)
    found = played(start(0), work(2.0), Wait(0), cost=Cost(0.0, 1.0, 1.0), lanes=two_cores)
    assert found.step_s == pytest.approx(2.0)


def test_a_slow_link_leaves_the_core_to_the_work() -> None:
    """A collective that the link holds up for 10 s takes a tenth of a core meanwhile."""
    lanes = Lanes(cores=1.0)
    found = played(start(0), work(9.0), Wait(0), cost=Cost(0.0, 1.0, 10.0), lanes=lanes)
    assert found.step_s == pytest.approx(10.0)


def test_those_that_are_under_way_together_share_the_link() -> None:
    events = (start(0), start(1), Wait(0), Wait(1))
    at_once = played(*events, cost=Cost(1.0, 0.0, 2.0), lanes=Lanes(channels=2))
    assert at_once.step_s == pytest.approx(5.0)  # one latency, the link twice
    in_turn = played(*events, cost=Cost(1.0, 0.0, 2.0), lanes=Lanes(channels=1))
    assert in_turn.step_s == pytest.approx(6.0)
    for channels in (1, 2):  # each needs all that there are
        alone = played(*events, cost=Cost(1.0, 0.0, 2.0, 2), lanes=Lanes(channels=channels))
        assert alone.step_s == pytest.approx(6.0)


def test_a_gather_may_be_left_under_way_for_the_next_step() -> None:
    """It is waited for before the next forward, and the work after it hides nothing."""
    found = played(Wait(0), work(1.0), start(0), cost=Cost(0.0, 0.0, 2.0))
    assert found.step_s == pytest.approx(3.0)
    hidden = played(work(2.0), Wait(0), work(1.0), start(0), cost=Cost(0.0, 0.0, 2.0))
    assert hidden.step_s == pytest.approx(3.0)


@given(st.lists(st.floats(1e-9, 1e3), min_size=1, max_size=6), st.floats(1e-9, 1e3))
def test_ranks_that_are_alike_have_no_bubble(seconds: list[float], sent: float) -> None:
    events = [event for i, s in enumerate(seconds) for event in (work(s), start(i), Wait(i))]
    assert played(*events, cost=Cost(sent, 0.0, sent / 3)).bubble_s == 0


def test_work_beside_a_collective_is_slower_on_a_gpu() -> None:
    found = played(start(0), work(1.0), Wait(0), cost=Cost(0.0, 0.0, 5.0), lanes=Lanes(slowdown=2))
    assert found.work_s == pytest.approx(2.0)
    assert found.step_s == pytest.approx(5.0)


def test_ranks_are_late_where_they_wait_and_nowhere_else() -> None:
    lanes = Lanes(late=0.25)
    waits = played(work(1.0), start(0), Wait(0), cost=Cost(0.0, 0.0, 1.0), lanes=lanes)
    assert waits.step_s == pytest.approx(2.25)
    # The longer they work between two meetings, the later is the last: with the root of that time.
    again = (work(4.0), start(0), Wait(0), work(1.0), start(1), Wait(1))
    twice = played(*again, cost=Cost(0.0, 0.0, 1.0), lanes=lanes)
    assert twice.step_s == pytest.approx(4 + 1 + 0.5 + 1 + 1 + 0.25)
    hides = played(start(0), work(1.0), Wait(0), cost=Cost(0.0, 0.0, 0.5), lanes=lanes)
    assert hides.step_s == pytest.approx(1.0)


def test_spans_tell_the_step_again() -> None:
    found = played(work(1.0), start(0), work(1.0, "backward"), Wait(0), cost=Cost(0.0, 0.0, 3.0))
    lanes = {lane: [s for s in found.spans if s.lane == lane] for lane in ("work", "wait", "comm")}
    assert [(s.begin, s.end) for s in lanes["work"]] == [(0.0, 1.0), (1.0, 2.0)]
    assert [(s.begin, s.end) for s in lanes["wait"]] == [(2.0, 4.0)]
    assert [(s.begin, s.end) for s in lanes["comm"]] == [(1.0, 4.0)]
