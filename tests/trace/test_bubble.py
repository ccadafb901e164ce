"""Traces of pipelines: a bubble is neither communication nor a slow rank; actions have names."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import browser
import people
from chrome_trace import GLOO, Event, load, operator, parts, span, step
from conftest import GetRanks, deep_unless
from shardlab import config as configs
from shardlab import trace as traces
from shardlab.report import timeline, trace_terminal
from shardlab.report import trace as report
from shardlab.strategies.pipeline import schedule_analysis, schedules
from shardlab.workloads.base import Workload, classification_loss

# ------------------------------------------------------------------ known answers


LABELS = (
    "activation of micro-batch 0 from stage 0 for stage 1",
    "gradient of micro-batch 0 from stage 1 for stage 0",
)


def message(seq: int, op: str, ends: str, begun: float, waited: tuple[float, float]) -> list[Event]:
    """A message as our executor leaves it in a trace over Gloo: begun, and waited for later."""
    label = f"#{seq} {LABELS[seq]} (ranks {ends})"
    return [
        span(f"shardlab::{op} {label}", begun, 10),
        operator(f"c10d::{op}{'_' if op == 'recv' else ''}", begun + 1, 6),
        span(f"gloo:{op}", begun + 7, waited[1] - begun - 7),
        span(f"shardlab::wait:{op} {label}", waited[0], waited[1] - waited[0]),
    ]


def work(kind: str, micro: int, stage: int, begin: float, end: float) -> list[Event]:
    return [
        span(f"shardlab::{kind} {micro}, stage {stage}", begin, end - begin),
        operator("aten::mm", begin, end - begin),
    ]


def first_rank() -> list[Event]:
    """Forward until 200, sent at 200; then it waits for the gradient, which is sent at 600 and
    there at 650; backward until 800."""
    return [
        step(1, 0, 1000), span("shardlab::pipeline", 0, 900),
        *work("forward", 0, 0, 0, 200),
        *message(0, "send", "0>1", 200, (650, 660)),
        *message(1, "recv", "1>0", 210, (220, 650)),
        *work("backward", 0, 0, 660, 800),
    ]  # fmt: skip


def last_rank() -> list[Event]:
    """It waits for the activation from 10 to 240, works until 600, and sends at 600."""
    return [
        step(1, 0, 1000), span("shardlab::pipeline", 0, 900),
        *message(0, "recv", "0>1", 0, (10, 240)),
        *work("forward", 0, 1, 240, 400),
        *work("backward", 0, 1, 400, 600),
        *message(1, "send", "1>0", 600, (650, 655)),
    ]  # fmt: skip


@pytest.fixture
def pipeline(tmp_path: Path) -> traces.TraceSet:
    return load(tmp_path, first_rank(), last_rank())


def test_what_a_neighbour_has_not_made_yet_is_bubble(pipeline: traces.TraceSet) -> None:
    """Until the neighbour begins to send it is bubble, from then on communication."""
    first, last = pipeline.breakdown()
    # Communication: 49 of the gradient on its way, 10 until the send was let go, 12 of calls.
    assert parts(first) == {
        "compute": 340, "bubble": 601 - 220, "exposed_comm": 49 + 10 + 12, "idle_host": 208
    }  # fmt: skip
    assert parts(last) == {
        "compute": 360, "bubble": 201 - 10, "exposed_comm": 39 + 5 + 12, "idle_host": 393
    }  # fmt: skip
    assert pipeline.stragglers() == ()  # nobody is slow: the schedule has it so
    assert "pipeline bubble" in report.verdict(pipeline)
    sent = [row for row in pipeline.collectives() if row.matched_by == "message"]
    assert [(row.kind, row.label, row.last_rank, row.bubble) for row in sent] == [
        ("send", LABELS[0], 0, True), ("send", LABELS[1], 1, True)
    ]  # fmt: skip
    assert [row.transfer_us for row in sent] == [39, 49]
    [by_label, _] = pipeline.collective_summary(by="label")
    assert by_label.name == "send gradient from stage 1 for stage 0"
    free = {row.question: row.step_us for row in pipeline.what_if()}["there were no bubble"]
    assert free == 1000 - 191


def test_the_end_of_the_schedule_is_bubble_and_a_late_rank_inside_an_action_is_not(
    tmp_path: Path,
) -> None:
    """The same collective, launched after the last action and inside one."""

    def rank(arrives: float, inside: bool) -> list[Event]:
        return [
            step(1, 0, 1000), span("shardlab::pipeline", 0, 1000),
            span("shardlab::forward 0, stage 0", 0, 900 if inside else 90),
            span("shardlab::all_reduce #0 loss of the last stage", arrives - 20, 10),
            operator("c10d::allreduce_", arrives - 18, 6),
            span("gloo:all_reduce", arrives, 800 - arrives, GLOO),
        ]  # fmt: skip

    for inside, part in ((False, "bubble"), (True, "wait")):
        found = load(tmp_path / part, rank(120, inside), rank(700, inside))
        waited = parts(found.breakdown()[0])
        assert waited.pop(part) == 580
        assert waited.keys() == {"exposed_comm", "idle_host"}


def test_one_ranks_trace_cannot_tell_a_bubble(tmp_path: Path) -> None:
    found = load(tmp_path, first_rank(), None)
    [row] = found.breakdown()
    assert row.bubble_us == 0
    assert row.exposed_comm_us == 430 + 10 + 12
    assert any("cannot be known" in warning for warning in found.warnings)


def test_replicas_with_the_same_labels_are_told_apart(tmp_path: Path) -> None:
    """Ranks 2 and 3 are another pipeline, in which all is later by 100."""

    def later(events: list[Event]) -> list[Event]:
        moved = [e | {"ts": e["ts"] + 100 * ("Profiler" not in e["name"])} for e in events]
        swap = {"(ranks 0>1)": "(ranks 2>3)", "(ranks 1>0)": "(ranks 3>2)"}
        for e, (old, new) in itertools.product(moved, swap.items()):
            e["name"] = e["name"].replace(old, new)
        return moved

    pipes = first_rank(), last_rank()
    found = load(tmp_path, *pipes, *map(later, pipes))
    bubbles = [row.bubble_us for row in found.breakdown()]
    assert bubbles == [381, 191, 381, 191]


def test_the_terminal_and_the_page_show_the_same_numbers(
    pipeline: traces.TraceSet, chromium: browser.Browser, tmp_path: Path
) -> None:
    table = trace_terminal._breakdown(pipeline)
    heads = [str(column.header) for column in table.columns]
    shown = list(table.columns[heads.index("bubble")].cells)
    assert shown == ["0.381 38%", "0.191 19%"]
    lanes = {(lane["rank"], lane["lane"]) for lane in timeline.timeline(pipeline)["lanes"]}
    assert {(0, "actions"), (1, "actions"), (0, "bubble"), (1, "bubble")} <= lanes
    names = timeline.timeline(pipeline)["names"]
    assert {"forward 0, stage 0", "backward 0, stage 1"} <= set(names)
    report.write_html(tmp_path / "page.html", pipeline)
    with chromium.page(tmp_path / "page.html") as page:
        # Micro-batch 0 has a hue: forward, and backward.
        assert {"178,56,56", "128,40,40"} <= page.colours("timeline")
        page.click("#search")
        page.type("forward 0, stage 1")
        assert page.run("found.textContent").startswith("1 span")
        heads = page.run("[...document.querySelectorAll('#breakdown th')].map(h => h.innerText)")
        cells = page.run(
            "[...document.querySelectorAll('#breakdown tbody tr')].map("
            f"r => r.cells[{heads.index('Bubble')}].innerText)"
        )
        assert cells == ["0.381", "0.191"]
        assert "Pipeline bubble" in page.run("document.body.innerText")
        assert page.problems == []


def test_traces_without_a_pipeline_have_no_such_column(tmp_path: Path) -> None:
    found = load(tmp_path, [step(1, 0, 100), operator("aten::mm", 0, 50)])
    heads = [str(column.header) for column in trace_terminal._breakdown(found).columns]
    assert "bubble" not in heads
    assert "Bubble" not in report.html(found)
    assert found.breakdown()[0].bubble_us == 0


# ------------------------------------------------------------------ real ranks

NAP_S = 0.02


class Nap(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        time.sleep(NAP_S)
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:
        time.sleep(2 * NAP_S)
        return gradient


class Sleeper(nn.Module):
    """A block that sleeps, so that four ranks fit on two cores."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        return Nap.apply(self.layer(x))


