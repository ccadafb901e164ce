"""Scripts that were not written for us: what computes, and which messages belong together.

Beside each number of a recorded trace stands a calculation of its own, from the file's events.
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

import chrome_trace
from chrome_trace import MAIN, Event, load, operator, span, step
from shardlab import trace as traces
from shardlab.report import trace as report

Spans = list[tuple[float, float]]

# ------------------------------------------------------------------ straight from the events


def recorded(name: str) -> list[list[Event]]:
    """Each rank's events."""
    paths = sorted((chrome_trace.RECORDED / name).rglob("*.json.gz"))
    return [chrome_trace.events_of(path) for path in paths]


def merged(spans: Spans) -> Spans:
    result: Spans = []
    for start, end in sorted(s for s in spans if s[1] > s[0]):
        if result and start <= result[-1][1]:
            result[-1] = result[-1][0], max(end, result[-1][1])
        else:
            result.append((start, end))
    return result


def both(a: Spans, b: Spans) -> float:
    return sum(max(0.0, min(e, y) - max(s, x)) for s, e in merged(a) for x, y in merged(b))


def length(spans: Spans) -> float:
    return sum(end - start for start, end in merged(spans))


def named(events: list[Event], *starts: str) -> Spans:
    return [(e["ts"], e["end"]) for e in events if e["name"].startswith(starts)]


def working(events: list[Event]) -> Spans:
    """When PyTorch's own operators ran on the main thread."""
    [main] = {e["tid"] for e in events if e["name"].startswith("ProfilerStep")}
    here = [e for e in events if e["tid"] == main and e["cat"] == "cpu_op"]
    return named(here, "aten::", "fsdp::") + [
        (e["ts"], e["end"]) for e in here if re.fullmatch(r"\w+Backward0", e["name"])
    ]


Message = tuple[int, int, Event, Event, Event, Event]  # from, to, each end's call and its wait


def messages(ranks: list[list[Event]]) -> list[Message]:
    """The n-th send from rank to rank, and the n-th receive."""
    ends: dict[Any, list[tuple[Event, Event]]] = defaultdict(list)
    for rank, events in enumerate(ranks):
        for kind, call in (("send", "c10d::send"), ("recv", "c10d::recv_")):
            waits = [e for e in events if e["name"] == f"gloo:{kind}"]
            calls = [e for e in events if e["name"] == call]
            for asked, waited in zip(calls, waits, strict=True):
                peer = int(asked["args"]["Concrete Inputs"][2])
                way = (rank, peer) if kind == "send" else (peer, rank)
                ends[kind, way].append((asked, waited))
    return [
        (*way, *sent, *got)
        for kind, way in ends
        if kind == "send"
        for sent, got in zip(ends["send", way], ends["recv", way], strict=True)
    ]


# ------------------------------------------------------------------ what computes


@pytest.mark.parametrize("name", ["gloo_plain_fsdp", "gloo_fsdp"])
def test_fsdp_hides_nothing_behind_its_own_hooks(name: str) -> None:
    """A gather that a hook of backward waits for is no computation, though it lies in a node."""
    found = traces.load(chrome_trace.RECORDED / name)
    for row, events in zip(found.breakdown(per="rank"), recorded(name), strict=True):
        edges = named(events, "ProfilerStep")
        work = [(s, e) for s, e in working(events) if edges[0][0] <= s < edges[-1][1]]
        work_us = length(work) - both(work, named(events, "c10d::"))
        hidden_us = both(work, named(events, "gloo:"))
        assert row.compute_us == pytest.approx(work_us, rel=0.1)
        assert row.hidden_comm_us == pytest.approx(hidden_us, abs=0.03 * row.comm_us)
        assert row.overlap_pct is not None
        assert row.overlap_pct < 5


# ------------------------------------------------------------------ messages


