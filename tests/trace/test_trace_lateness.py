"""Who was late, and why: each number beside one taken straight from the events of the files."""

from __future__ import annotations

import re
import shutil
from itertools import pairwise
from pathlib import Path

import pytest

import chrome_trace
from chrome_trace import GLOO, RECORDED, Event, load, operator, span, step
from shardlab import trace as traces
from shardlab.report import trace as report
from shardlab.trace import groups


def spans_of(folder: str, rank: int, name: str) -> list[tuple[float, float]]:
    """Start and end in microseconds of the events whose name begins so."""
    events = chrome_trace.events_of(RECORDED / folder / f"rank{rank}.json.gz")
    return [(e["ts"], e["end"]) for e in events if e["name"].startswith(name)]


def by_hand(folder: str, name: str, pairs: list[tuple[int, int]]) -> dict[int, float]:
    """How long each rank made its only peer wait, in ms, in the collectives of pairs."""
    made = dict.fromkeys(range(4), 0.0)
    for pair in pairs:
        for mine in zip(*(spans_of(folder, rank, name) for rank in pair), strict=True):
            starts = [start for start, _ in mine]
            made[pair[starts.index(max(starts))]] += (max(starts) - min(starts)) / 1000
    return made


# ------------------------------------------------------------------ groups over Gloo

EVERY, PAIR = (0, 1, 2, 3), (0, 1)


def test_the_ranks_of_two_groups_do_not_wait_for_each_other() -> None:
    """Groups {0, 1} and {2, 3}, and rank 1 sleeps."""
    found = traces.load(RECORDED / "gloo_two_groups")
    rows = [row for row in found.collectives() if row.step is not None]
    assert [sorted(p.rank for p in row.participants) for row in rows].count([0, 1]) == 3
    assert len(rows) == 6
    assert all(row.group_size == 2 and row.bus_gbps == row.algorithm_gbps for row in rows)
    made = by_hand("gloo_two_groups", "gloo:all_reduce", [(0, 1), (2, 3)])
    said = {row.rank: row.others_waited_us / 1000 for row in found.stragglers()}
    assert said == pytest.approx({rank: ms for rank, ms in made.items() if ms}, abs=0.01)
    assert found.slow_rank()[0] == 1


def test_a_mesh_of_groups_and_a_delay_that_is_passed_on() -> None:
    """Rank 1 sleeps in forward; its neighbour in one group makes that of the other wait."""
    found = traces.load(RECORDED / "gloo_mesh")
    sums = [row for row in found.collectives() if row.kind == "all_reduce" and not row.emulates]
    assert {tuple(p.rank for p in row.participants) for row in sums} == {(0, 2), (1, 3)}
    scatters = [row for row in found.collectives() if row.emulates]
    assert {tuple(p.rank for p in row.participants) for row in scatters} == {(0, 1), (2, 3)}
    gathers = by_hand("gloo_mesh", "gloo:all_gather", [(0, 1), (2, 3)])
    said = [row for row in found.stragglers() if "all_gather" in row.worst_label]
    assert sum(row.others_waited_us for row in said) / 1000 == pytest.approx(sum(gathers.values()))
    late = {row.rank: row for row in found.lateness()}
    assert (late[1].slow, late[1].arose, late[1].steps_slow) == (True, "forward", 3)
    assert late[0].slow is False
    assert "held up in communication itself" in late[0].reason


def test_groups_that_cannot_be_known_name_nobody(tmp_path: Path) -> None:
    """Without the barrier, and with nobody late, a call could be of all ranks or of a pair."""
    ranks = [
        [step(1, 0, 900), span("gloo:all_reduce", 100 + 10 * rank, 300, GLOO)] for rank in EVERY
    ]
    found = load(tmp_path, *ranks, groups=[[EVERY, pair] for pair in (PAIR, PAIR, (2, 3), (2, 3))])
    assert [row.matched_by for row in found.collectives()] == ["alone"] * 4
    assert {row.bus_gbps for row in found.collectives()} == {None}
    assert any("process groups of 4 calls over Gloo are not known" in w for w in found.warnings)
    summary = found.summary()
    assert (summary["slow_rank"], summary["what_if"], found.stragglers()) == (None, None, ())
    assert "not known which ranks" in summary["what_if_reason"]


