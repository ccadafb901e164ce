"""A pipeline of ranks against one plain process: every schedule, odd models, planted bugs."""

from __future__ import annotations

import functools
import itertools
import json
import re
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

import commands
import conformance
import planted_mesh
import resuming
from conformance import Trajectory, covering, first_difference
from conftest import GetRanks, deep_unless, long_unless
from meshed import Tied, theirs
from shardlab import comm, naming
from shardlab import config as configs
from shardlab.axes import Axes
from shardlab.errors import UsageError
from shardlab.naming import STRATEGIES
from shardlab.optim import optimizers
from shardlab.strategies.base import Setup
from shardlab.strategies.cut_model import CutModel
from shardlab.strategies.pipeline import executor, schedule_analysis, schedules, stages
from shardlab.strategies.pipeline.p2p import ACTIVATION, GRADIENT
from shardlab.strategies.update import Rule
from shardlab.training import builders
from shardlab.workloads import gpt2
from shardlab.workloads.base import Batch
from shardlab.world import World

SCHEDULES = tuple(schedules.SCHEDULES)
STEPS = 2


# ------------------------------------------------------------------ models


class Pair(nn.Module):
    """A block that takes a pair and an argument by name, and returns a pair, with a None in it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor, y: Tensor, *, scale: Tensor) -> tuple[Tensor, None, Tensor]:
        return x + torch.tanh(self.a(y)) * scale, None, self.b(x)


class Pairs(nn.Module):
    """Blocks with several outputs, extra arguments, and a parameter of the root among them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 5)
        self.scale = nn.Parameter(torch.rand(5))  # every block uses it
        self.blocks = nn.ModuleList(Pair(5) for _ in range(9))
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = torch.sin(x)
        for block in self.blocks:
            x, _, y = block(x, y, scale=self.scale)
        out: Tensor = self.head(x + y)
        return out


class Plain(nn.Module):
    """Uneven layers in a Sequential, the first of which do not train; and gradient hooks that are
    not linear: each micro-batch must come to them by itself."""

    def __init__(self) -> None:
        super().__init__()
        widths = [6, 9, 4, 17, 5, 8, 3, 12, 7]
        parts: list[nn.Module] = []
        for a, b in itertools.pairwise(widths):
            parts += [nn.Linear(a, b), nn.Tanh()]
        self.layers = nn.Sequential(*parts, nn.Linear(7, 3))
        self.layers[0].requires_grad_(False)
        for p in self.layers[1:].parameters():
            p.register_hook(lambda g: g + 10 * g * g)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


class Published(nn.Module):
    """As many published models are: blocks that change their input in place and whose weights are
    computed, checkpointed by the model, with a number that counts the forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.stem, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.ReLU(i % 2 == 0), weight_norm(nn.Linear(6, 6)), nn.Linear(6, 6))
            for i in range(8)
        )

    def forward(self, x: Tensor) -> Tensor:  # (rows, 6)
        x = self.stem(x)
        for i, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=False) if i % 2 else block(x)
            x *= 0.9
        out: Tensor = self.head(x)
        return out


class Tuned(Published):
    """Only the upper half trains."""

    def __init__(self) -> None:
        super().__init__()
        for part in (self.stem, *self.blocks[:4]):
            part.requires_grad_(False)


class Counting(Published):
    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) / self.calls


class Shrinking(Published):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.stem.weight.mul_(0.99)
        return super().forward(x)


class Remembering(Published):
    """What is written behind the last block is read before the first."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x + self.seen)
        self.seen.add_(out.detach().sum())
        return out


class Normed(Published):
    """A BatchNorm before the first block; one sample tells nothing of its statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


class RememberingLater(Remembering):
    """Its first forward, which the stages are found by, shows nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.before: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.before:
            self.seen.add_(1)
        self.before.append(x)
        return Published.forward(self, x + self.seen)


class Wrapping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"x": self.layer(state["x"])}


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Wrapping() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        state = {"x": x}
        for block in self.blocks:
            state = block(state)
        return state["x"]


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch.inputs), batch.targets, reduction="sum", ignore_index=-100)


