"""Clocks of several nodes: measured to a known error, and corrected in the traces."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import commands
from chrome_trace import GLOO, Event, document, operator, span, step, write
from conftest import GetRanks
from shardlab import trace as traces
from shardlab.errors import UsageError
from shardlab.report import trace as report
from shardlab.trace import clocks
from shardlab.trace.clocks import Node, Ping, Reading, offset
from shardlab.world import World

NOW = 1_790_000_000_000_000_000
S, MS = 10**9, 10**6

times = st.integers(0, 50 * MS)
aheads = st.integers(-(10**15), 10**15)


# ------------------------------------------------------------------ pure functions


@given(ahead=aheads, delays=st.lists(st.tuples(times, times, times), min_size=1, max_size=40))
def test_the_truth_lies_within_the_error(ahead: int, delays: list[tuple[int, int, int]]) -> None:
    """However long the messages took each way, and however long the node took to answer."""
    pings, now = [], NOW
    for there, answering, back in delays:
        came, left = now + there + ahead, now + there + answering + ahead
        pings.append(Ping(now, came, left, now + there + answering + back))
        now = pings[-1].back_ns
    found, error = offset(pings)
    assert abs(found - ahead) <= error
    assert error <= min(there + back for there, _, back in delays) // 2 + 1  # as NTP's, or better


def test_a_clock_that_is_set_between_two_pings() -> None:
    pings = [Ping(0, 10, 10, 20), Ping(100, 5110, 5110, 120)]
    found, error = offset(pings)
    assert found - error <= 0 < 5000 <= found + error


def node(*readings: tuple[int, int, int], number: int = 1) -> Node:
    made = (Reading(f"{i}", at, ahead, error) for i, (at, ahead, error) in enumerate(readings))
    return Node(number, f"host{number}", (number,), tuple(made))


@given(
    ahead=aheads,
    ppm=st.floats(-500, 500),
    wrong=st.tuples(st.floats(-1, 1), st.floats(-1, 1)),
    at=st.floats(0, 1),
    seconds=st.integers(1, 10**5),
)
def test_between_two_readings_a_drifting_clock_is_right_to_their_errors(
    ahead: int, ppm: float, wrong: tuple[float, float], at: float, seconds: int
) -> None:
    """Also to the nanosecond, though Unix time in a float would have steps of 256."""
    errors = (90_000, 40_000)

    def truth(own_ns: int) -> int:
        return ahead + round((own_ns - NOW) * ppm / 1e6)

    ends = (NOW, NOW + seconds * S)
    read = node(
        *((t, truth(t) + int(w * e), e) for t, w, e in zip(ends, wrong, errors, strict=True))
    )
    moment = NOW + round(at * seconds * S)
    found = int(read.ahead(np.array([moment]))[0])
    assert abs(found - truth(moment)) <= read.error(moment, moment) + 2
    assert read.error(moment, moment) == 90_000
    exact = node(*((t, truth(t), 0) for t in ends))
    assert abs(int(exact.ahead(np.array([moment]))[0]) - truth(moment)) <= 2


def test_drift_is_told_where_the_readings_show_it_and_a_clock_that_was_set_is_not_trusted() -> None:
    assert node((NOW, 0, 50), (NOW + S, 90, 50)).drift_ppm is None
    assert node((NOW, 0, 50)).drift_ppm is None
    assert node((NOW, 0, 50), (NOW + S, 12_000, 50)).drift_ppm == 12
    read = node((NOW, 0, 50), (NOW + S, 90, 50), (NOW + 2 * S, 5 * S, 50), (NOW + 3 * S, 5 * S, 50))
    assert read.error(NOW, NOW + S // 2) == 50
    assert read.error(NOW + S // 2, NOW + S + 1) > 4 * S
    assert read.error(NOW + 2 * S + 1, NOW + 3 * S) == 50
    assert read.error(NOW + 4 * S, NOW + 5 * S) > 4 * S  # outside of all readings


# ------------------------------------------------------------------ traces


LATE = (40.0, 30_000.0, 150.0, 0.0, 30_000.0)  # microseconds, of rank 1 in each collective
LABEL = "grad blocks.11.attention.projection.weight and three others"
BASES = (NOW, NOW + 3 * S)  # of the ranks' files: each counts from a base of its own


def common_events(rank: int) -> list[Event]:
    """Two steps of five collectives, on one clock, in microseconds since ``NOW``. Rank 1 is late,
    and the collectives end 300 µs later on it."""
    events = [step(1, 5e6, 500_000), step(2, 5.5e6, 500_000)]
    for i, late in enumerate(LATE):
        start = 5e6 + 200_000 * i + 1000 + rank * late
        events.append(span(f"shardlab::all_reduce #{i} {LABEL}", start - 30, 15))
        events.append(operator("c10d::allreduce_", start - 20, 1))
        end = 5e6 + 200_000 * i + 60_000 + rank * 300
        events.append(span("gloo:all_reduce", start, end - start, GLOO))
    return events


def planted(t_us: float, ahead_us: float, ppm: float) -> float:
    return t_us + ahead_us + t_us * ppm / 1e6


def write_run(
    folder: Path, ahead_us: float, ppm: float, error_ns: int | None, hosts: str = "ab"
) -> traces.TraceSet:
    """Rank 1's clock is ahead and drifts; it was measured before and after the steps, if it was."""
    for rank, base in enumerate(BASES):
        events = common_events(rank)
        for event in events:
            begin, end = event["ts"], event["ts"] + event["dur"]
            if rank:
                begin, end = planted(begin, ahead_us, ppm), planted(end, ahead_us, ppm)
            event["ts"], event["dur"] = begin - (base - NOW) / 1000, end - begin
        stamp = {"rank": rank, "world": 2, "run": "r", "host": hosts[rank]}
        path = folder / "traces" / f"rank{rank}" / "t.json"
        write(path, document(events, rank, shardlab=stamp, baseTimeNanoseconds=base))
    if error_ns is not None:
        readings = []
        for t_us in (1e6, 10e6):
            own = planted(t_us, ahead_us, ppm)
            readings.append((NOW + round(own * 1000), round((own - t_us) * 1000), error_ns))
        zeros = (NOW, 0, 0), (NOW + 10 * S, 0, 0)
        nodes = [asdict(node(*zeros, number=0)), asdict(node(*readings))]
        (folder / "clocks.json").write_text(json.dumps({"schema": 1, "nodes": nodes}))
    return traces.load(folder)