def test_a_pipeline_of_pytorch() -> None:
    """What precedes the other end's call is bubble; the rest is transfer, and has a bandwidth."""
    name = "gloo_1f1b"
    found, ranks = traces.load(chrome_trace.RECORDED / name), recorded(name)
    sent = messages(ranks)
    assert found.warnings == ()
    assert {c.matched_by for c in found.collectives()} == {"message"}
    [row] = found.collective_summary()
    assert (row.name, row.count) == ("send", len(sent))

    def ready(call: Event, wait: Event, rank: int) -> float:
        """When it began to wait: after the last operator that it ran meanwhile."""
        ran = [e for _, e in working(ranks[rank]) if call["ts"] < e <= wait["end"]]
        return max([call["ts"], *ran])

    bubbles: list[Spans] = [[] for _ in ranks]
    transfer = 0.0
    for source, target, send, taken, recv, came in sent:
        bubbles[target].append((ready(recv, came, target), min(send["ts"], came["end"])))
        bubbles[source].append((ready(send, taken, source), min(recv["ts"], taken["end"])))
        transfer += came["end"] - max(ready(recv, came, target), send["ts"])
    for own, spans, events in zip(found.breakdown(per="rank"), bubbles, ranks, strict=True):
        bubble = length(spans) - both(spans, working(events))
        assert own.bubble_us == pytest.approx(bubble, rel=0.05, abs=100)
    assert row.transfer_us == pytest.approx(transfer, rel=0.05, abs=100)
    assert found.stragglers() == ()
    answers = {answer.question: answer.step_us for answer in found.what_if()}
    rows = found.breakdown()
    assert answers["the link were twice as fast"] == max(
        r.wall_us - r.exposed_comm_us / 2 for r in rows
    )
    assert answers["there were no bubble"] == max(r.wall_us - r.bubble_us for r in rows)


def ends(found: traces.TraceSet) -> set[tuple[int, ...]]:
    return {
        tuple(n for p in c.participants for n in (p.rank, p.end_ns))
        for c in found.collectives()
        if c.matched_by == "message"
    }


def test_messages_that_name_no_rank_are_matched_where_only_one_fits(tmp_path: Path) -> None:
    """The recorded pipeline without its shapes: no pair is wrong, few are missing."""
    for path in (chrome_trace.RECORDED / "gloo_1f1b").glob("*.json.gz"):
        content = chrome_trace.read(path)
        for event in content["traceEvents"]:
            event.get("args", {}).pop("Concrete Inputs", None)
        chrome_trace.write(tmp_path / path.name, content)
    known, inferred = traces.load(chrome_trace.RECORDED / "gloo_1f1b"), traces.load(tmp_path)
    assert ends(inferred) <= ends(known)
    assert len(ends(inferred)) >= 0.5 * len(ends(known))
    for told, own in zip(known.breakdown(), inferred.breakdown(), strict=True):
        assert 0.7 * told.bubble_us <= own.bubble_us <= told.bubble_us + 1e-6


def message(kind: str, begun: float, end: float, peer: int | None = None) -> list[Event]:
    call = "c10d::send" if kind == "send" else "c10d::recv_"
    about = {"Input Dims": [[250]], "Input type": ["float"]}
    inputs = {} if peer is None else {"Concrete Inputs": ["", "", str(peer), "0"]}
    return [
        operator(call, begun, 4, **inputs),
        span(f"gloo:{kind}", begun + 4, end - begun - 4, MAIN, **about),
    ]


@pytest.mark.parametrize("peers", [(None, None), (1, 0)])
def test_the_wait_for_the_sender_is_bubble(tmp_path: Path, peers: tuple[Any, Any]) -> None:
    """And the other way, for the gradient."""
    sender = [
        step(1, 0, 1000), operator("aten::mm", 0, 600), *message("send", 600, 690, peers[0]),
        *message("recv", 800, 840, peers[0]),
    ]  # fmt: skip
    receiver = [
        step(1, 0, 1000), *message("recv", 100, 700, peers[1]), operator("aten::mm", 700, 50),
        *message("send", 800, 840, peers[1]),
    ]  # fmt: skip
    found = load(tmp_path, sender, receiver)
    [row, _] = found.collectives()
    assert (row.kind, row.matched_by, row.last_rank) == ("send", "message", 0)
    assert (row.transfer_us, row.wait_us, row.bytes) == (100, 500, 1000)
    assert row.algorithm_gbps == pytest.approx(1000 / 100_000)
    assert [r.bubble_us for r in found.breakdown()] == [0, 500]
    assert [r.exposed_comm_us for r in found.breakdown()] == [130, 140]
    assert found.stragglers() == ()


def test_in_a_ring_a_late_rank_is_a_straggler(tmp_path: Path) -> None:
    """Each sends to the next; rank 2 is late."""
    ranks = [
        [step(1, 0, 1000), *message("send", at, 800, (rank + 1) % 3),
         *message("recv", at + 5, 805, (rank - 1) % 3)]
        for rank, at in enumerate((100, 100, 600))
    ]  # fmt: skip
    found = load(tmp_path, *ranks)
    assert [row.bubble_us for row in found.breakdown()] == [0, 0, 0]
    assert [row.wait_us for row in found.breakdown()] == [500, 505, 0]
    assert found.stragglers()[0].rank == 2