def llama() -> nn.Module:
    return theirs("llama", num_hidden_layers=8, num_key_value_heads=1, tie_word_embeddings=True)


def gpt2_deep() -> nn.Module:
    return gpt2.GPT2(gpt2.Shape(layers=8, heads=2, dim=8, context=6, vocab=32))


def llama_loss(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(input_ids=batch.inputs, attention_mask=torch.ones_like(batch.inputs)).logits
    return F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="sum")


@dataclass(frozen=True)
class Toy:
    make: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Batch], Tensor]
    blocks: tuple[str, ...]
    is_text: bool = False


BLOCKS = tuple(f"blocks.{i}" for i in range(8))
LINEAR = tuple(f"layers.{i}" for i in range(0, 17, 2))
TOYS = {
    "pairs": Toy(Pairs, loss, (*BLOCKS, "blocks.8")),
    "tied": Toy(Tied, loss, BLOCKS),
    "plain": Toy(Plain, loss, LINEAR),
    "published": Toy(Published, loss, BLOCKS),
    "tuned": Toy(Tuned, loss, BLOCKS),
    "counting": Toy(Counting, loss, BLOCKS),
    "gpt2": Toy(gpt2_deep, gpt2.next_token_loss, BLOCKS, is_text=True),
    "llama": Toy(llama, llama_loss, tuple(f"model.layers.{i}" for i in range(8)), is_text=True),
}


def batch_of(toy: Toy, step: int, share: int, micro: int) -> Batch:
    """Ragged: other numbers of rows, none at all, other lengths, labels that do not count."""
    draw = torch.Generator().manual_seed(1000 * step + 100 * share + micro)
    rows = [3, 2, 4, 1][(step + share + micro) % 4]
    if toy.is_text:
        tokens = torch.randint(0, 23, (rows, 4 + micro % 2 + 1), generator=draw)
        inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        return Batch(inputs, targets, targets.numel(), rows)
    if (step + micro) % 3 == 2:
        rows = 0
    x = torch.randn(rows, 6, generator=draw, dtype=torch.float64)
    y = torch.randint(0, 3, (rows,), generator=draw)
    y[torch.rand(rows, generator=draw) < 0.25] = -100
    return Batch(x, y, int((y != -100).sum()), rows)


