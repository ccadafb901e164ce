"""Pipeline schedules: the lists obey their law, and a simulation finds what the formulas say."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlab.axes import Axes
from shardlab.errors import UsageError
from shardlab.strategies.pipeline import schedule_analysis, schedules
from shardlab.strategies.pipeline.schedule_analysis import Times
from shardlab.strategies.pipeline.schedules import SCHEDULES, Action, schedule

LENGTHS = st.integers(1, 400).map(lambda n: n / 16)  # sums of these are exact


@st.composite
def cases(draw: Any) -> tuple[str, int, int, int]:
    """Name, ranks, micro-batches and chunks of any schedule that there can be."""
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    most = 5 if name == "interleaved" else 2
    chunks = draw(st.sampled_from([n for n in range(most + 1) if n in SCHEDULES[name].chunks]))
    return name, draw(st.integers(1, 9)), draw(st.integers(1, 24)), chunks


def spelled(actions: list[Action]) -> str:
    """``F0.1`` is the forward of micro-batch 1 on stage 0."""
    return " ".join(f"{kind}{stage}.{micro}" for kind, stage, micro in actions)


# ------------------------------------------------------------------ the lists


@given(cases(), st.integers(1, 3))
def test_a_rank_has_the_stages_that_its_list_names(
    case: tuple[str, int, int, int], tensor: int
) -> None:
    name, ranks, micro, chunks = case
    axes = Axes(data=2, pipeline=ranks, tensor=tensor, schedule=name, chunks=chunks)
    for place, actions in enumerate(schedule(name, ranks, micro, chunks)):
        named = sorted({stage for _, stage, _ in actions}) if ranks > 1 else []
        for copy in range(tensor):  # tensor-parallel ranks are neighbours
            assert schedules.stages_of(axes, place * tensor + copy) == named
            assert schedules.stages_of(axes, (ranks + place) * tensor + copy) == named


@given(cases())
def test_every_list_obeys_the_law(case: tuple[str, int, int, int]) -> None:
    name, ranks, micro, chunks = case
    lists = schedule(*case)
    assert schedule_analysis.check(lists) == []
    placed = {action.stage: rank for rank, actions in enumerate(lists) for action in actions}
    assert placed == {
        stage: schedules.rank_of(stage, ranks, name) for stage in range(ranks * chunks)
    }
    assert {action.micro for actions in lists for action in actions} == set(range(micro))


@settings(deadline=None)
@given(cases(), LENGTHS, LENGTHS, LENGTHS, st.one_of(st.just(0.0), LENGTHS))
def test_closed_forms_are_what_the_simulation_finds(
    case: tuple[str, int, int, int], forward: float, inputs: float, weight: float, send: float
) -> None:
    name, ranks, micro, chunks = case
    for times in (Times(forward, inputs, weight, send), Times(forward, forward, forward, send)):
        lists = schedule(*case)
        claim = schedule_analysis.claim(name, ranks, micro, times, chunks)
        assert schedule_analysis.live(lists) == claim.live
        assert schedule_analysis.messages(lists) == claim.messages
        if claim.bubble is None:
            assert send > 0
            claim = schedule_analysis.claim(
                name, ranks, micro, Times(forward, inputs, weight), chunks
            )
            assert claim.bubble is not None  # every schedule has a form, if sends take no time
        else:
            assert schedule_analysis.bubble(lists, times) == pytest.approx(claim.bubble, abs=1e-12)


def test_the_formulas_of_the_papers() -> None:
    """P = 4, M = 8, two chunks, and F = I = W, of which a chunk has half."""
    one, half = Times(1, 1, 1), Times(0.5, 0.5, 0.5)
    found = {
        name: schedule_analysis.bubble(schedule(name, 4, 8), half if kind.chunks[0] == 2 else one)
        for name, kind in SCHEDULES.items()
    }
    assert found == {
        "gpipe": 3 / 8,
        "1f1b": 3 / 8,
        "interleaved": 3 / 16,
        "zero_bubble": 3 / 24,  # (P-1)(F+I-W) of M(F+I+W)
    }
    kept = {name: schedule_analysis.live(schedule(name, 4, 8)) for name in SCHEDULES}
    assert kept == {
        "gpipe": [8, 8, 8, 8],
        "1f1b": [4, 3, 2, 1],
        "interleaved": [11, 9, 7, 5],  # of half the size
        "zero_bubble": [4, 4, 4, 4],
    }


def test_the_lists_of_the_papers() -> None:
    """Rank 1 of 2, and what Megatron's rank 0 of 2 does with two chunks and four micro-batches."""
    assert spelled(schedule("gpipe", 2, 2)[1]) == "F1.0 F1.1 B1.0 B1.1"
    assert spelled(schedule("1f1b", 2, 3)[0]) == "F0.0 F0.1 B0.0 F0.2 B0.1 B0.2"
    assert spelled(schedule("zero_bubble", 2, 3)[0]) == (
        "F0.0 F0.1 I0.0 W0.0 F0.2 I0.1 W0.1 I0.2 W0.2"
    )
    assert spelled(schedule("zero_bubble", 2, 3)[1]) == (
        "F1.0 I1.0 F1.1 I1.1 W1.0 F1.2 I1.2 W1.1 W1.2"
    )
    assert spelled(schedule("interleaved", 2, 4)[0]) == (
        "F0.0 F0.1 F2.0 F2.1 F0.2 B2.0 F0.3 B2.1 F2.2 B0.0 F2.3 B0.1 B2.2 B2.3 B0.2 B0.3"
    )