@pytest.mark.parametrize(
    ("threads", "starts", "expected"),
    [
        ((7, 8, 12, 13), (0, 0, 0, 0), (EVERY, EVERY, PAIR, PAIR)),  # the later is the later group
        ((12, 13), (0, 0, 500, 500), (PAIR, PAIR)),  # of all ranks it would not overlap
        ((12, 13), (0, 0, 0, 0), (None, None)),
        ((7, 8, 9), (0, 0, 0, 0), (None, None, None)),  # more than a group has
    ],
)
def test_a_thread_does_the_work_of_one_group(
    threads: tuple[int, ...], starts: tuple[int, ...], expected: tuple[object, ...]
) -> None:
    calls = {
        rank: [groups.Call(t, 1, "all_reduce 4", starts[rank], starts[rank] + 9, True)
               for t in threads]
        for rank in EVERY
    }  # fmt: skip
    lists = {rank: [EVERY, PAIR if rank < 2 else (2, 3)] for rank in EVERY}
    found = groups.of_threads(lists, calls, slack_ns=0)
    assert tuple(found[0, thread] for thread in threads) == expected


# ------------------------------------------------------------------ slow, or only late


def own_work(rank: int, folder: str) -> list[float]:
    """In ms, per step: from the end of the last all-reduce to the beginning of the next one."""
    calls = spans_of(folder, rank, "gloo:all_reduce")
    return [(b[0] - a[1]) / 1000 for a, b in pairwise(calls)]


@pytest.mark.parametrize(
    ("folder", "where", "mark"),
    [
        ("gloo_late_data", "data loading", "enumerate(DataLoader)"),
        ("gloo_late_forward", "forward", "DistributedDataParallel.forward"),
    ],
)
def test_where_lateness_arose_and_not_where_it_was_noticed(
    folder: str, where: str, mark: str
) -> None:
    found = traces.load(RECORDED / folder)
    [late] = found.lateness()
    assert {row.phase for row in found.stragglers()} == {"backward"}  # where it was noticed
    assert (late.rank, late.arose, late.slow) == (1, where, True)
    assert (late.steps, late.steps_last, late.steps_slow) == (3, 3, 3)
    longer = [b - a for a, b in zip(own_work(0, folder), own_work(1, folder), strict=True)]
    assert late.own_us / 1000 == pytest.approx(sum(longer) / 2, rel=0.15)  # and the first step
    marked = [sum(b - a for a, b in spans_of(folder, r, mark)) / 3000 for r in (0, 1)]
    assert late.own_us / 1000 == pytest.approx(marked[1] - marked[0], rel=0.15)
    waited, slept = found.breakdown(per="rank")
    made = by_hand(folder, "gloo:all_reduce", [(0, 1)])
    assert waited.wait_us / 1000 == pytest.approx(made[1], abs=0.01)
    assert slept.idle_host_us > 0.9 * 3 * 30_000  # the sleep itself, on the rank that slept
    said = report.verdict(found)
    assert "Rank 1 came last in 3 of 3 steps" in said
    assert f"longer in {where}." in said


def of_rank(begins: float, comes: list[float]) -> list[Event]:
    """Steps of 1 ms; in each an all-reduce, of which the rank comes at this time of the step."""
    made = [
        step(0, begins, 1000 - begins),
        *(step(i, 1000 * i, 1000) for i in range(1, len(comes))),
    ]
    for i, at in enumerate(comes):
        made.append(operator("aten::mm", 1000 * i + (begins if i == 0 else 0), 50))
        made.append(span("gloo:all_reduce", 1000 * i + at, 995 - at, GLOO))
    return made