def waits(found: traces.TraceSet) -> list[tuple[float, ...]]:
    return [tuple(p.wait_us for p in c.participants) for c in found.collectives()]


@pytest.mark.parametrize("ahead_us", [2e6, -2e6, 3600e6])
def test_waits_are_those_of_one_clock(tmp_path: Path, ahead_us: float) -> None:
    """A planted offset and drift change no answer, though collectives do not end at one time."""
    one = write_run(tmp_path / "one", 0, 0, None, hosts="aa")
    assert waits(one) == [(pytest.approx(late), 0) for late in LATE]
    two = write_run(tmp_path / "two", ahead_us, 80, error_ns=0)
    for a, b in zip(waits(one), waits(two), strict=True):
        assert a == pytest.approx(b, abs=0.01)
    assert [r.rank for r in two.stragglers()] == [1]
    for column in ("wait_us", "exposed_comm_us", "wall_us"):
        want, got = ([getattr(r, column) for r in s.breakdown()] for s in (one, two))
        assert want == pytest.approx(got, abs=0.1)
    for x, y in zip(one.lanes(), two.lanes(), strict=True):  # what the timeline draws
        assert np.abs((x.start_ns - one.lanes()[0].start_ns[0])
                      - (y.start_ns - two.lanes()[0].start_ns[0])).max(initial=0) <= 10  # fmt: skip


def test_without_the_correction_they_are_wrong(tmp_path: Path) -> None:
    """As if it were one clock, the wrong rank is named; by the ends, the 300 µs are lost."""
    same = write_run(tmp_path / "same", -2e6, 0, None, hosts="aa")
    assert [row.rank for row in same.stragglers()] == [0]
    ends = write_run(tmp_path / "ends", -2e6, 0, None)
    assert [a for a, _ in waits(ends)][1] == pytest.approx(LATE[1] - 300)
    assert any("2 hosts whose clocks were not measured" in note for note in ends.warnings)


