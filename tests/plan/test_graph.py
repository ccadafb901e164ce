"""The step as events: what a strategy's own code computes, sends and waits for, without peers.

Simulated, with tensors that have no content; and measured on this machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import deep_unless
from shardlab import config as configs
from shardlab.errors import UsageError
from shardlab.measure import simulate
from shardlab.measure.estimate import WEIGHED, Simulator
from shardlab.naming import STRATEGIES
from shardlab.plan.claims import CLAIMS, Job
from shardlab.plan.emulate import fill, typical
from shardlab.plan.graph import Event, Group, Start, Step, Wait, Work
from shardlab.proof.subjects import Subject
from shardlab.specs import parse_spec
from shardlab.strategies.pipeline.executor import Executor
from shardlab.training import builders

TINY = {
    "model.size": "tiny",
    "data.source": "synthetic",
    "training.global_batch": 8,
    "training.micro_batch": 2,
}
WORKERS = ("local_sgd", "diloco", "streaming_diloco")  # they send in some steps only
ALIKE = [strategy for strategy in STRATEGIES if strategy not in WORKERS]
MECHANISMS = ("simple_ddp", "bucket_ddp_async", "zero1", "zero3", "pytorch_ddp", "pytorch_zero3")
MESSAGES = 200  # bytes, at most: numbers of targets, losses, masks


@pytest.fixture(scope="module")
def simulator() -> Iterator[Simulator]:
    with Simulator() as opened:
        yield opened


def config_of(strategy: str, world: int, **values: Any) -> configs.Config:
    world = 1 if strategy == "single" else world
    more = {"strategy.name": strategy, "launch.world": world, "training.global_batch": 4 * world}
    return configs.load(None, {**TINY, **more, **values})


def step_of(
    simulator: Simulator, strategy: str, world: int = 2, device: str = "cpu", **values: Any
) -> Step:
    config = config_of(strategy, world, **WEIGHED, **values)
    found: Step = simulator.run(config, device, events=True)["steps"][0]
    return found


def moved(step: Step) -> Counter[str]:
    return Counter(
        {
            op: sum(s.bytes for s in step.starts() if s.op == op and s.bytes > MESSAGES)
            for op in {s.op for s in step.starts()}
        }
    )


def place(step: Step, event: Event) -> int:
    return list(step.events).index(event)


def end_of(step: Step, phase: str) -> int:
    return max(i for i, e in enumerate(step.events) if isinstance(e, Work) and e.phase == phase)


def job_of(world: int) -> Job:
    """The claims' view of the tiny GPT-2 on so many ranks, with two micro-batches each."""
    config = config_of("single", 1)
    steps: Any = [[[None, None]] * world]
    return Subject(builders.build_workload(config), 0, steps, torch.float32).job(config)


@pytest.mark.long
@pytest.mark.parametrize(
    ("strategy", "world"),
    deep_unless(
        lambda strategy, world: strategy in MECHANISMS and (world == 2 or strategy == "zero3"),
        [(strategy, world) for strategy in ALIKE for world in (2, 64)],
    ),
)
def test_every_strategy_sends_what_it_claims_and_waits_once(
    strategy: str, world: int, simulator: Simulator
) -> None:
    small = strategy in ("pytorch_ddp", "pytorch_zero1")  # its buckets would hold the whole model
    options = {"strategy.options": {"bucket_mb": 0.1}} if small else {}
    step = step_of(simulator, strategy, world, **options)
    ranks = 1 if strategy == "single" else world
    claim, job = CLAIMS[strategy], job_of(ranks)
    if ranks > 1:
        claimed = {op: size(job) for op, size in claim.moved.items() if size(job)}
        found = {op: size for op, size in moved(step).items() if size}
        assert found == pytest.approx(claimed, rel=0.02)  # parts are padded to equal sizes
    assert step.world == ranks
    assert (step.samples, step.tokens) == (4 * ranks, 64 * 4 * ranks)
    assert sorted(e.call for e in step.events if isinstance(e, Wait)) == [
        s.call for s in sorted(step.starts(), key=lambda s: s.call)
    ]
    if claim.overlap == "some":
        large = [s for s in step.starts() if s.bytes > MESSAGES]
        assert place(step, large[0]) < end_of(step, "backward")


def test_the_work_is_that_of_a_gpt(simulator: Simulator) -> None:
    step = step_of(simulator, "single")
    forward = sum(w.flops for w in step.works() if w.phase == "forward")
    # Attention's backward multiplies five matrices to its forward's two.
    attention = sum(w.flops for w in step.works() if w.phase == "forward" and "dot" in w.name)
    assert step.flops == pytest.approx(3 * forward + 0.5 * attention)
    sizes = {"layers": 2, "dim": 64, "vocab": 256}
    weights = 12 * sizes["layers"] * sizes["dim"] ** 2 + sizes["vocab"] * sizes["dim"]
    assert forward - attention == pytest.approx(2 * weights * step.tokens)
    names = {w.name for w in step.works()}
    assert {"aten.mm", "aten.addmm", "aten.gelu"} <= names
    assert not names & {"aten.view", "aten.t", "aten.transpose", "aten.detach", "prim.device"}
    (first,) = {w.shapes for w in step.works() if w.name == "aten.gelu"}
    assert first == "f32[2,64,256]"
    gelu = next(w for w in step.works() if w.name == "aten.gelu")
    assert gelu.bytes == 2 * 2 * 64 * 256 * 4