@pytest.mark.parametrize(
    ("begins", "comes", "slow", "reason"),
    [
        (300, [400], False, "began later"),
        (300, [400, 100, 100], False, "began later"),
        (0, [500], None, "one step does not show"),
        (0, [100, 500, 100], False, "half of the steps or fewer"),
        (0, [500, 500, 100], True, "longer in most of the steps"),
    ],
)
def test_a_late_start_is_no_slowness(
    tmp_path: Path, begins: float, comes: list[float], slow: bool | None, reason: str
) -> None:
    found = load(tmp_path, of_rank(0, [100] * len(comes)), of_rank(begins, comes))
    [late] = found.lateness()
    assert (late.rank, late.steps, late.slow) == (1, len(comes), slow)
    assert reason in late.reason
    assert late.steps_last == sum(at > 100 for at in comes)
    assert late.began_late_us == begins
    assert ("Rank 1 is the slow one" in report.verdict(found)) is (slow is True)
    assert found.summary()["slow_rank"] == (1 if slow else None)


def test_a_long_step_beside_steady_slowness_changes_nothing(tmp_path: Path) -> None:
    found = load(tmp_path, of_rank(0, [300, 300, 900, 300, 300]), of_rank(0, [100] * 5))
    [late] = found.lateness()
    assert (late.rank, late.slow, late.steps_slow, late.own_us) == (0, True, 5, 200)


BEGAN = "Rank 1 began 0.850 ms later than the others, who waited for it at the beginning. "
IN_TURN = "The ranks waited for each other in turn, "


@pytest.mark.parametrize(
    ("zeroth", "begins", "first", "said"),
    [
        # What rank 1 comes later after its late beginning is judged by itself.
        ([100] * 3, 850, [950, 100, 100],
         f"{BEGAN}Otherwise no rank made the others wait for long."),
        ([100] * 3, 850, [950, 300, 300],
         f"{BEGAN}Rank 1 is the slow one: each other rank waited 0.133 ms a"),
        ([100, 100, 300], 850, [950, 300, 100], f"{BEGAN}{IN_TURN}0.133 ms a"),
        # As much as in any step: that is no news.
        ([100] * 4, 600, [700] * 4,
         "Rank 1 is the slow one: each other rank waited 0.600 ms a step for it."),
        # One long step, and in the others both are a little late, in turn.
        ([150, 100, 850, 150, 140, 100], 0, [100, 150, 100, 100, 100, 140],
         "No rank is called slow. Rank 0 came last in 1 of 6 steps, by 0.750 ms"),
        ([300, 300, 300, 100, 100], 0, [100, 100, 100, 400, 400], IN_TURN),  # 3 of 5: chance
        ([300, 300, 300, 300, 100], 0, [100, 100, 100, 100, 900], "Rank 0 is the slow one"),
        ([300, 300, 300, 100, 100], 0, [100] * 5, "Rank 0 is the slow one"),
    ],
)  # fmt: skip
def test_who_is_called_slow(
    tmp_path: Path, zeroth: list[float], begins: float, first: list[float], said: str
) -> None:
    found = load(tmp_path, of_rank(0, zeroth), of_rank(begins, first))
    assert report.slow(found).startswith(said)
    named = re.search(r"Rank (\d) is the slow one", said)
    assert found.slow_rank()[0] == (int(named[1]) if named else None)


@pytest.mark.parametrize("hosts", [None, "ab"])
def test_clocks_are_doubted_only_where_they_may_differ(tmp_path: Path, hosts: str | None) -> None:
    """Rank 1 comes out of the third all-reduce late, and works no longer after that."""
    ranks: list[list[Event]] = []
    for rank in range(2):
        events = [step(0, 0, 5000)]
        for i in range(5):
            begin = 1000 * i + 200 + 400 * (rank and i == 3)
            end = 1000 * i + 800 + 400 * (rank and i == 2)
            events += [span("gloo:all_reduce", begin, end - begin, GLOO),
                       operator("aten::mm", end, 100)]  # fmt: skip
        ranks.append(events)
    [late] = load(tmp_path, *ranks, hosts=hosts).lateness()
    assert (late.rank, late.slow, late.late_us) == (1, False, 400)
    assert late.reason.startswith("it also ended the collective before later")
    assert ("clocks of the traces may differ" in late.reason) is (hosts is not None)


