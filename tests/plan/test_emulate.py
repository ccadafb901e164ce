"""A rank's own work, measured on this machine without its peers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from conftest import long_unless
from shardlab import config as configs
from shardlab.errors import UsageError
from shardlab.measure import simulate
from shardlab.measure.estimate import WEIGHED, Simulator
from shardlab.plan.emulate import fill, typical
from shardlab.plan.graph import Event, Group, Start, Step, Wait, Work
from shardlab.specs import parse_spec
from shardlab.strategies.pipeline import Pipeline

TINY = {"model.size": "tiny", "data.source": "synthetic", "launch.device": "cpu"}


@pytest.fixture(scope="module")
def simulator() -> Iterator[Simulator]:
    with Simulator() as opened:
        yield opened


def config_of(strategy: str, world: int, **values: Any) -> configs.Config:
    more = {"strategy.name": strategy, "launch.world": world, "training.global_batch": 4 * world}
    return configs.load(None, {**TINY, **more, **values})


def emulated(simulator: Simulator, config: configs.Config, *more: Any) -> Step:
    step: Step = simulator.ask("shardlab.plan.emulate:emulate", 60.0, config, 0.1, *more)
    return step


def between(step: Step) -> list[Event]:
    return [event for event in step.events if not isinstance(event, Work)]


@pytest.mark.parametrize(
    "strategy",
    long_unless(
        lambda strategy: strategy == "zero3",
        ["bucket_ddp_async", "zero1", "zero3", "pytorch_zero1", "pytorch_zero3"],
    ),
)
def test_it_sends_and_waits_as_the_simulation(strategy: str, simulator: Simulator) -> None:
    config = config_of(strategy, 4)
    step = emulated(simulator, config)
    simulated = simulator.run(config.with_overrides(WEIGHED), "cpu", events=True)["steps"][0]
    assert between(step) == between(simulated)
    assert (step.world, step.samples, step.tokens) == (4, 16, 16 * 64)
    assert all(work.seconds is not None and work.seconds >= 0 for work in step.works())
    assert len(step.totals_s) >= 5
    total = sum(work.seconds or 0.0 for work in step.works())
    assert min(step.totals_s) <= total <= max(step.totals_s)
    assert {work.phase for work in step.works()} >= {"forward", "backward", "update"}


@pytest.mark.parametrize(
    "spec",
    long_unless(
        lambda spec: spec in ("zero1:tensor=2", "pipeline_1f1b"),
        ["zero1:tensor=2", "tensor_parallel", "sequence_parallel", "context_parallel",
         "zero3:context=2", "pipeline_1f1b", "pipeline_zero_bubble", "zero1:tensor=2:pipeline=2",
         "pytorch_tensor_parallel", "pytorch_pipeline", "pytorch_hsdp:shards=2"],
    ),
)  # fmt: skip
def test_ranks_that_cut_one_model_send_and_wait_as_the_simulation(
    spec: str, simulator: Simulator
) -> None:
    """Each stage its own messages; every tensor that would have come is filled with numbers."""
    name, options = parse_spec(spec)
    more = {"strategy.options": options, "training.accumulate": 2}
    config = config_of(name, 4 if options else 2, **more)
    simulated = simulator.run(config.with_overrides(WEIGHED), "cpu", events=True)["steps"]
    ranks = [step.rank for step in simulated]
    for rank, of_simulation in zip(ranks, simulated, strict=True):
        step = emulated(simulator, config, None, rank, ranks if len(ranks) > 1 else [])
        assert step.rank == rank
        assert between(step) == between(of_simulation)
        assert all(work.seconds is not None and work.seconds >= 0 for work in step.works())
    assert len(ranks) == (2 if "pipeline" in spec else 1)


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
        Pipeline._shapes(line, 1, 0, signature)


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