def test_a_gather_left_under_way_is_waited_for_in_the_next_step(simulator: Simulator) -> None:
    step = step_of(simulator, "zero1")
    events = list(step.events)
    gathers = [s.call for s in step.starts() if s.op == "all_gather"]
    first_forward = next(i for i, e in enumerate(events) if isinstance(e, Work) and e.phase)
    assert gathers
    assert all(events.index(Wait(call)) < first_forward for call in gathers)


@pytest.mark.long
def test_a_wait_comes_at_once_where_the_strategy_waits(simulator: Simulator) -> None:
    def waits_at_once(step: Step) -> set[bool]:
        pairs = zip(step.events, step.events[1:], strict=False)
        large = [(a, b) for a, b in pairs if isinstance(a, Start) and a.bytes > MESSAGES]
        return {b == Wait(a.call) for a, b in large}

    assert waits_at_once(step_of(simulator, "simple_ddp_hook")) == {True}
    assert False in waits_at_once(step_of(simulator, "simple_ddp_async"))
    # FSDP's gathers run beside the computation on a GPU, and one by one over Gloo.
    assert waits_at_once(step_of(simulator, "pytorch_zero3")) == {True}
    assert False in waits_at_once(step_of(simulator, "pytorch_zero3", device="cuda"))


@pytest.mark.long
def test_fsdp_on_a_gpu_gathers_the_next_block_while_it_computes(simulator: Simulator) -> None:
    step = step_of(simulator, "pytorch_zero3", device="cuda")
    events = list(step.events)
    gathers = [s for s in step.starts() if s.op == "all_gather"]
    beside = [events[events.index(s) : events.index(Wait(s.call))] for s in gathers]
    hidden = [any(isinstance(e, Work) and e.flops for e in between) for between in beside]
    assert sum(hidden) >= len(gathers) // 2


@pytest.mark.long
def test_groups_have_a_stride(simulator: Simulator) -> None:
    step = step_of(simulator, "pytorch_hsdp", 8, **{"strategy.options": {"shards": 4}})
    groups = {s.op: (s.group.size, s.group.stride) for s in step.starts() if s.bytes > MESSAGES}
    assert groups == {"all_gather": (4, 1), "reduce_scatter": (4, 1), "all_reduce": (2, 4)}


@pytest.mark.long
def test_events_are_only_noted_if_asked_for(simulator: Simulator) -> None:
    assert "steps" not in simulator.run(config_of("single", 1, **WEIGHED), "cpu")


@pytest.mark.parametrize("strategy", WORKERS)
def test_steps_that_differ_have_no_plan(strategy: str, simulator: Simulator) -> None:
    with pytest.raises(UsageError, match="exchange every 10 steps"):
        step_of(simulator, strategy)


@pytest.mark.long
def test_a_recurrent_layer_computes(simulator: Simulator) -> None:
    """Its operator is the whole layer, which PyTorch's counter passes over."""
    models = Path(__file__).parents[2] / "benchmarks" / "kernel_models.py"
    model = {"model.workload": f"{models}:lstm", "model.size": None, "data.source": "auto"}
    step = step_of(simulator, "single", **model)
    matrices = 4 * 256 * (256 + 256)
    assert step.flops == 3 * 2 * 4 * 128 * matrices  # 4 samples, 128 long


# ------------------------------------------------------------------ measured on this machine


def emulated(simulator: Simulator, config: configs.Config, *more: Any) -> Step:
    here = config.with_overrides({"launch.device": "cpu"})
    step: Step = simulator.ask("shardlab.plan.emulate:emulate", 60.0, here, 0.1, *more)
    return step


def between(step: Step) -> list[Event]:
    return [event for event in step.events if not isinstance(event, Work)]


PLANS = ("bucket_ddp_async", "zero3", "zero1:tensor=2", "context_parallel", "pipeline_1f1b")