def built(toy: Toy, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return toy.make().double()


ADAMW = optimizers.of_class(torch.optim.AdamW, lr=0.05, weight_decay=0.1)


def evaluated(infer: Callable[..., Any], toy: Toy) -> list[float]:
    """What two calls of the model return, the second with the rows in another order."""

    def function(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        return toy.loss(model, batch), toy.loss(model, batch.map(lambda t: t.flip(0)))

    return [float(value) for value in infer(function, batch_of(toy, 0, 0, 1))]


@functools.cache
def one_process(name: str, shares: int, micro: int, clip: float | None = None) -> Trajectory:
    toy = TOYS[name]
    model = built(toy, 0)

    def by_share(step: int) -> list[list[Batch]]:
        return [[batch_of(toy, step, s, m) for m in range(micro)] for s in range(shares)]

    found = conformance.one_process(model, ADAMW, toy.loss, by_share, STEPS, clip)
    with torch.no_grad():
        found.evaluated = evaluated(lambda function, batch: function(model, batch), toy)
    return found


def on_stages(
    world: World,
    model: nn.Module,
    toy: Toy,
    axes: Axes,
    inner: str = "single",
    clip: float | None = None,
    sample: Batch | None = None,
) -> CutModel:
    sample = sample or batch_of(toy, 0, 0, 0)
    rule = Rule(clip_norm=clip)
    setup = Setup(model, ADAMW, toy.loss, world.mesh, rule, blocks=toy.blocks, sample=sample)
    of_data = naming.resolve(inner, STRATEGIES, "strategy")
    return CutModel(setup, axes, of_data, builders.cuts_of("pipeline_1f1b", axes))


def run(
    world: World,
    name: str,
    axes: Axes,
    micro: int,
    inner: str = "single",
    clip: float | None = None,
) -> tuple[Trajectory, int]:
    toy = TOYS[name]
    strategy = on_stages(world, built(toy, world.rank), toy, axes, inner, clip)
    share, _ = axes.data_share(world.rank)
    course = Trajectory()
    for step in range(STEPS):
        course.take_step(strategy, [batch_of(toy, step, share, m) for m in range(micro)])
    course.evaluated = evaluated(strategy.infer, toy)
    assert strategy.pipeline is not None
    return course, strategy.pipeline.peak_live


# Fewer micro-batches than stages, more, and one.
SIZES = ((2, 3), (4, 6), (4, 2), (2, 1))  # ranks, micro-batches


def may_not_run_twice(toy: str, schedule: str, _size: Any) -> bool:
    """Interleaved stages do so on a rank: refused, see below."""
    return (toy, schedule) == ("counting", "interleaved")


FACTORS = tuple(TOYS), SCHEDULES, SIZES
PAIRS = covering(*FACTORS, but=may_not_run_twice)
CASES = itertools.filterfalse(lambda case: may_not_run_twice(*case), itertools.product(*FACTORS))


def is_quick(toy: str, _schedule: str, size: tuple[int, int]) -> bool:
    return toy == "tied" and size == (2, 3)


@pytest.mark.parametrize(
    ("toy", "schedule", "size"),
    long_unless(is_quick, deep_unless(lambda *case: case in PAIRS or is_quick(*case), CASES)),
)
def test_equals_one_process(
    toy: str, schedule: str, size: tuple[int, int], ranks: GetRanks
) -> None:
    """Losses, gradients, two updates, an evaluation; and as many live activations as the schedule
    claims."""
    world, micro = size
    axes = Axes(1, pipeline=world, schedule=schedule)
    by_rank = ranks(world).run(run, toy, axes, micro, deadline_s=60)
    claim = schedule_analysis.live(schedules.schedule(schedule, world, micro))
    for rank, (course, live) in enumerate(by_rank):
        assert first_difference(course, one_process(toy, 1, micro)) is None, rank
        assert live == claim[rank]


# ------------------------------------------------------------------ with data parallelism


@pytest.mark.long
@pytest.mark.parametrize(
    ("toy", "inner", "schedule", "clip"),
    [
        ("tied", "zero1", "1f1b", 0.05),
        ("gpt2", "zero2", "zero_bubble", 0.05),
        ("tied", "bucket_ddp_async", "interleaved", None),
        ("llama", "pytorch_ddp", "interleaved", 0.05),
        ("pairs", "simple_ddp", "gpipe", 0.05),
    ],
)
def test_stages_times_replicas(
    toy: str, inner: str, schedule: str, clip: float | None, ranks: GetRanks
) -> None:
    """Two stages of two replicas, with the norm of the whole gradient clipped."""
    axes = Axes(2, pipeline=2, schedule=schedule)
    for course, _ in ranks(4).run(run, toy, axes, 3, inner, clip, deadline_s=60):
        assert first_difference(course, one_process(toy, 2, 3, clip)) is None


def moved(world: World, name: str, first: Axes, then: Axes) -> Trajectory:
    """A step under one layout, the next under another, through a checkpoint."""
    toy, course = TOYS[name], Trajectory()
    before: Any = None
    for step, axes in enumerate((first, then)):
        strategy = on_stages(world, built(toy, world.rank), toy, axes, "zero1")
        if before is not None:
            resuming.hand_over(world, before, strategy)
        share, _ = axes.data_share(world.rank)
        # The same global batch, whoever has which part of it.
        every = [batch_of(toy, step, s, m) for s in range(2) for m in range(2)]
        mine = every[share * 2 : share * 2 + 2] if axes.data == 2 else every
        course.take_step(strategy, mine)
        before = strategy
    course.evaluated = evaluated(strategy.infer, toy)
    return course


@pytest.mark.long
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_a_state_moves_to_another_layout(schedule: str, ranks: GetRanks) -> None:
    layouts = Axes(2, pipeline=2, schedule=schedule), Axes(1, pipeline=4, schedule=schedule)
    for first, then in (layouts, layouts[::-1]):
        for course in ranks(4).run(moved, "gpt2", first, then, deadline_s=60):
            assert first_difference(course, one_process("gpt2", 2, 2)) is None


@pytest.mark.deep
def test_a_run_resumes_under_another_layout(tmp_path: Path) -> None:
    """As if nothing had happened: the losses are those of a run that was not stopped."""
    base = (
        "--size", "tiny", "--set", "model.options.layers=4", "--global-batch", "8",
        "--micro-batch", "2",
        "--set", "precision.compute=fp64", "--device", "cpu", "--world", "2",
    )  # fmt: skip
    run = ("train", "--strategy", "pipeline_1f1b", *base, "--set", "training.evaluate_every=4")
    commands.here(*run, "--steps", "4", "--out", "whole", cwd=tmp_path)
    commands.here(*run, "--steps", "2", "--checkpoint-every", "2", "--out", "parts", cwd=tmp_path)
    commands.here("train", "--resume", "parts", "--steps", "4", "--strategy", "zero3", cwd=tmp_path)
    losses = {}
    for name in ("whole", "parts"):
        rows = map(json.loads, (tmp_path / name / "rank0.jsonl").read_text().splitlines())
        losses[name] = [row["loss"] for row in rows if "loss" in row]
    assert len(losses["whole"]) == 4
    assert losses["parts"] == pytest.approx(losses["whole"], abs=1e-9)


# ------------------------------------------------------------------ planted bugs

# Those of the proofs that show in one step, on the toy that is like the workload of their proof.
LIKE = {"words": "gpt2", "even_words": "gpt2", "tied": "tied"}
BUGS = {
    name: (bug.plants, LIKE[bug.workload], bug.strategy.removeprefix("pipeline_"))
    for name, bug in planted_mesh.BUGS.items()
    if bug.strategy.startswith("pipeline_") and bug.check == "equal"
}


def run_with_bug(world: World, bug: str) -> Trajectory:
    plants, toy, schedule = BUGS[bug]
    with ExitStack() as planted:
        for plant in plants:
            planted.enter_context(mock.patch.object(*plant))
        return run(world, toy, Axes(1, pipeline=2, schedule=schedule), 6)[0]


@pytest.mark.long
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(bug: str, ranks: GetRanks) -> None:
    courses = ranks(2).run(run_with_bug, bug, deadline_s=60)
    assert any(first_difference(course, one_process(BUGS[bug][1], 1, 6)) for course in courses)


# ------------------------------------------------------------------ models that cannot be cut


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(6))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        seen = []
        for i, block in enumerate(self.blocks):
            x = torch.tanh(block(x + (seen[5 - i] if i > 3 else 0)))
            seen.append(x)
        out: Tensor = self.head(x)
        return out


class Twice(Plain):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x) + self.layers(2 * x)
        return out