def stages() -> nn.Module:
    return nn.Sequential(*(Sleeper() for _ in range(8)))


def sleepers() -> Workload:
    data = people.Samples(torch.ones(64, 8), torch.zeros(64, dtype=torch.int64))
    blocks = tuple(map(str, range(8)))
    return Workload("sleepers", stages, classification_loss, data, blocks=blocks)


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.parametrize(
    "strategy",
    deep_unless(
        lambda strategy: strategy == "pipeline_1f1b",
        ["pipeline_1f1b", "pipeline_interleaved", "pytorch_pipeline"],
    ),
)
def test_the_bubble_of_a_trace_is_the_schedules(
    strategy: str, ranks: GetRanks, tmp_path: Path
) -> None:
    """Against the formula for messages that take no time; PyTorch's are in its bubble."""
    micro, name = 8, strategy.removeprefix("pipeline_").replace("pytorch_pipeline", "1f1b")
    values: dict[str, Any] = {
        "model.workload": f"{__file__}:sleepers", "strategy.name": strategy,
        "launch.world": 4, "launch.device": "cpu", "training.steps": 2,
        "training.global_batch": micro, "training.micro_batch": 1, "profile.enabled": True,
        "profile.wait": 0, "profile.active": 1,
    }  # fmt: skip
    if strategy == "pytorch_pipeline":
        values["strategy.options"] = {"schedule": name}
    promised = schedule_analysis.claim(name, 4, micro, schedule_analysis.Times(1, 1, 1)).bubble
    assert promised is not None
    errors = []
    for attempt in range(3):  # something else on the machine may hold up a rank
        values["output.dir"] = str(tmp_path / f"run{attempt}")
        ranks(4).run(
            "shardlab.training.run:train_rank",
            configs.load(None, values),
            "a test",
            deadline_s=60,
        )
        found = traces.load(tmp_path / f"run{attempt}")
        rows = found.breakdown(per="rank")
        bubble, compute = (sum(getattr(r, n) for r in rows) for n in ("bubble_us", "compute_us"))
        errors.append(bubble / compute - promised)
        if -0.03 < errors[-1] < (0.2 if strategy == "pytorch_pipeline" else 0.03):
            break
    else:
        raise AssertionError(errors)
    # Each rank's actions are the schedule's, in its order.
    lanes = [lane for lane in timeline._lanes(found) if lane.lane == "actions"]
    kinds = {"F": "forward", "B": "backward"}
    lists = schedules.schedule(name, 4, micro)
    for lane, actions in zip(lanes, lists, strict=True):
        wanted = [f"{kinds[a.kind]} {a.micro}, stage {a.stage}" for a in actions]
        assert list(lane.names) == wanted