@pytest.mark.parametrize("sleeps", ["after", "before", ""])
@pytest.mark.parametrize("forward", [True, False])
def test_a_script_with_an_update_of_its_own(tmp_path: Path, sleeps: str, forward: bool) -> None:
    """No optimizer of PyTorch is in it, so what is after backward may be before or after the
    update, but it is of the step that ends, and not between steps."""
    ranks: list[list[Event]] = []
    for rank in range(2):
        events, at = [], 0.0
        for i in range(4):
            begin, early, late = at, *(500 * rank * (sleeps == w) for w in ("before", "after"))
            at += 10 + early
            events += [span("DistributedDataParallel.forward", at, 100)] if forward else []
            events.append(operator("aten::mm", at, 90))
            at += 110
            events.append(operator("autograd::engine::evaluate_function: MmBackward0", at, 100))
            at += 100 + late
            end = 1000.0 * i + 900 + 50 * bool(i)
            events += [span("gloo:all_reduce", at + 20, end - at - 20, GLOO)]
            at = end
            events.append(step(i, begin, at - begin))
        ranks.append(events)
    found = load(tmp_path, *ranks)
    if not sleeps:
        assert found.lateness() == ()
        return
    [late_one] = found.lateness()
    where = (
        "after backward" if sleeps == "after" else "between steps" if forward else "before backward"
    )
    assert (late_one.rank, late_one.slow, late_one.arose) == (1, True, where)


def test_who_sends_a_broadcast_may_be_out_of_it_before_another_comes(tmp_path: Path) -> None:
    """Each rank updates a part of the parameters and sends it. Rank 1 updates slowly: it comes to
    rank 0's broadcast when rank 0 has left it, so they did not meet there."""
    ranks: list[list[Event]] = []
    for rank in range(2):
        events = []
        for i in range(3):
            at, late = 1000.0 * i, 500 * rank
            events += [step(i, at, 1000), span("gloo:all_reduce", at + 10 + rank, 90 - rank, GLOO)]
            events.append(span("Optimizer.step#Adam.step", at + 110, 40 + late))
            events.append(span("gloo:broadcast", at + 160 + late, 20, GLOO))
            begin = at + 190 + late
            events.append(span("gloo:broadcast", begin, at + 730 - begin, GLOO))
        ranks.append(events)
    [late_one] = load(tmp_path, *ranks).lateness()
    assert (late_one.rank, late_one.slow, late_one.steps_slow) == (1, True, 3)
    assert (late_one.arose, late_one.own_us) == ("optimizer", 500)


@pytest.mark.parametrize(
    "where",
    ["data loading", "between steps", "forward", "backward", "before the optimizer", "optimizer"],
)
def test_each_phase_in_which_lateness_arises(tmp_path: Path, where: str) -> None:
    marks = {
        "data loading": "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__",
        "between steps": "", "forward": "forward", "backward": "backward",
        "before the optimizer": "", "optimizer": "Optimizer.step#SGD.step",
    }  # fmt: skip
    ranks: list[list[Event]] = [[], []]
    for rank, events in enumerate(ranks):
        at = 0.0
        for number in range(3):
            begin, end = at, 1000.0 * (number + 1)
            for phase, mark in marks.items():
                took = 400.0 if rank == 1 and phase == where else 50.0
                events += [span(mark, at, took)] if mark else []
                at += took
            reduce = span("gloo:all_reduce", at, end - at, GLOO)
            events += [step(number, begin, end - begin), reduce]
            at = end
    [late] = load(tmp_path, *ranks).lateness()
    assert (late.rank, late.arose, late.own_us, late.slow) == (1, where, 350, True)


def test_means_are_of_the_steps_that_all_ranks_recorded(tmp_path: Path) -> None:
    last = [step(1, 5000, 1000), span("gloo:all_reduce", 5500, 100, GLOO)]
    found = load(tmp_path, [step(0, 0, 5000), *last], last)
    assert found.mean_step()["wall_ms"] == 1
    assert report.verdict(found).startswith("A step took 1.00 ms")
    assert any("not every rank recorded the same steps" in note for note in found.warnings)