class OneTrains(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.layers[:-1].requires_grad_(False)


REFUSALS = {
    "unet": (UNet, BLOCKS[:6], 4, "reads the output of 'blocks.0'"),
    "twice": (Twice, ["layers.0", "layers.2"], 2, "'layers.0' is called more than once"),
    "few": (Plain, ["layers.0", "layers.2"], 3, "can be cut into 2 (2 blocks)"),
    "none": (Plain, [], 2, "the workload names no blocks"),
    "wrapped": (Wrapped, BLOCKS[:4], 2, "returns a dict, which no stage sends"),
    "never": (Tied, ["blocks.0", "blocks.1", "never"], 2, "never calls the block never"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_be_cut_is_refused_by_name(name: str) -> None:
    kind, blocks, count, words = REFUSALS[name]
    model: nn.Module = kind().double()
    sample = batch_of(TOYS["plain"], 0, 0, 0)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    state = torch.get_rng_state()
    with pytest.raises(UsageError, match=re.escape(words)):
        stages.ends_of(stages.probe(model, blocks, loss, sample), model, count)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert torch.isfinite(loss(model, sample))  # it runs as before


def cut_of(
    world: World, kind: Any, blocks: tuple[str, ...], schedule: str = "1f1b", hides: bool = False
) -> str:
    toy = Toy(kind, loss, blocks)
    hiding = mock.patch.object(stages, "_skip", return_value=None) if hides else nullcontext()
    try:
        with hiding:
            strategy = on_stages(world, built(toy, 0), toy, Axes(1, pipeline=2, schedule=schedule))
        return str(float(strategy.gradients([batch_of(toy, 0, 0, 0)])))
    except UsageError as error:
        return str(error)


def test_what_a_rank_does_not_hold_cannot_be_read() -> None:
    """A count is an integer, and so knows no NaN."""
    norm = nn.BatchNorm1d(3)
    count = norm.num_batches_tracked
    stages.drop(norm, {"weight"}, {"running_mean", "num_batches_tracked"})
    assert norm.running_mean is not None
    assert norm.running_mean.isnan().tolist() == [True] * 3
    assert norm.weight.tolist() == [1.0] * 3
    for left in (norm.num_batches_tracked, count):
        with pytest.raises(RuntimeError):
            bool(left > 1000)


def test_a_value_that_finds_a_way_around_a_cut_is_not_silent(ranks: GetRanks) -> None:
    assert ranks(2).run(cut_of, UNet, BLOCKS[:6], "1f1b", True) == ["nan", "nan"]


@pytest.mark.parametrize(
    ("kind", "blocks", "schedule", "why"),
    [
        (Shrinking, BLOCKS, "1f1b", "changes the parameter 'stem.weight' in place"),
        (Remembering, BLOCKS, "1f1b", "outside of the blocks changes the buffer 'seen', and"),
        (Counting, BLOCKS, "interleaved", "changes 'calls', and with 2 stages on a rank"),
        (OneTrains, LINEAR, "1f1b", "no parameter of stage 0 trains"),
    ],
)
def test_what_a_pipeline_cannot_do_is_refused(
    kind: Any, blocks: tuple[str, ...], schedule: str, why: str, ranks: GetRanks
) -> None:
    for said in ranks(2).run(cut_of, kind, blocks, schedule):
        assert why in said


def test_statistics_belong_into_a_block() -> None:
    model, sample = Normed().double(), batch_of(TOYS["plain"], 0, 0, 0)
    with pytest.raises(
        UsageError, match=r"changes the buffer 'norm\.running_mean'.*name its module"
    ):
        stages.probe(model, BLOCKS, loss, sample)
    found = stages.probe(model, ("norm", *BLOCKS), loss, sample)
    assert found.changed == {f"norm.{name}" for name, _ in model.norm.named_buffers()}


def test_a_buffer_that_changes_later_is_refused() -> None:
    model, sample = RememberingLater().double(), batch_of(TOYS["plain"], 0, 0, 0)
    runner = stages.StageRunner(
        stages.probe(model, BLOCKS, loss, sample), [3, 7], torch.device("cpu")
    )
    runner.attach(model)
    with pytest.raises(UsageError, match="changes the buffer 'seen' for this micro-batch"):
        runner.run(0, lambda: loss(model, sample), [], [])


def refused(world: World, inner: str) -> str:
    asked = {"strategy.name": inner, "strategy.options": {"pipeline": 2}, "model.size": "tiny"}
    config = configs.load(None, {**asked, "launch.world": 2})
    with pytest.raises(UsageError) as caught:
        builders.build_strategy(config, builders.build_workload(config), world)
    return str(caught.value)


@pytest.mark.parametrize("inner", ["zero3", "pytorch_zero3"])
def test_what_gathers_for_every_micro_batch_is_refused(inner: str, ranks: GetRanks) -> None:
    assert "with pipeline use zero1 or zero2" in ranks(2).run(refused, inner)[0]


def test_blocks_are_dealt_so_that_the_largest_stage_is_small() -> None:
    model = Plain().double()
    found = stages.probe(model, TOYS["plain"].blocks, loss, batch_of(TOYS["plain"], 0, 0, 0))
    costs = stages._costs(found, model, "parameters")
    ends = stages.ends_of(found, model, 3)
    assert ends[-1] == 8
    parts = [sum(costs[a + 1 : b + 1]) for a, b in zip([-1, *ends], ends, strict=False)]
    every = [
        max(sum(costs[: a + 1]), sum(costs[a + 1 : b + 1]), sum(costs[b + 1 :]))
        for a in range(8)
        for b in range(a + 1, 8)
    ]
    assert max(parts) == min(every)
    with pytest.raises(UsageError, match="did you mean 'time'"):
        stages.ends_of(found, model, 3, "tme")


# ------------------------------------------------------------------ what is kept


def test_what_was_sent_is_kept_until_its_receiver_has_worked_on_it() -> None:
    """Rank 0: F0 F1 B0 F2 B1 F3 B2 B3, rank 1: F0 B0 F1 B1 F2 B2 F3 B3."""
    lists = schedules.schedule("1f1b", 2, 4)
    line = executor.Executor.__new__(executor.Executor)
    line.where, line.stages, line.plans = (0, 1), 2, {}
    for rank, sent, taken, left in (
        (0, [(ACTIVATION, 1, m) for m in range(3)], (GRADIENT, 0, 1), [2]),
        (1, [(GRADIENT, 0, m) for m in range(3)], (ACTIVATION, 1, 3), [2]),
        (1, [(GRADIENT, 0, m) for m in range(3)], (ACTIVATION, 1, 2), [1, 2]),
    ):
        line.rank = rank
        with mock.patch.object(executor.Executor, "lists", return_value=lists):
            _, line.turns = line._plan(4)
        line.going = {key: [] for key in sent}
        line._release(taken)
        assert [micro for _, _, micro in line.going] == left


# ------------------------------------------------------------------ time

NAP_S = 0.03


class Nap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        time.sleep(NAP_S)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.backward_s)
        return gradient, None


class Sleeper(nn.Module):
    def __init__(self, backward_s: float) -> None:
        super().__init__()
        self.backward_s = backward_s

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Nap.apply(x, self.backward_s)  # type: ignore[no-untyped-call]
        return out


def nap_of_weight(*args: Any) -> Any:
    time.sleep(NAP_S)
    return _of_weight(*args)


_of_weight = executor._of_weight


def asleep(world: World, schedule: str, micro: int) -> float:
    """How many naps long a step is: one for each forward, input gradient and weight gradient."""
    naps = 1 if schedule == "zero_bubble" else 2  # the weight gradient sleeps by itself, or not
    count = world.size * schedules.chunks_of(schedule)
    blocks = (nn.Sequential(nn.Linear(8, 8), Sleeper(naps * NAP_S)) for _ in range(count))
    names = tuple(str(i) for i in range(count))
    toy = Toy(nn.Sequential, lambda model, batch: model(batch.inputs).sum(), names)
    sample = Batch(torch.randn(1, 8), None, 1, 1)
    axes = Axes(1, pipeline=world.size, schedule=schedule)
    with mock.patch.object(executor, "_of_weight", nap_of_weight):
        strategy = on_stages(world, nn.Sequential(*blocks), toy, axes, sample=sample)
        strategy.gradients([sample] * micro)  # shapes are exchanged
        comm.barrier(world.group)
        begin = time.perf_counter()
        strategy.gradients([sample] * micro)
        return (time.perf_counter() - begin) / NAP_S


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.parametrize("schedule", deep_unless(lambda s: s in ("1f1b", "zero_bubble"), SCHEDULES))
def test_a_step_is_as_long_as_the_simulation_says(schedule: str, ranks: GetRanks) -> None:
    """Stages that sleep, so that four ranks fit on two cores: a rank that waited for a message that
    it needs later, or until its own is taken, would be late."""
    micro = 8
    expected = schedule_analysis.end(
        schedule_analysis.timeline(
            schedules.schedule(schedule, 4, micro), schedule_analysis.Times(1, 1, 1)
        )
    )
    found: list[float] = []
    while len(found) < 3 and not (found and min(found) < 1.1 * expected):
        found.append(max(ranks(4).run(asleep, schedule, micro, deadline_s=60)))
    assert expected < min(found) < 1.1 * expected