def test_a_wait_below_the_error_is_none_and_that_is_said(tmp_path: Path) -> None:
    found = write_run(tmp_path, 2e6, 80, error_ns=100_000)
    assert [a > 0 for a, _ in waits(found)] == [False, True, True, False, True]
    assert found.stragglers()[0].collectives == 3
    assert not found.warnings
    ours, theirs = found.summary()["clocks"]
    assert ours == {"node": 0, "host": "host0", "ranks": (0,), "ahead_us": 0, "error_us": 0,
                    "drift_ppm": None}  # fmt: skip
    assert (theirs["ranks"], theirs["error_us"]) == ((1,), 100)
    assert theirs["ahead_us"] == pytest.approx(2e6 + 80 * 5.5, abs=1)
    assert theirs["drift_ppm"] == pytest.approx(80, rel=0.01)
    done = commands.here("trace", "analyze", str(tmp_path), cwd=tmp_path, COLUMNS="80")
    assert re.search(r"^1 +other +3 ", done.stdout, re.MULTILINE)  # who it was fits, too
    said = (
        "The clock of node 1 (host1, rank 1) was 2,000 ms ahead of rank 0's (it drifts by +80.0 "
        "µs/s). It is corrected to ± 0.100 ms; a wait that is shorter counts as none."
    )
    assert said in " ".join(done.stdout.split())
    assert said.replace("'", "&#39;") in (tmp_path / "traces" / "summary.html").read_text()


def test_ranks_of_one_node_have_one_clock() -> None:
    """Whatever its error against rank 0's: it is the same for both."""
    both = clocks.Clock(1, "h", (2, 3), 0.0, 500.0, None)
    assert clocks.between(both, both) == 0
    assert clocks.between(both, None) == 0
    assert clocks.between(both, clocks.Clock(2, "i", (4,), 0.0, 30.0, None)) == 530_000


def test_of_many_nodes_the_farthest_are_named() -> None:
    measured = [
        clocks.Clock(n, f"host{n}", (n,), ahead_us=2e6 * n, error_us=90.0 * n, drift_ppm=None)
        for n in range(9)
    ]
    said = report.clocks(SimpleNamespace(clocks=lambda: measured))  # type: ignore[arg-type]
    assert len(said) == report.MAX_CLOCKS + 1
    assert said[0].startswith("The clock of node 8 ")
    assert said[-1] == "Those of 4 more nodes are corrected to ± 0.360 ms."


@pytest.mark.parametrize("text", ["", "[]", '{"schema": 2, "nodes": []}', '{"schema": 1, "nodes": '
    '[{"node": 0, "host": "h", "ranks": [0, 1], "readings": []}]}'])  # fmt: skip
def test_a_damaged_file_is_refused(tmp_path: Path, text: str) -> None:
    write_run(tmp_path, 0, 0, None)
    (tmp_path / "clocks.json").write_text(text)
    with pytest.raises(UsageError, match=r"clocks.json cannot be read"):
        traces.load(tmp_path)


# ------------------------------------------------------------------ ranks


def read_clocks(world: World, folder: str, ahead_ns: list[int]) -> None:
    """Each of these ranks is a node of its own, with a clock of its own."""
    import time

    now, own = time.time_ns, ahead_ns[world.rank]
    name = clocks.clock_name
    clocks.clock_name = lambda: f"{own}"
    time.time_ns = lambda: now() + own
    try:
        measured = clocks.Clocks(world)
        measured.read("start")
        measured.read("end")
        measured.keep(Path(folder))
    finally:
        time.time_ns, clocks.clock_name = now, name


@pytest.mark.long
@pytest.mark.parametrize("aheads", [[0, 7 * S, 0], [0, 7 * S, -5 * S]])
def test_real_ranks(ranks: GetRanks, tmp_path: Path, aheads: list[int]) -> None:
    ranks(3).run(read_clocks, str(tmp_path), aheads)
    nodes = clocks.load(tmp_path)
    assert [nodes[r].ranks for r in range(3)] == [
        tuple(i for i in range(3) if aheads[i] == own) for own in aheads
    ]
    for rank, own in enumerate(aheads):
        assert [r.when for r in nodes[rank].readings] == ["start", "end"]
        for reading in nodes[rank].readings:
            assert abs(reading.ahead_ns - own) <= reading.error_ns < 50 * MS


@pytest.mark.long
def test_on_one_node_there_is_no_file(ranks: GetRanks, tmp_path: Path) -> None:
    (tmp_path / "clocks.json").write_text("of two nodes, before the run was started again")
    ranks(2).run(read_clocks, str(tmp_path), [S, S])
    assert list(tmp_path.iterdir()) == []