# ------------------------------------------------------------------ the checker and the simulator


@given(cases(), st.data())
def test_the_law_notices_what_is_broken(case: tuple[str, int, int, int], data: Any) -> None:
    """An action lost, done twice, on another rank; or a backward before its own forward."""
    lists = schedule(*case)
    rank = data.draw(st.integers(0, len(lists) - 1))
    place = data.draw(st.integers(0, len(lists[rank]) - 1))
    how = data.draw(st.sampled_from(["lost", "twice", "reversed", "moved"]))
    if how == "lost":
        del lists[rank][place]
    elif how == "twice":
        lists[rank].insert(place, lists[rank][place])
    elif how == "reversed":
        lists[rank].reverse()
    else:
        lists.append([lists[rank].pop(place)])
    assert schedule_analysis.check(lists)


def test_what_the_law_says() -> None:
    lists = schedule("1f1b", 2, 2)
    lists[0][0], lists[0][1] = lists[0][1], lists[0][0]
    assert schedule_analysis.check(lists) == [
        "rank 1 takes rank 0's activations in another order than they are sent"
    ]
    lists = schedule("gpipe", 2, 1)
    lists[1].append(Action("W", 1, 0))
    assert schedule_analysis.check(lists) == [
        "stage 1, micro-batch 0: B F W instead of F and B, or F, I and W"
    ]
    assert schedule_analysis.check([[], []]) != []
    assert schedule_analysis.check([[Action("F", 1, 0), Action("B", 1, 0)]]) == [
        "stages and micro-batches are not numbered from 0 without a gap"
    ]


@settings(deadline=None)
@given(cases(), st.data())
def test_a_timeline_is_possible(case: tuple[str, int, int, int], data: Any) -> None:
    """With stages of any times: each action lasts what it should, begins after what it needs, and
    not later than it must."""
    _, ranks, _, chunks = case
    lists = schedule(*case)
    times = [Times(*data.draw(st.tuples(*[LENGTHS] * 4))) for _ in range(ranks * chunks)]
    played = schedule_analysis.timeline(lists, times)
    ended = {
        (action.kind.replace("I", "B"), *action[1:]): (rank, span.end)
        for rank, actions in enumerate(lists)
        for action, span in zip(actions, played[rank], strict=True)
    }
    for rank, actions in enumerate(lists):
        free = 0.0
        for (kind, stage, micro), span in zip(actions, played[rank], strict=True):
            assert span.end - span.start == pytest.approx(times[stage].of(kind))
            before = {
                "F": ("F", stage - 1, micro),
                "W": ("B", stage, micro),
            }.get(kind, ("B", stage + 1, micro))
            if before[1] == ranks * chunks:
                before = ("F", stage, micro)
            arrives = 0.0
            if before[1] >= 0:
                of, arrives = ended[before]
                arrives += (of != rank) * times[before[1]].send
            assert span.start == max(free, arrives)
            free = span.end
    if len(set(times)) == 1:
        assert played == schedule_analysis.timeline(lists, times[0])


def test_a_timeline_of_what_gets_stuck() -> None:
    with pytest.raises(ValueError, match="rank 0 waits for ever before B of stage 0, micro-batch"):
        schedule_analysis.timeline([[Action("B", 0, 0), Action("F", 0, 0)]], Times())


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (("1F1B", 2, 2), "unknown schedule '1F1B'; did you mean '1f1b'?"),
        (("gpip", 2, 2), "unknown schedule 'gpip'; did you mean 'gpipe'?"),
        (("gpipe", 0, 2), "gpipe needs at least 1 rank, not 0"),
        (("1f1b", 2, -1), "1f1b needs at least 1 micro-batch, not -1"),
        (("1f1b", 2, 2, 2), "1f1b has 1 stage per rank, not 2; interleaved can have that"),
        (
            ("zbv", 2, 2),  # of pytorch_pipeline only
            "unknown schedule 'zbv'; known: gpipe, 1f1b, interleaved, zero_bubble",
        ),
        (
            ("interleaved", 2, 2, 1),
            "interleaved has 2 stages per rank or more, not 1; with 1 it is 1f1b",
        ),
        (("gpipe", 2, 2, 0), "gpipe has 1 stage per rank, not 0"),
    ],
)
def test_refusals(asked: tuple[Any, ...], message: str) -> None:
    with pytest.raises(UsageError) as refusal:
        schedule(*asked)
    assert str(refusal.value) == message
