"""Plans of model-parallel ranks: their events, how stages are played back, and the rows."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

import axis_bytes
from conftest import deep_unless
from fake_predictor import FakePredictor
from shardlab import config as configs
from shardlab.axes import axes_of
from shardlab.errors import UsageError
from shardlab.launch import environment
from shardlab.measure.estimate import WEIGHED
from shardlab.plan import calibrate, devices, extrapolate, gloo, plan, predict
from shardlab.plan.graph import Cost, Event, Group, Mark, Start, Step, Wait, Work
from shardlab.plan.replay import Lanes, Played, Span, replay
from shardlab.report import plan as report
from shardlab.strategies.pipeline import schedule_analysis, schedules
from shardlab.strategies.pipeline.schedule_analysis import Times
from shardlab.training import builders, loop
from shardlab.world import World

# ------------------------------------------------------------------ schedules, played back


def stages_of(
    name: str, ranks: int, micro: int, times: Times, blocks: int = 0, tensor: int = 1
) -> list[Step]:
    """A step of one rank of each stage by its schedule; ``blocks`` collectives in each action."""
    chunks = schedules.chunks_of(name)
    where = [schedules.rank_of(stage, ranks, name) for stage in range(ranks * chunks)]
    found = []
    for place, actions in enumerate(schedules.schedule(name, ranks, micro)):
        events: list[Event] = []
        called = 0

        def call(*events_of: Any, **more: Any) -> Start:
            nonlocal called
            called += 1
            return Start(called, *events_of, **more)

        for action in actions:
            kind, stage, number = action
            lane = "activation" if kind == "F" else "gradient"
            of, to = (end(action, len(where)) for end in (schedules.source, schedules.target))
            events.append(Mark(schedules.NAMES[kind], stage, number))
            if of is not None and where[of] != place:
                ends = where[of] * tensor, place * tensor
                label = f"{lane} {number} for {stage}"
                events.append(call("recv", 8, Group(ranks), label, among=ends))
                events.append(Wait(called))
            for _ in range(blocks):
                events.append(Work("aten.mm", 1e9, 1e6, phase="forward"))
                events += [call("all_reduce", 1 << 20, Group(tensor), "activations"), Wait(called)]
            events.append(Work("measured", 0, 0, seconds=times.of(kind)))
            if to is not None and where[to] != place:
                ends = place * tensor, where[to] * tensor
                label = f"{lane} {number} for {to}"
                events.append(call("send", 8, Group(ranks), label, among=ends))
        everybody = tuple(rank * tensor for rank in range(ranks))
        events += [Mark(""), call("all_reduce", 8, Group(ranks), "loss", among=everybody)]
        events.append(Wait(called))
        found.append(Step(ranks * tensor, events, samples=micro, rank=place * tensor))
    return found


def played(steps: list[Step], send: float = 0.0) -> Played:
    def cost(start: Start, _is_queued: bool) -> Cost:
        return Cost(send if start.is_message else 0.0)

    return replay(steps, lambda work: work.seconds or 0.0, cost, Lanes())


@pytest.mark.parametrize("micro", [4, 8, 16])
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("name", schedules.SCHEDULES)
def test_the_bubble_is_that_of_the_formula(name: str, ranks: int, micro: int) -> None:
    """Exactly, where messages take no time; where the formula knows their time, with it too."""
    found = played(stages_of(name, ranks, micro, Times()))
    claimed = schedule_analysis.claim(name, ranks, micro, Times()).bubble
    assert found.bubble_s / found.work_s == pytest.approx(claimed, abs=1e-12)
    assert found.wait_s == 0.0
    assert found.step_s == pytest.approx(found.work_s + found.bubble_s)
    times = Times(1.0, 1.0, 1.0, send=0.25)
    claimed = schedule_analysis.claim(name, ranks, micro, times).bubble
    if claimed is not None:
        slower = played(stages_of(name, ranks, micro, times), send=0.25)
        assert slower.step_s / slower.work_s - 1 == pytest.approx(claimed, abs=1e-12)
        assert slower.wait_s > 0  # what travels is communication, and no bubble


def test_times_that_differ_by_stage_are_those_of_the_simulated_schedule() -> None:
    times = [Times(0.5 + 0.3 * stage, 0.7, 0.2 * stage) for stage in range(4)]
    lists = schedules.schedule("1f1b", 4, 6)
    steps = []
    for step, own in zip(stages_of("1f1b", 4, 6, Times()), times, strict=True):
        kinds = {schedules.NAMES[kind]: kind for kind in "FBIW"}
        events = list(step.events)
        for i, event in enumerate(events):
            if isinstance(event, Mark) and event.name:
                kind = kinds[event.name]
            elif isinstance(event, Work):
                events[i] = dataclasses.replace(event, seconds=own.of(kind))
        steps.append(dataclasses.replace(step, events=events))
    expected = schedule_analysis.end(schedule_analysis.timeline(lists, times))
    assert played(steps).step_s == pytest.approx(expected)


def test_messages_of_one_kind_share_their_link() -> None:
    """Three that are sent at once arrive one after another."""
    together: list[Event] = [Start(9, "barrier", 0, Group(2), among=(0, 1)), Wait(9)]
    sends, takes = [*together], [*together]
    for i in range(3):
        send = Start(i, "send", 8, Group(2), f"activation {i}", among=(0, 1))
        sends.append(send)
        takes += [dataclasses.replace(send, op="recv"), Wait(i)]
    steps = [Step(2, sends, rank=0), Step(2, takes, rank=1)]

    def cost(start: Start, _is_queued: bool) -> Cost:
        return Cost(0.5, 0.0, 1.0) if start.is_message else Cost(0.0)

    found = replay(steps, lambda _: 0.0, cost, Lanes())
    waits = [span.end - span.begin for span in found.spans if span.lane == "wait"]
    assert waits == pytest.approx([1.5, 1.0, 1.0])


def test_where_two_ranks_are_decides_what_a_message_takes() -> None:
    machine = predict.DatasheetMachine(devices.machine("h100", "25gbe"), "bf16")

    def step_s(other: int) -> float:
        start = Start(0, "send", 10**8, Group(2), "activation", among=(0, other))
        taken = dataclasses.replace(start, op="recv")
        steps = [Step(16, [start], rank=0), Step(16, [taken, Wait(0)], rank=other)]
        return machine.play(steps).step_s

    assert step_s(7) < 0.001  # NVLink
    # Eight GPUs share 25 Gbit/s, of which NCCL reaches 90%.
    assert step_s(8) == pytest.approx(10**8 / (0.9 * 25e9 / 8 / 8), rel=0.01)


@pytest.mark.parametrize(
    ("ranks", "limit_s"), deep_unless(lambda ranks, _: ranks == 1024, [(1024, 1.0), (16_384, 10.0)])
)
def test_many_ranks_are_played_back_in_seconds(ranks: int, limit_s: float) -> None:
    """tensor=8, pipeline=8 and 32 micro-batches with three blocks on each rank."""
    small, large = (
        [dataclasses.replace(step, world=64 * copies)
         for step in stages_of("1f1b", 8, 32, Times(1e-3, 1e-3, 1e-3), blocks=6, tensor=8)]
        for copies in predict.SMALL_COPIES
    )  # fmt: skip
    begin = time.process_time()
    steps = [extrapolate.at_world(*pair, ranks) for pair in zip(small, large, strict=True)]
    found = predict.DatasheetMachine(devices.machine("h100"), "bf16").play(
        [s for s in steps if s is not None]
    )
    assert time.process_time() - begin < limit_s
    assert found.bubble_s > 0


# ------------------------------------------------------------------ a model's own step


@pytest.fixture(scope="module")
def predictor() -> Iterator[predict.Predictor]:
    with predict.Predictor() as opened:
        yield opened


def tiny(options: dict[str, Any], world: int, micro: int = 4, **more: Any) -> configs.Config:
    return configs.load(
        None,
        {
            "model.size": "tiny", "model.options": {"layers": 4}, "data.source": "synthetic",
            "strategy.name": "zero1", "strategy.options": options, "launch.world": world,
            "training.global_batch": world * micro, **WEIGHED,
            **{key.replace("__", "."): value for key, value in more.items()},
        },
    ).in_parts(micro)  # fmt: skip


def simulated(predictor: predict.Predictor, config: configs.Config) -> list[Step]:
    steps: list[Step] = predictor._simulator.run(config, "cuda", events=True)["steps"]
    return steps


def sent(step: Step) -> axis_bytes.Sent:
    """What the axes of tensor=2 and pipeline=2 send."""
    found: axis_bytes.Sent = {}
    for start in step.starts():
        is_pipeline = bool(start.among) or start.group == Group(2, 2)
        if start.op != "recv" and start.bytes and (is_pipeline or start.group == Group(2)):
            key = f"{'pipeline' if is_pipeline else 'tensor'} {start.op}"
            messages, size = found.get(key, (0, 0))
            found[key] = messages + 1, size + start.bytes
    return found


@pytest.mark.long
def test_the_events_have_the_bytes_that_one_process_claims(predictor: predict.Predictor) -> None:
    """Of both stages of tensor=2, pipeline=2, by one process's shapes."""
    config = tiny({"tensor": 2, "pipeline": 2}, 4, micro=3, training__clip_norm=None)
    axes, _ = axes_of("zero1", config.strategy.options, 4)
    assert axes is not None
    workload = builders.build_workload(config)
    cpu: Any = World(0, 4, 0, torch.device("cpu"), "gloo", None)  # type: ignore[arg-type]
    (microbatches, *_) = loop.Batches(workload, config, cpu)
    for step in simulated(predictor, config):
        model = workload.make_model()
        size = dict(model.named_parameters())["wte.weight"].numel() * 4
        blocks = [f"blocks.{i}" for i in range(4)]
        tied = [((0, 1), {"wte.weight": size // 2})]
        place = axis_bytes.Place(axes, axes.place(step.rank), blocks, [1, 3], tied)
        claimed = axis_bytes.of_step(
            model, place, workload.loss, microbatches, workload.splits_of(model)
        )
        assert sent(step) == claimed
        assert step.rank in (0, 2)
        for start in step.starts():
            assert not start.is_message or start.among in ((0, 2), (2, 0))


SCHEDULES = [{"pipeline": 2}, {"pipeline": 2, "schedule": "interleaved"},
             {"pipeline": 2, "schedule": "zero_bubble"},
             {"pipeline": 2, "tensor": 2}]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(
    "options", deep_unless(lambda options: len(options) == 1, SCHEDULES), ids=str
)
def test_many_micro_batches_follow_from_few(
    options: dict[str, Any], predictor: predict.Predictor
) -> None:
    config = tiny(options, 2 * options.get("tensor", 1), micro=7)
    axes, _ = axes_of("zero1", options, config.launch.world or 1)
    assert extrapolate.fewest_micro("zero1", axes, 7) < 7
    direct = simulated(predictor, config)
    grown = predictor._simulated(config, "cuda")
    machine = predict.DatasheetMachine(devices.machine("h100"), "fp32")
    assert machine.play(grown).step_s == pytest.approx(machine.play(direct).step_s, rel=1e-9)
    for one, other in zip(direct, grown, strict=True):
        works = [[(w.name, w.shapes) for w in step.works()] for step in (one, other)]
        assert works[0] == works[1]
        messages = [Counter((s.op, s.label, s.bytes, s.among) for s in step.starts())
                    for step in (one, other)]  # fmt: skip
        assert messages[0] == messages[1]
        assert other.peak_bytes == pytest.approx(one.peak_bytes, rel=0.02)  # but for the batch
        assert (one.samples, one.tokens) == (other.samples, other.tokens)


AXES: list[tuple[dict[str, Any], int]] = [
    ({}, 1024), ({"tensor": 2}, 1024), ({"pipeline": 2, "context": 2}, 4), ({"context": 2}, 4),
    ({"tensor": 2, "sequence": True}, 4), ({"tensor": 2, "pipeline": 2}, 1024),
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "world"), deep_unless(lambda *case: case in AXES[:3], AXES), ids=str
)
def test_predictions_of_every_axis(
    options: dict[str, Any], world: int, predictor: predict.Predictor
) -> None:
    """1,024 ranks follow from few; the parts add up; a slow rank, a link and overlap count."""
    config = tiny(options, world)
    found = predictor.predict(config, "h100", "ndr")
    assert found.step_s == pytest.approx(found.work_s + found.wait_s + found.bubble_s)
    assert (found.bubble_s > 0) == ("pipeline" in options)
    assert found.samples == 4 * world
    assert not found.is_measured
    interval = (0.7 * found.step_s, (1.57 if options else 1.55) * found.step_s)
    assert (found.low_s, found.high_s) == pytest.approx(interval)
    parts = plan.parts(found)
    assert sum(parts.values()) == pytest.approx(found.step_s)
    assert min(parts["forward"], parts["backward"], parts["update"]) > 0
    changes = predict.WhatIf(slow_rank=2.0), predict.WhatIf(bandwidth=0.01)
    slow, starved = (predictor.predict(config, "h100", "ndr", change) for change in changes)
    assert slow.work_s > 1.5 * found.work_s
    assert (starved.step_s > found.step_s) == (world > 8)  # eight are on a node
    exposed = predictor.predict(config, "h100", "ndr", predict.WhatIf(overlap=False))
    assert exposed.step_s > 0.99 * found.step_s


@pytest.mark.long
def test_a_memory_that_is_a_lower_bound_is_noted(predictor: predict.Predictor) -> None:
    models = Path(__file__).parents[2] / "benchmarks" / "kernel_models.py"
    config = configs.load(None, {"model.workload": f"{models}:lstm", "launch.world": 1})
    (note,) = predictor.predict(config, "h100").notes
    assert note == "memory is a lower bound: what lstm takes for itself is not known here"


@pytest.mark.long
def test_pytorchs_tensor_parallelism_sends_what_ours_does(predictor: predict.Predictor) -> None:
    """DTensor's collectives are operators where tensors have no content."""
    ours, theirs = (
        simulated(predictor, tiny({}, 2, micro=1, strategy__name=name))[0]
        for name in ("tensor_parallel", "pytorch_tensor_parallel")
    )
    of_blocks = 4 * 4 * 2 * 64 * 64 * 4  # four in each of four blocks, of two samples
    for step in (ours, theirs):
        sums = [s for s in step.starts() if s.op == "all_reduce" and s.bytes == 2 * 64 * 64 * 4]
        assert sum(s.bytes for s in sums) >= of_blocks
        assert {s.group for s in sums} == {Group(2)}
        assert {s.call for s in sums} <= {e.call for e in step.events if isinstance(e, Wait)}
    assert not [work for work in theirs.works() if "c10d" in work.name]


@pytest.mark.parametrize(
    ("options", "device", "message"),
    [
        ({"tensor": 4}, "h100", "has 2 heads, which 4 ranks cannot share evenly"),
        ({"pipeline": 8}, "h100", "4 blocks"),
        ({"pipeline": 2, "balance": "time"}, "h100", "an estimate runs nothing that takes time"),
    ],
)
def test_what_cannot_be_planned_says_why_in_a_line(
    options: dict[str, Any], device: str, message: str, predictor: predict.Predictor
) -> None:
    with pytest.raises(UsageError) as refusal:
        predictor.predict(tiny(options, 8), device)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_stages_that_share_cores_are_refused(
    predictor: predict.Predictor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that waits leaves its core to others, and no plan knows that."""
    config = tiny({"pipeline": 2}, 8).with_overrides({"launch.device": "cpu"})
    monkeypatch.setattr(environment, "usable_cores", lambda: 4)
    with pytest.raises(UsageError, match=r"no plan of 8 ranks on 4 cores .* as in --link 1gbit"):
        predictor.predict(config, "this")


@pytest.fixture
def two_cores(
    predictor: predict.Predictor, monkeypatch: pytest.MonkeyPatch
) -> Callable[[dict[str, Any], int], predict.Prediction]:
    """Plans for a machine of two cores, on which every message takes a millisecond."""
    keys = ("wall_s", "host_s", "queued_wall_s", "queued_host_s")
    prices = gloo.measured([
        {"op": op, "bytes": size, **dict.fromkeys(keys, 1e-3)}
        for op in gloo.OPS for size in (256, 2**24)
    ])  # fmt: skip
    monkeypatch.setattr(calibrate, "this_machine", lambda: gloo.Gloo(prices, prices))
    monkeypatch.setattr(environment, "usable_cores", lambda: 2)
    return lambda options, world: predictor.predict(tiny(options, world, launch__device="cpu"))


@pytest.mark.long
def test_plans_for_this_machine(two_cores: Callable[..., predict.Prediction]) -> None:
    tensor, line = (two_cores({axis: 2}, 2) for axis in ("tensor", "pipeline"))
    # There and back through four blocks, for each of four micro-batches, nothing is hidden.
    assert tensor.wait_s >= 4 * 4 * 4 * 1e-3
    assert tensor.bubble_s == 0
    assert line.bubble_s > 0
    assert line.wait_s < tensor.wait_s
    assert line.step_s == pytest.approx(line.work_s + line.wait_s + line.bubble_s)
    assert {span.rank for span in line.spans} == {0, 1}
    assert all(found.is_measured for found in (tensor, line))


@pytest.mark.deep
def test_ranks_that_share_cores_have_a_wider_interval(
    two_cores: Callable[..., predict.Prediction],
) -> None:
    tensor, crowded = (two_cores({"tensor": 2}, world) for world in (2, 4))
    width = [found.high_s / found.step_s for found in (tensor, crowded)]
    assert width[1] - 1 > 1.5 * (width[0] - 1)
    assert "ranks that share both cores and a model were seldom measured" in crowded.notes
    context = two_cores({"context": 2}, 2)
    assert context.wait_s > context.bubble_s == 0


# ------------------------------------------------------------------ rows, table and page


class Line(FakePredictor):
    """A pipeline on ranks 0 and 1 beside the strategies of ``FakePredictor``."""

    def predict(self, config: configs.Config, *args: Any, **more: Any) -> predict.Prediction:
        if config.strategy.name != "pipeline_1f1b":
            return super().predict(config, *args, **more)
        alone = structs.replace(config, strategy=configs.StrategyConfig("zero3"))
        found = super().predict(alone, *args, **more)
        step = found.work_s + found.wait_s
        both = [
            Span("work", "forward 0, stage 0", 0.0, step / 3, 0),
            Span("work", "input gradient 0, stage 0", step / 3, found.work_s, 0),
            Span("comm", "gradient of micro-batch 0 from stage 1 for stage 0", 0.0, 0.01, 0),
            Span("work", "backward 0, stage 1", 0.0, found.work_s, 1),
            Span("bubble", "activation", found.work_s, step + 0.1, 1),
        ]
        return dataclasses.replace(found, step_s=step + 0.1, bubble_s=0.1, spans=tuple(both))


def asked(**more: Any) -> dict[str, Any]:
    config = configs.load(None, {"training.micro_batch": 8})
    specs = ("zero1", "pipeline_1f1b:pipeline=2", "zero1:tensor=3")
    question = plan.Question(config, specs, (16,), ("h100",), **more)
    return plan.plan(question, Line(rate=8e9), "shardlab plan")


def test_rows_of_a_pipeline() -> None:
    found = asked()
    zero1, line, refused = found["rows"]
    assert zero1["bubble_s"] == 0.0
    assert line["work_s"] + line["exposed_s"] + line["bubble_s"] == pytest.approx(line["step_s"])
    assert line["parts_s"]["bubble"] == 0.1
    assert line["parts_s"]["forward"] < line["parts_s"]["backward"]
    assert refused["status"] == "skipped"
    assert "16 ranks cannot be tensor 3" in refused["reason"]
    # 16 ranks with 8 samples each; two that share a model work on the same 16.
    assert (line["global_batch"], line["accumulate"]) == (128, 1)
    assert [one["row"] for one in found["explained"]] == [0, 1]  # the choice, and the pipeline
    (gradient,) = found["explained"][1]["collectives"]
    assert (gradient["name"], gradient["count"]) == ("gradient", 1)


def test_the_work_of_each_stage_and_what_a_cut_costs(capsys: pytest.CaptureFixture[str]) -> None:
    """A bubble beyond the formula's explains itself: one stage works longer. So does an axis."""
    found = asked()
    zero1, line, _ = found["rows"]
    assert [(rank["rank"], rank["stages"]) for rank in line["ranks"]] == [(0, [0]), (1, [1])]
    for part, spans in (("work_s", "work"), ("bubble_s", "bubble")):
        for rank in line["ranks"]:
            own = [end - begin for lane, _, begin, end, who in found["explained"][1]["spans"]
                   if (lane, who) == (spans, rank["rank"])]  # fmt: skip
            assert rank[part] == pytest.approx(sum(own))
    assert line["even_bubble"] == pytest.approx(1 / 2)  # one micro-batch, two stages
    assert line["against"]["row"] == 0
    assert line["against"]["step_s"] == pytest.approx(line["step_s"] - zero1["step_s"])
    parts = (line["against"][part] for part in ("work_s", "exposed_s", "bubble_s"))
    assert sum(parts) == pytest.approx(line["against"]["step_s"])
    assert zero1["against"] is None

    def rank(number: int, seconds: float) -> dict[str, Any]:
        parts = {"work_s": seconds, "exposed_s": 0.0, "bubble_s": 0.3 - seconds}
        return {"rank": number, "stages": [number], "collectives": 1, **parts}

    line |= {"ranks": [rank(0, 0.1), rank(1, 0.3)], "work_s": 0.2, "bubble_s": 0.1,
             "step_s": 0.3, "even_bubble": 1 / 9}  # fmt: skip
    line["against"] |= {"flops": 1.0, "pointwise_bytes": 1.5}
    report.show(found, {})
    out = " ".join(capsys.readouterr().out.split())
    assert (
        "a bubble of 33%; with stages of equal work it would be 11%. Rank 1 works 300 ms, " in out
    )
    assert "the mean is 200 ms: it has the head and the loss." in out
    assert "beside zero1: step 197 ms → 300 ms: work 160 ms → 200 ms, " in out
    assert "2 → 1 collective." in out
    assert "touch 1.50 times the bytes: ranks that share a model repeat work." in out


def test_the_table_and_the_page_of_a_pipeline(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    found = asked()
    report.show(found, {}, explain=True)
    out = capsys.readouterr().out
    assert "bubble" in out.splitlines()[3]
    assert "pipeline_1f1b (pipeline=2), 16 ranks on h100" in out
    html = report.html(found)
    assert "bubble: other stages were not there yet" in html
    assert "The step of each stage" in html
    (_, line) = report.timelines(found)
    lanes = [(lane["rank"], lane["lane"]) for lane in line[1]["lanes"]]
    assert lanes == [(0, "compute"), (0, "comm"), (1, "bubble"), (1, "compute")]
    alone = plan.plan(
        plan.Question(configs.load(None, {}), ("zero1",), (16,), ("h100",)), FakePredictor(), ""
    )
    assert "ubble" not in report.html(alone).partition("<main")[2].partition("<script")[0]


def test_a_choice_between_equals_does_not_cut_the_model() -> None:
    row = {"strategy": "zero1", "label": "zero1", "options": {}, "world": 8, "step_s": 1.0,
           "low_s": 0.7, "high_s": 1.5, "samples_per_s": 8.0, "tokens_per_s": None, "fits": True,
           "place": "h100"}  # fmt: skip
    cut = {**row, "label": "zero1 (tensor=2)", "options": {"tensor": 2}, "samples_per_s": 8.1}
    from shardlab.plan import advice

    assert advice.chosen_by([cut, row], "place") == [1]


def test_advice_where_nothing_fits_names_the_axes() -> None:
    config = configs.load(None, {"training.micro_batch": 8})
    question = plan.Question(config, ("zero1", "zero3"), (8,), ("h100",))
    answer = plan.plan(question, FakePredictor(state=900e9), "")["answer"]
    assert any("try zero1:tensor=8 or zero1:pipeline=8" in line for line in answer["otherwise"])