@pytest.mark.long
@pytest.mark.parametrize(
    "spec",
    deep_unless(
        lambda spec: spec in PLANS,
        [*PLANS, "zero1", "pytorch_zero1", "pytorch_zero3", "tensor_parallel",
         "sequence_parallel", "zero3:context=2", "pipeline_zero_bubble",
         "zero1:tensor=2:pipeline=2", "pytorch_tensor_parallel", "pytorch_pipeline",
         "pytorch_hsdp:shards=2"],
    ),
)  # fmt: skip
def test_it_sends_and_waits_as_the_simulation(spec: str, simulator: Simulator) -> None:
    """Each stage its own messages; every tensor that would have come is filled with numbers."""
    name, options = parse_spec(spec)
    config = config_of(name, 4 if options else 2, **{"strategy.options": options})
    simulated = simulator.run(config.with_overrides(WEIGHED), "cpu", events=True)["steps"]
    ranks = [step.rank for step in simulated]
    assert len(ranks) == (2 if "pipeline" in spec else 1)
    for rank, expected in zip(ranks, simulated, strict=True):
        step = emulated(simulator, config, None, rank, ranks if len(ranks) > 1 else [])
        assert between(step) == between(expected)
        assert (step.rank, step.world) == (rank, expected.world)
        assert (step.samples, step.tokens) == (expected.samples, expected.tokens)
        assert all(work.seconds is not None and work.seconds >= 0 for work in step.works())
        assert len(step.totals_s) >= 5
        total = sum(work.seconds or 0.0 for work in step.works())
        assert min(step.totals_s) <= total <= max(step.totals_s)
        assert {work.phase for work in step.works()} >= {"forward", "backward", "update"}


@pytest.mark.long
def test_ddp_lays_out_its_buckets_as_the_simulation_says(simulator: Simulator) -> None:
    config = config_of("pytorch_ddp", 4, **{"strategy.options": {"bucket_mb": 0.1}})
    simulated = simulator.run(config.with_overrides(WEIGHED), "cpu", events=True)["steps"][0]
    # DDP fills buckets in the order in which the first step's gradients came: nearly the reverse of
    # the parameters' order.
    found = [s.bytes for s in emulated(simulator, config).starts() if s.bytes > 1000]
    assert len(found) == sum(s.bytes > 1000 for s in simulated.starts())
    assert sum(found) == sum(s.bytes for s in simulated.starts() if s.bytes > 1000)


@pytest.mark.long
def test_buckets_are_those_of_the_link_that_is_planned_for(simulator: Simulator) -> None:
    """Over a slow link that costs no core, smaller buckets hide more."""
    config = config_of("bucket_ddp_async", 2, **{"model.size": "mini"})
    links = (1e-4, 1e-10, 1.0), (1e-4, 8e-9, 0.0)
    few, many = (emulated(simulator, config, link) for link in links)
    assert len(list(few.starts())) < len(list(many.starts()))
    both = [sum(start.bytes for start in step.starts()) for step in (few, many)]
    assert both[0] == pytest.approx(both[1], rel=0.01)


@pytest.mark.long
def test_a_collective_takes_no_time(simulator: Simulator) -> None:
    """Hundreds of ranks' parts are filled in, which takes longer than the rank's own work."""
    few, many = (emulated(simulator, config_of("zero3", world)) for world in (2, 256))
    assert min(many.totals_s) < 10 * min(few.totals_s)


def work(seconds: float, phase: str = "forward") -> Work:
    return Work("measured", 0, 0, seconds=seconds, phase=phase)


def test_stretches_are_medians_that_add_up_to_the_median_step() -> None:
    sent = Start(0, "all_reduce", 8, Group(2))
    other: list[Event] = [work(9.0)]  # a step that went another way does not count
    steps = [[work(a), sent, Wait(0), work(b)] for a, b in ((1, 3), (2, 3), (9, 4))]
    events, totals = typical([*steps, other])
    assert totals == (4, 5, 13)
    assert events == [work(2.0), sent, Wait(0), work(3.0)]
    events, _ = typical([[work(a), sent, work(b)] for a, b in ((1, 9), (1, 3), (9, 3), (1, 5))])
    assert [w.seconds for w in events if isinstance(w, Work)] == pytest.approx([1.6, 6.4])


def test_steps_of_which_no_two_are_alike_are_refused() -> None:
    with pytest.raises(UsageError, match="no two steps"):
        typical([[work(1.0, "forward")], [work(1.0, "backward")]])


def test_a_pipeline_whose_micro_batches_change_their_shape_is_refused() -> None:
    line: Any = None
    signature: Any = ((2, 3),)
    with (
        simulate.told_shapes(lambda: iter(()), nullcontext),
        pytest.raises(UsageError, match="differ in shape from one step to the next"),
    ):
        Executor._shapes(line, 1, 0, signature)


def test_what_others_would_send_is_filled_in() -> None:
    own, output = torch.tensor([1.0, 2.0]), torch.full((6,), float("nan"))
    fill("all_gather", [output], [output, own], 3)
    assert output.tolist() == [1, 2, 1, 2, 1, 2]
    whole, part = torch.arange(6.0), torch.full((2,), float("nan"))
    fill("reduce_scatter", [whole], [part, whole], 3)
    assert part.tolist() == [0, 1]
    received = torch.full((6,), float("nan"))
    fill("all_to_all", [whole], [received, whole], 3)
    assert received.tolist() == [0, 1, 0, 1, 0, 1]
    uneven = torch.full((5,), float("nan"))
    fill("all_gather", [uneven], [uneven, own], 3)
    assert uneven.isfinite().all()
    message, vote = torch.full((2,), float("nan")), torch.zeros(1, dtype=torch.int32)
    fill("recv", [message, vote], [message, vote], 2)
    assert message.isfinite().all()
    assert vote.item() == 1