# ------------------------------------------------------------------ a rank without a trace


def test_a_missing_rank_may_be_the_slow_one(tmp_path: Path) -> None:
    """Of four ranks in pairs, rank 2 has no trace: what 0 and 1 had is known, the rest is not."""
    for rank in (0, 1, 3):
        shutil.copy(RECORDED / "gloo_two_groups" / f"rank{rank}.json.gz", tmp_path)
    found = traces.load(tmp_path)
    assert found.missing == (2,)
    assert "traces of 3 of 4 ranks: rank 2 has none" in found.warnings
    for row in found.collectives():
        if row.step is not None and 3 in [p.rank for p in row.participants]:
            assert (row.last_rank, row.bus_gbps, row.algorithm_gbps) == (None, None, None)
    made = by_hand("gloo_two_groups", "gloo:all_reduce", [(0, 1)])
    [straggler] = found.stragglers()
    assert straggler.rank == 1
    assert straggler.others_waited_us / 1000 == pytest.approx(made[1])
    summary = found.summary()
    assert (summary["slow_rank"], summary["what_if"], summary["missing_ranks"]) == (None, None, [2])
    assert summary["what_if_reason"] == "rank 2 has no trace, and may have come last"
    assert "Which rank is slow is not known: rank 2 has no trace" in report.verdict(found)


def test_waits_for_a_missing_rank_are_bounds(tmp_path: Path) -> None:
    zeroth, first, third = (
        [step(1, 0, 900), span("gloo:all_reduce", 100 + late, 300 - late, GLOO)]
        for late in (0, 50, 20)
    )
    found = load(tmp_path, zeroth, first, None, third)
    [row] = found.collectives()
    assert (row.last_rank, row.wait_us) == (None, 80)  # at least: rank 0 waited 50, rank 3 30
    assert [r.wait_us for r in found.breakdown()] == [50, 0, 30]
    assert found.stragglers() == ()
    assert found.what_if() == ()


# ------------------------------------------------------------------ pauses, beginnings, pipelines


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize("busy", [True, False])
def test_time_between_two_backwards_of_a_step_is_not_backward(
    tmp_path: Path, marked: bool, busy: bool
) -> None:
    """Rank 1 needs longer before the forward of the second micro-batch."""
    engine = "autograd::engine::evaluate_function: AddBackward"
    ranks: list[list[Event]] = [[], []]
    for rank, events in enumerate(ranks):
        for i in range(3):
            at, pause = 1000.0 * i, 400.0 if rank else 10.0
            events += [step(i, at, 1000), operator("aten::mm", at + 5, 40)]
            events += [operator(engine, at + 60, 20), operator(engine, at + 90, 10)]
            events += [operator("aten::mul", at + 101, pause)] if busy else []
            again = at + 102 + pause
            events += [operator("aten::mm", again, 40), operator(engine, again + 50, 20)]
            events += [span("DistributedDataParallel.forward", at, 50)] if marked else []
            events += [span("DistributedDataParallel.forward", again, 45)] if marked else []
            events += [span("gloo:all_reduce", again + 60, at + 950 - again, GLOO)]
            events += [span("Optimizer.step#SGD.step", at + 960, 30)]
    found = load(tmp_path, *ranks)
    [late] = found.lateness()
    where = "between micro-batches" if marked else "before backward"
    assert (late.rank, late.slow, late.arose) == (1, True, where)
    assert late.idle == pytest.approx(0.0 if busy else 1.0, abs=0.01)
    how = "computing" if busy else "nothing ran"
    assert f"longer, {where} ({how})." in report.verdict(found)


def test_waits_in_a_pipeline_do_not_show_who_is_slow() -> None:
    found = traces.load(RECORDED / "gloo_1f1b")
    compute = {row.rank: row.compute_us / row.steps / 1000 for row in found.comparable()}
    said = f"Rank 2 computed longest: {compute[2]:.0f} ms a step, the others {compute[1]:.0f} to "
    assert said + f"{compute[0]:.0f} ms." in report.slow(found)
    assert found.slow_rank() == (None, "in a pipeline, waits do not show who is slow")
