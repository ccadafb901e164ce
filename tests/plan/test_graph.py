"""The step as events: what a strategy's own code computes, sends and waits for, without peers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import long_unless
from shardlab import config as configs
from shardlab.errors import UsageError
from shardlab.measure.estimate import WEIGHED, Simulator
from shardlab.naming import STRATEGIES
from shardlab.plan.claims import CLAIMS, Job, Parameter
from shardlab.plan.graph import Event, Start, Step, Wait, Work

TINY = {"model.size": "tiny", "data.source": "synthetic", "training.accumulate": 2}
WORKERS = ("local_sgd", "diloco", "streaming_diloco")  # they send in some steps only
ALIKE = [strategy for strategy in STRATEGIES if strategy not in WORKERS]
MESSAGES = 200  # bytes, at most: numbers of targets, losses, masks


@pytest.fixture(scope="module")
def simulator() -> Iterator[Simulator]:
    with Simulator() as opened:
        yield opened


def config_of(strategy: str, world: int, **values: Any) -> configs.Config:
    world = 1 if strategy == "single" else world
    more = {"strategy.name": strategy, "launch.world": world, "training.global_batch": 4 * world}
    return configs.load(None, {**TINY, **WEIGHED, **more, **values})


def step_of(
    simulator: Simulator, strategy: str, world: int = 2, device: str = "cpu", **values: Any
) -> Step:
    config = config_of(strategy, world, **values)
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
    """The claims' view of the tiny GPT-2."""
    from shardlab.run import assemble

    workload = assemble.build_workload(config_of("single", 1))
    model = workload.make_model()
    blocks = workload.blocks_of(model)
    params = tuple(
        Parameter(
            name, tuple(p.shape), 4, True, next((b for b in blocks if name.startswith(f"{b}.")), "")
        )
        for name, p in model.named_parameters()
    )
    return Job(params, 0, world, 2)


@pytest.mark.parametrize(
    ("strategy", "world"),
    long_unless(
        lambda strategy, world: world == 2 and strategy in ("zero1", "pytorch_ddp"),
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


def test_fsdp_on_a_gpu_gathers_the_next_block_while_it_computes(simulator: Simulator) -> None:
    step = step_of(simulator, "pytorch_zero3", device="cuda")
    events = list(step.events)
    gathers = [s for s in step.starts() if s.op == "all_gather"]
    beside = [events[events.index(s) : events.index(Wait(s.call))] for s in gathers]
    hidden = [any(isinstance(e, Work) and e.flops for e in between) for between in beside]
    assert sum(hidden) >= len(gathers) // 2


def test_groups_have_a_stride(simulator: Simulator) -> None:
    step = step_of(simulator, "pytorch_hsdp", 8, **{"strategy.options": {"shards": 4}})
    groups = {s.op: (s.group.size, s.group.stride) for s in step.starts() if s.bytes > MESSAGES}
    assert groups == {"all_gather": (4, 1), "reduce_scatter": (4, 1), "all_reduce": (2, 4)}


def test_events_are_only_noted_if_asked_for(simulator: Simulator) -> None:
    assert "steps" not in simulator.run(config_of("single", 1), "cpu")


@pytest.mark.parametrize("strategy", WORKERS)
def test_steps_that_differ_have_no_plan(strategy: str, simulator: Simulator) -> None:
    with pytest.raises(UsageError, match="exchange every 10 steps"):
        step_of(simulator, strategy)


LSTM = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.LSTM(32, 64, 2, batch_first=True), nn.Linear(64, 4)

    def forward(self, x):
        return self.head(self.layers(x)[0][:, -1])

def workload():
    data = torch.randn(64, 16, 32), torch.randint(0, 4, (64,))
    return Model(), data, nn.CrossEntropyLoss()
"""


def test_a_recurrent_layer_computes(simulator: Simulator, tmp_path: Path) -> None:
    """Its operators are whole layers, which PyTorch's counter passes over."""
    (tmp_path / "own.py").write_text(LSTM)
    model = {"model.workload": f"{tmp_path / 'own.py'}:workload", "model.size": None}
    step = step_of(simulator, "single", **model, **{"data.source": "auto"})
    matrices = 4 * 64 * (32 + 64) + 4 * 64 * (64 + 64)
    head = 64 * 4
    samples, tokens = 4, 4 * 16
    assert step.flops == 3 * 2 * (tokens * matrices + samples * head)