def test_a_message_that_could_be_of_two_ranks_is_not_guessed(tmp_path: Path) -> None:
    """Both sent to somebody; until the first of them began, the receivers surely waited."""
    sent = [message("send", 300, 800), message("send", 500, 800)]
    ranks = [[step(1, 0, 1000), *own] for own in (*sent, *[message("recv", 100, 800)] * 2)]
    found = load(tmp_path / "unknown", *ranks)
    assert {c.matched_by for c in found.collectives()} == {"alone"}
    assert {c.algorithm_gbps for c in found.collectives()} == {None}
    assert any("4 sends and receives is not known" in note for note in found.warnings)
    assert [r.bubble_us for r in found.breakdown()] == [0, 0, 200, 200]
    # With shapes there is a rank, of a group: 1 of [0, 2] and of [1, 3].
    ranks = [
        [step(1, 0, 1000), *message(kind, begun, 800, peer)]
        for kind, begun, peer in (
            ("send", 300, 1), ("send", 500, 1), ("recv", 100, 0), ("recv", 100, 0),
        )
    ]  # fmt: skip
    found = load(tmp_path / "known", *ranks, groups=[[[0, 2], [1, 3]]] * 4)
    assert [[p.rank for p in c.participants] for c in found.collectives()] == [[0, 2], [1, 3]]
    assert [r.wait_us for r in found.breakdown()] == [0, 0, 200, 400]


# ------------------------------------------------------------------ what messages hide


def test_what_a_rank_does_while_its_messages_travel_is_not_known(tmp_path: Path) -> None:
    """In a ring, rank 1 sleeps before it waits for its messages. Nothing tells that from a wait."""
    ranks: list[list[Event]] = []
    for rank in range(3):
        events = [step(0, 0, 4000)]
        for i in range(4):
            late = 500 if i and (rank == 1 or (rank == 2 and i > 1)) else 0
            at, ends = 1000 * i + late / 2, 1000 * i + (900 if rank == 1 else 300)
            events += message("send", at, ends, (rank + 1) % 3)
            events += message("recv", at + 10, ends, (rank - 1) % 3)
            events.append(operator("aten::mm", at + 20, 100))
        ranks.append(events)
    late = {row.rank: row for row in load(tmp_path, *ranks).lateness()}
    assert late[1].slow is False
    assert "whether it waited for that or did something else first is not known" in late[1].reason


@pytest.mark.parametrize("sleeps", [0, 1500])
def test_a_stage_that_sleeps_is_named_though_it_computes_no_longer(
    tmp_path: Path, sleeps: float
) -> None:
    """Stage 1 sleeps before it sends back; meanwhile stage 0 waits, as the schedule has it."""
    computes = 100 if sleeps else 1600
    back = 200 + computes + sleeps
    zeroth = [step(0, 0, 2000), operator("aten::mm", 0, 100),
              *message("send", 100, 200, 1), *message("recv", 210, back + 50, 1),
              operator("aten::mm", back + 50, 100)]  # fmt: skip
    first = [step(0, 0, 2000), *message("recv", 0, 200, 0),
             operator("aten::mm", 200, computes), *message("send", back, back + 50, 0),
             operator("aten::mm", back + 50, 100)]  # fmt: skip
    found = load(tmp_path, zeroth, first)
    longest = "was busy with itself longest: 1.75" if sleeps else "computed longest: 1.70"
    said = f"In a pipeline, waits do not show who is slow. Rank 1 {longest} ms a step, the other "
    assert report.slow(found).startswith(said)
    assert ("In 1.55 ms of it nothing ran" in report.slow(found)) is bool(sleeps)


def test_a_stage_that_begins_late_is_named(tmp_path: Path) -> None:
    """What the other waits for it is bubble, but not by the schedule."""
    zeroth = [step(0, 0, 5000), operator("aten::mm", 0, 100),
              *message("send", 100, 200, 1), *message("recv", 210, 3300, 1),
              operator("aten::mm", 3300, 100)]  # fmt: skip
    first = [step(0, 3000, 2000), *message("recv", 3000, 3100, 0),
             operator("aten::mm", 3100, 100), *message("send", 3210, 3300, 0)]  # fmt: skip
    found = load(tmp_path, zeroth, first)
    said = "Rank 1 began 3.00 ms later than the others. In a pipeline, waits do not show who is"
    assert report.slow(found).startswith(said)
