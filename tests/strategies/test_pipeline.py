"""A pipeline of ranks against one plain process: every schedule, odd models, planted bugs."""

from __future__ import annotations

import functools
import itertools
import json
import re
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
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
from conftest import GetRanks, long_unless
from meshed import Tied
from shardlab import comm, naming
from shardlab import config as configs
from shardlab.axes import Axes
from shardlab.errors import Halt, UsageError
from shardlab.naming import STRATEGIES
from shardlab.optim import factory
from shardlab.run import assemble
from shardlab.strategies import pipeline, schedules, stages
from shardlab.strategies.base import Setup
from shardlab.strategies.on_mesh import OnMesh
from shardlab.strategies.update import Rule
from shardlab.workloads.base import Batch
from shardlab.world import World

SCHEDULES = tuple(schedules.SCHEDULES)
TOLERANCE = 1e-10
STEPS = 2


# ------------------------------------------------------------------ models


class Pair(nn.Module):
    """A block that takes a pair and an argument by name, and returns a pair in a dict."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, state: dict[str, Any], *, scale: Tensor) -> dict[str, Any]:
        x, y = state["pair"]
        return {"pair": (x + torch.tanh(self.a(y)) * scale, self.b(x)), "note": None}


class Pairs(nn.Module):
    """Blocks with several outputs, extra arguments, and a parameter of the root among them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 5)
        self.scale = nn.Parameter(torch.rand(5))  # every block uses it
        self.blocks = nn.ModuleList(Pair(5) for _ in range(9))
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        first = self.stem(x)
        state: dict[str, Any] = {"pair": (first, torch.sin(first))}
        for block in self.blocks:
            state = block(state, scale=self.scale)
        out: Tensor = self.head(state["pair"][0] + state["pair"][1])
        return out


class Plain(nn.Module):
    """Uneven layers in a Sequential, the first of which do not train."""

    def __init__(self) -> None:
        super().__init__()
        widths = [6, 9, 4, 17, 5, 8, 3, 12, 7]
        parts: list[nn.Module] = []
        for a, b in itertools.pairwise(widths):
            parts += [nn.Linear(a, b), nn.Tanh()]
        self.layers = nn.Sequential(*parts, nn.Linear(7, 3))
        self.layers[0].requires_grad_(False)

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


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch.inputs), batch.targets, reduction="sum", ignore_index=-100)


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32, hidden_size=8, intermediate_size=12, num_hidden_layers=8,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=16,
        tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    from shardlab.workloads.gpt2 import GPT2, Shape

    return GPT2(Shape(layers=8, heads=2, dim=8, context=6, vocab=32))


def llama_loss(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(input_ids=batch.inputs, attention_mask=torch.ones_like(batch.inputs)).logits
    return F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="sum")


def gpt2_loss(model: nn.Module, batch: Batch) -> Tensor:
    value: Tensor = model(batch.inputs, batch.targets)
    return value


@dataclass(frozen=True)
class Toy:
    make: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Batch], Tensor]
    blocks: tuple[str, ...]
    is_text: bool = False


TOYS = {
    "pairs": Toy(Pairs, loss, tuple(f"blocks.{i}" for i in range(9))),
    "tied": Toy(Tied, loss, tuple(f"blocks.{i}" for i in range(8))),
    "plain": Toy(Plain, loss, tuple(f"layers.{i}" for i in range(0, 17, 2))),
    "published": Toy(Published, loss, tuple(f"blocks.{i}" for i in range(8))),
    "tuned": Toy(Tuned, loss, tuple(f"blocks.{i}" for i in range(8))),
    "counting": Toy(Counting, loss, tuple(f"blocks.{i}" for i in range(8))),
    "shrinking": Toy(Shrinking, loss, tuple(f"blocks.{i}" for i in range(8))),
    "remembering": Toy(Remembering, loss, tuple(f"blocks.{i}" for i in range(8))),
    "gpt2": Toy(gpt2, gpt2_loss, tuple(f"blocks.{i}" for i in range(8)), is_text=True),
    "llama": Toy(llama, llama_loss, tuple(f"model.layers.{i}" for i in range(8)), is_text=True),
}


def batch_of(toy: Toy, step: int, share: int, micro: int) -> Batch:
    """Ragged: other numbers of rows, none at all, other lengths, labels that do not count."""
    draw = torch.Generator().manual_seed(1000 * step + 100 * share + micro)
    rows = [3, 2, 4, 1][(step + share + micro) % 4]
    if toy.is_text:
        tokens = torch.randint(0, 32, (rows, 4 + micro % 2 + 1), generator=draw)
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


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(params.values()), lr=0.05, weight_decay=0.1)


Course = list[tuple[float, dict[str, Tensor | None], dict[str, Tensor]]]


@functools.cache
def one_process(name: str, shares: int, micro: int, clip: float | None = None) -> Course:
    toy = TOYS[name]
    model = built(toy, 0)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    optimizer = adamw(trained)
    course: Course = []
    for step in range(STEPS):
        batches = [[batch_of(toy, step, s, m) for m in range(micro)] for s in range(shares)]
        total = sum(b.count for share in batches for b in share)
        start = {n: b.clone() for n, b in model.named_buffers()}
        kept, summed = start, 0.0
        for share, mine in enumerate(batches):
            with torch.no_grad():
                for n, b in model.named_buffers():
                    b.copy_(start[n])
            for b in mine:
                value = toy.loss(model, b)
                (value / total).backward()
                summed += float(value.detach())
            if share == 0:
                kept = {n: b.clone() for n, b in model.named_buffers()}
        with torch.no_grad():
            for n, b in model.named_buffers():
                b.copy_(kept[n])
        grads = {n: None if p.grad is None else p.grad.clone() for n, p in trained.items()}
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(list(trained.values()), clip)
        optimizer.step()
        optimizer.zero_grad()
        tensors = (*model.named_parameters(), *model.named_buffers())
        course.append((summed / total, grads, {n: t.detach().clone() for n, t in tensors}))
    return course


def make(
    world: World, name: str, axes: Axes, inner: str = "single", clip: float | None = None
) -> OnMesh:
    toy = TOYS[name]
    model = built(toy, world.rank)
    sample = batch_of(toy, 0, 0, 0)
    setup = Setup(
        model,
        factory.of_class(torch.optim.AdamW, lr=0.05, weight_decay=0.1),
        toy.loss,
        world.mesh,
        Rule(clip_norm=clip),
        blocks=toy.blocks,
        sample=sample,
    )
    return OnMesh(setup, axes, naming.resolve(inner, STRATEGIES, "strategy"))


def run(
    world: World,
    name: str,
    axes: Axes,
    micro: int,
    inner: str = "single",
    clip: float | None = None,
) -> tuple[Course, int]:
    toy, strategy = TOYS[name], make(world, name, axes, inner, clip)
    share, _ = axes.data_share(world.rank)
    course: Course = []
    for step in range(STEPS):
        batches = [batch_of(toy, step, share, m) for m in range(micro)]
        value = float(strategy.gradients(batches))
        grads = strategy.full_grads()
        strategy.step()
        course.append((value, grads, strategy.full_params()))
    executor: pipeline.Pipeline = strategy.inner.loss_fn.__self__  # type: ignore[attr-defined]
    return course, executor.peak_live


def difference(found: Course, expected: Course) -> str:
    for step, (mine, right) in enumerate(zip(found, expected, strict=True)):
        if not abs(mine[0] - right[0]) <= TOLERANCE:
            return f"step {step}: the loss is off by {abs(mine[0] - right[0]):.1e}"
        for what, here, there in (("gradient", mine[1], right[1]), ("value", mine[2], right[2])):
            if here.keys() != there.keys():
                return f"step {step}: {here.keys() ^ there.keys()}"
            for n, wanted in there.items():
                got = here[n]
                if (got is None) != (wanted is None):
                    return f"step {step}: the {what} of {n} is {got}, not {wanted}"
                if got is not None and wanted is not None and got.numel():
                    error = (got - wanted).abs().max().item()
                    if not error <= TOLERANCE:
                        return f"step {step}: the {what} of {n} is off by {error:.1e}"
    return ""


def refused_toy(world: World, name: str, axes: Axes) -> str:
    with pytest.raises(UsageError) as caught:
        make(world, name, axes)
    return str(caught.value)


@pytest.mark.parametrize(
    ("toy", "schedule", "why"),
    [
        ("shrinking", "1f1b", "changes the parameter 'stem.weight' in place"),
        ("remembering", "1f1b", "stages 0 and 1 both use the buffer 'seen'"),
        ("counting", "interleaved", "changes 'calls', and with 2 stages on a rank"),
    ],
)
def test_what_a_pipeline_cannot_do_is_refused(
    toy: str, schedule: str, why: str, ranks: GetRanks
) -> None:
    for said in ranks(2).run(
        refused_toy, toy, Axes(1, pipeline=2, schedule=schedule), deadline_s=60
    ):
        assert why in said


# Fewer micro-batches than stages, more, and one; every schedule with each toy.
CASES = [
    *itertools.product(["pairs", "tied", "plain", "gpt2", "llama"], SCHEDULES, [2], [3]),
    *itertools.product(["published"], SCHEDULES, [2], [3]),
    *itertools.product(["tuned"], SCHEDULES, [2], [3]),
    *itertools.product(["tuned"], ["gpipe", "zero_bubble"], [4], [6]),
    *itertools.product(["counting"], ["gpipe", "1f1b", "zero_bubble"], [2], [3]),
    *itertools.product(["tied"], SCHEDULES, [2], [1]),
    *itertools.product(["tied"], SCHEDULES, [4], [6]),
    *itertools.product(["pairs"], SCHEDULES, [4], [2]),
    *itertools.product(["gpt2", "llama", "plain"], ["1f1b"], [4], [6]),
]


def is_quick(toy: str, _schedule: str, world: int, micro: int) -> bool:
    return toy == "tied" and world == 2 and micro == 3


@pytest.mark.parametrize(("toy", "schedule", "world", "micro"), long_unless(is_quick, CASES))
def test_equals_one_process(
    toy: str, schedule: str, world: int, micro: int, ranks: GetRanks
) -> None:
    """Losses, gradients and two updates; and as many live activations as the schedule claims."""
    axes = Axes(1, pipeline=world, schedule=schedule)
    by_rank = ranks(world).run(run, toy, axes, micro, deadline_s=60)
    claim = schedules.live(schedules.schedule(schedule, world, micro))
    for rank, (course, live) in enumerate(by_rank):
        assert difference(course, one_process(toy, 1, micro)) == "", rank
        assert live == claim[rank]


# ------------------------------------------------------------------ with data parallelism


@pytest.mark.parametrize(
    ("toy", "inner", "schedule", "clip"),
    long_unless(
        lambda _toy, inner, *_: inner == "zero2",
        [
            ("tied", "zero1", "1f1b", 0.05),
            ("gpt2", "zero2", "zero_bubble", 0.05),
            ("tied", "bucket_ddp_async", "zbv", None),
            ("llama", "pytorch_ddp", "interleaved", 0.05),
            ("pairs", "simple_ddp", "gpipe", 0.05),
        ],
    ),
)
def test_stages_times_replicas(
    toy: str, inner: str, schedule: str, clip: float | None, ranks: GetRanks
) -> None:
    """Two stages of two replicas, with the norm of the whole gradient clipped."""
    axes = Axes(2, pipeline=2, schedule=schedule)
    for course, _ in ranks(4).run(run, toy, axes, 3, inner, clip, deadline_s=60):
        assert difference(course, one_process(toy, 2, 3, clip)) == ""


def refused(world: World, inner: str) -> str:
    asked = {"strategy.name": inner, "strategy.options": {"pipeline": 2}, "model.size": "tiny"}
    config = configs.load(None, {**asked, "launch.world": 2})
    try:
        assemble.build_strategy(config, assemble.build_workload(config), world)
    except UsageError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("inner", ["zero3", "pytorch_zero3"])
def test_what_gathers_for_every_micro_batch_is_refused(inner: str, ranks: GetRanks) -> None:
    assert "with pipeline use zero1 or zero2" in ranks(2).run(refused, inner)[0]


def moved(world: World, name: str, first: Axes, then: Axes) -> Course:
    """A step under one layout, the next under another, through a state of whole tensors."""
    toy, course = TOYS[name], []
    state: Any = None
    for step, axes in enumerate((first, then)):
        strategy = make(world, name, axes, "zero1")
        if state is not None:
            strategy.load_state_dict(state)
        share, _ = axes.data_share(world.rank)
        # The same global batch, whoever has which part of it.
        every = [batch_of(toy, step, s, m) for s in range(2) for m in range(2)]
        mine = every[share * 2 : share * 2 + 2] if axes.data == 2 else every
        value = float(strategy.gradients(mine))
        grads = strategy.full_grads()
        strategy.step()
        course.append((value, grads, strategy.full_params()))
        state = strategy.state_dict()
    return course


@pytest.mark.long
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_a_state_moves_to_another_layout(schedule: str, ranks: GetRanks) -> None:
    layouts = Axes(2, pipeline=2, schedule=schedule), Axes(1, pipeline=4, schedule=schedule)
    for first, then in (layouts, layouts[::-1]):
        for course in ranks(4).run(moved, "gpt2", first, then, deadline_s=60):
            assert difference(course, one_process("gpt2", 2, 2)) == ""


@pytest.mark.long
def test_a_run_resumes_under_another_layout(tmp_path: Path) -> None:
    """As if nothing had happened: the losses are those of a run that was not stopped."""
    base = (
        "--size", "tiny", "--set", "model.options.layers=4", "--accumulate", "4",
        "--set", "precision.compute=fp64", "--device", "cpu", "--world", "2",
    )  # fmt: skip
    run = ("train", "--strategy", "pipeline_1f1b", *base, "--evaluate-every", "4")
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

Pipeline = pipeline.Pipeline
_give, _take, _run = Pipeline._give, Pipeline._take, Pipeline.run
_weights, _backward, _sum_shared = Pipeline._weights, Pipeline._backward, Pipeline._sum_shared


def divided_by_micro_batches(self: Any, batches: Sequence[Batch]) -> Tensor:
    total = _run(self, batches)
    for gradient in self.gradients.values():
        gradient /= len(batches)
    return total


def summed_twice(self: Any) -> None:
    _sum_shared(self)
    _sum_shared(self)


def wiped(self: Any, action: Any) -> None:
    for p in self.model.parameters():
        p.grad = None  # what the micro-batch before has left
    _backward(self, action)


def wrong_micro_batch(self: Any, key: Any, tensors: Sequence[Tensor]) -> None:
    lane, stage, micro = key
    other = {0: 4, 4: 0}.get(micro, micro)  # they have the same shapes
    _give(self, (lane, stage, other if lane == pipeline.GRADIENT else micro), tensors)


def stale(self: Any, key: Any, shapes: Any) -> list[Tensor]:
    taken = _take(self, key, shapes)
    seen = vars(self).setdefault("seen", {})
    return list(seen.setdefault((key[0], key[1], tuple(t.shape for t in taken)), taken))


def weights_twice(self: Any, action: Any) -> None:
    kept = self.put_off[action.stage, action.micro]
    _weights(self, action)
    self.put_off[action.stage, action.micro] = kept
    _weights(self, action)


def weights_never(self: Any, action: Any) -> None:
    del self.put_off[action.stage, action.micro]


def loss_stays(self: Any, batches: Sequence[Batch]) -> Tensor:
    with mock.patch.object(pipeline.comm, "all_reduce", all_but_the_loss):
        return _run(self, batches)


_all_reduce = pipeline.comm.all_reduce


def all_but_the_loss(tensor: Tensor, group: Any, **how: Any) -> Any:
    return None if how["label"] == "loss of the last stage" else _all_reduce(tensor, group, **how)


def no_gradient_back(self: Any, key: Any, tensors: Sequence[Tensor]) -> None:
    is_first = key[0] == pipeline.GRADIENT and key[2] == 0
    _give(self, key, [torch.zeros_like(t) for t in tensors] if is_first else tensors)


def every_stage_counts(self: Any, stage: int, *args: Any) -> Any:
    where, self.where = self.where, [None] * stage + [self.rank]  # as if it were the rank's first
    try:
        return _run_stage(self, stage, *args)
    finally:
        self.where = where


_run_stage = Pipeline._run_stage

# What is wrong, in which method, on which toy and schedule it shows.
BUGS: dict[str, tuple[str, Any, str, str]] = {
    "divided by the number of micro-batches": ("run", divided_by_micro_batches, "plain", "1f1b"),
    "tied gradient not summed": ("_sum_shared", lambda _self: None, "gpt2", "1f1b"),
    "tied gradient summed twice": ("_sum_shared", summed_twice, "gpt2", "gpipe"),
    "accumulation wiped": ("_backward", wiped, "pairs", "1f1b"),
    "wrong micro-batch paired": ("_give", wrong_micro_batch, "gpt2", "gpipe"),
    "stale activation": ("_take", stale, "llama", "gpipe"),
    "weight gradient twice": ("_weights", weights_twice, "pairs", "zero_bubble"),
    "weight gradient never": ("_weights", weights_never, "pairs", "zbv"),
    "loss not shared": ("run", loss_stays, "plain", "gpipe"),
    "one gradient not sent back": ("_give", no_gradient_back, "plain", "1f1b"),
    "statistics of other stages kept": ("_run_stage", every_stage_counts, "tied", "interleaved"),
}


def run_with_bug(world: World, bug: str, axes: Axes, inner: str) -> Course:
    method, wrong, toy, _ = BUGS[bug]
    with mock.patch.object(Pipeline, method, wrong):
        return run(world, toy, axes, 6, inner)[0]


@pytest.mark.parametrize("bug", long_unless(lambda bug: bug.startswith("tied"), BUGS))
def test_a_planted_bug_is_caught(bug: str, ranks: GetRanks) -> None:
    toy, schedule = BUGS[bug][2:]
    axes = Axes(1, pipeline=2, schedule=schedule)
    courses, said = [], ""
    try:
        courses = ranks(2).run(run_with_bug, bug, axes, "single", deadline_s=60)
    except Halt as halt:  # messages are compared where these ranks have run a guarded test before
        said = str(halt)
    is_wrong = any(difference(course, one_process(toy, 1, 6)) for course in courses)
    assert is_wrong or "out of step" in said


@pytest.mark.long
def test_a_tied_gradient_that_is_summed_again_with_the_replicas_is_caught(ranks: GetRanks) -> None:
    axes = Axes(2, pipeline=2, schedule="gpipe")
    bug = "tied gradient summed twice"
    courses = ranks(4).run(run_with_bug, bug, axes, "zero1", deadline_s=60)
    assert difference(courses[0], one_process("gpt2", 2, 6))


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


class Thing:
    def __init__(self, value: Tensor) -> None:
        self.value = value


class Wrapping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Any) -> Thing:
        return Thing(self.layer(getattr(x, "value", x)))


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Wrapping() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        out: Tensor = x.value  # type: ignore[attr-defined]
        return out


class OneTrains(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.layers[:-1].requires_grad_(False)


REFUSALS = {
    "unet": (UNet, [f"blocks.{i}" for i in range(6)], 4, "reads the output of 'blocks.0'"),
    "twice": (Twice, ["layers.0", "layers.2"], 2, "'layers.0' is called more than once"),
    "few": (Plain, ["layers.0", "layers.2"], 3, "can be cut into 2 (2 blocks)"),
    "none": (Plain, [], 2, "the workload names no blocks"),
    "wrapped": (Wrapped, [f"blocks.{i}" for i in range(4)], 2, "returns a Thing, which cannot be"),
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
    value = loss(model, sample) if kind is not Wrapped else torch.zeros(())
    assert torch.isfinite(value)  # it runs as before


def cut_of(world: World, kind: Any, blocks: list[str], hides: bool) -> str:
    torch.manual_seed(0)
    model = kind().double()
    sample = batch_of(TOYS["plain"], 0, 0, 0)
    make_optimizer = factory.of_class(torch.optim.SGD, lr=0.1)
    setup = Setup(model, make_optimizer, loss, world.mesh, blocks=blocks, sample=sample)
    single = naming.resolve("single", STRATEGIES, "strategy")
    hiding = mock.patch.object(stages, "_blocking", return_value=None) if hides else nullcontext()
    try:
        with hiding:
            strategy = OnMesh(setup, Axes(1, pipeline=2), single)
        return str(float(strategy.gradients([sample])))
    except UsageError as error:
        return str(error)


def test_a_value_that_finds_a_way_around_a_cut_is_not_silent(ranks: GetRanks) -> None:
    blocks = [f"blocks.{i}" for i in range(6)]
    assert ranks(2).run(cut_of, UNet, blocks, True) == ["nan", "nan"]


def test_a_stage_in_which_nothing_trains_is_refused(ranks: GetRanks) -> None:
    blocks = [f"layers.{i}" for i in range(0, 17, 2)]
    for text in ranks(2).run(cut_of, OneTrains, blocks, False):
        assert "no parameter of stage 0 trains" in text


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


# ------------------------------------------------------------------ hooks and evaluation


class Hooked(Plain):
    """A gradient hook of the model's own that is not linear."""

    def __init__(self) -> None:
        super().__init__()
        for p in self.parameters():
            if p.requires_grad:
                p.register_hook(lambda g: g.clamp(-0.002, 0.002))


def hooked(world: World | None, micro: int) -> dict[str, Tensor | None]:
    torch.manual_seed(0)
    model = Hooked().double()
    batches = [batch_of(TOYS["plain"], 0, 0, m) for m in range(micro)]
    if world is None:
        total = sum(b.count for b in batches)
        for b in batches:
            (loss(model, b) / total).backward()
        return {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    make_optimizer = factory.of_class(torch.optim.SGD, lr=0.1)
    setup = Setup(
        model, make_optimizer, loss, world.mesh, blocks=TOYS["plain"].blocks, sample=batches[0]
    )
    axes = Axes(1, pipeline=2, schedule="zero_bubble")
    strategy = OnMesh(setup, axes, naming.resolve("single", STRATEGIES, "strategy"))
    strategy.gradients(batches)
    return strategy.full_grads()


def test_hooks_of_the_models_own_see_each_micro_batch_once(ranks: GetRanks) -> None:
    expected = hooked(None, 3)
    for found in ranks(2).run(hooked, 3):
        assert found.keys() == expected.keys()
        for n, wanted in expected.items():
            got = found[n]
            assert got is not None
            assert wanted is not None
            assert torch.allclose(got, wanted, rtol=0, atol=TOLERANCE), n


def evaluated(world: World, name: str, schedule: str) -> tuple[Tensor, Tensor]:
    toy = TOYS[name]
    axes = Axes(1, pipeline=world.size, schedule=schedule)
    strategy = make(world, name, axes)
    batch = batch_of(toy, 0, 0, 1)

    def function(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        first = toy.loss(model, batch)
        return first, toy.loss(model, batch.map(lambda t: t.flip(0)))  # a second call

    return strategy.infer(function, batch)


@pytest.mark.parametrize(
    ("name", "schedule"), [("llama", "interleaved"), ("gpt2", "zbv"), ("pairs", "1f1b")]
)
def test_every_rank_gets_what_the_model_returns(name: str, schedule: str, ranks: GetRanks) -> None:
    toy = TOYS[name]
    model, batch = built(toy, 0), batch_of(toy, 0, 0, 1)
    with torch.no_grad():
        wanted = toy.loss(model, batch), toy.loss(model, batch.map(lambda t: t.flip(0)))
    for found in ranks(2).run(evaluated, name, schedule):
        for a, b in zip(found, wanted, strict=True):
            assert torch.allclose(a, b, rtol=0, atol=TOLERANCE)


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
    """A block that sleeps as long in forward, input gradient and weight gradient."""

    split = False  # the weight gradient sleeps by itself

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Nap.apply(self.layer(x), NAP_S if self.split else 2 * NAP_S)  # type: ignore[no-untyped-call]
        return out


class Sleepers(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Sleeper() for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def nap_of_weight(*args: Any) -> Any:
    time.sleep(NAP_S)
    return _of_weight(*args)


_of_weight, _wait = pipeline._of_weight, comm.Pending.wait


def one_way_s(world: World) -> float:
    """The median time of a small message."""
    times = []
    x = torch.zeros(16)
    for turn in range(30):
        begin = time.perf_counter()
        if world.rank == 0:
            comm.send(x, world.group, 1, tag=turn)
            comm.recv(x, world.group, 1, tag=turn)
        elif world.rank == 1:
            comm.recv(x, world.group, 0, tag=turn)
            comm.send(x, world.group, 0, tag=turn)
        times.append((time.perf_counter() - begin) / 2)
    return sorted(times)[len(times) // 2]


def asleep(world: World, schedule: str, micro: int) -> dict[str, Any]:
    """How long a step takes, and what this rank worked in it, by kind of action."""
    split = any(a.kind == "W" for a in schedules.schedule(schedule, world.size, 1)[0])
    Sleeper.split = split
    chunks = schedules.chunks_of(schedule)
    model = Sleepers(world.size * chunks)
    sample = Batch(torch.randn(1, 8), None, 1, 1)
    setup = Setup(
        model,
        factory.of_class(torch.optim.SGD, lr=0.1),
        lambda model, batch: model(batch.inputs).sum(),
        world.mesh,
        blocks=[f"blocks.{i}" for i in range(world.size * chunks)],
        sample=sample,
    )
    axes = Axes(1, pipeline=world.size, schedule=schedule)
    with mock.patch.object(pipeline, "_of_weight", nap_of_weight):
        strategy = OnMesh(setup, axes, naming.resolve("single", STRATEGIES, "strategy"))
        strategy.gradients([sample] * micro)  # shapes are exchanged
        worked: dict[str, list[float]] = {"F": [], "B": [], "W": []}

        waited_s = 0.0

        def wait(pending: Any) -> None:
            nonlocal waited_s
            begin = time.perf_counter()
            _wait(pending)
            waited_s += time.perf_counter() - begin

        def timed(kind: str, function: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                begin, before = time.perf_counter(), waited_s
                result = function(*args, **kwargs)
                took = time.perf_counter() - begin - (waited_s - before)
                worked[kind].append(took)
                return result

            return call

        message_s = one_way_s(world)
        with (
            mock.patch.object(Pipeline, "_forward", timed("F", Pipeline._forward)),
            mock.patch.object(Pipeline, "_weights", timed("W", _weights)),
            mock.patch.object(Pipeline, "_backward", timed("B", _backward)),
            mock.patch.object(comm.Pending, "wait", wait),
        ):
            comm.barrier(world.group)
            begin = time.perf_counter()
            strategy.gradients([sample] * micro)
            took = time.perf_counter() - begin
    return {"took": took, "worked": worked, "message": message_s}


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_bubble_is_the_schedules(schedule: str, ranks: GetRanks) -> None:
    """Stages that sleep, so that four ranks fit on two cores, against the simulation with the
    times that they took and that of a message."""
    micro, lists = 8, schedules.schedule(schedule, 4, 8)
    errors = []
    for _ in range(3):
        found = ranks(4).run(asleep, schedule, micro, deadline_s=60)

        def mean(kind: str, found: Any = found) -> float:
            every = [s for rank in found for s in rank["worked"][kind]]
            return sum(every) / max(1, len(every))

        split = bool(found[0]["worked"]["W"])
        backward = mean("B") if split else mean("B") / 2
        times = schedules.Times(
            mean("F"), backward, mean("W") if split else backward, found[0]["message"]
        )
        took = max(rank["took"] for rank in found)
        worked = sum(s for rank in found for of in rank["worked"].values() for s in of)
        errors.append((4 * took - worked) / worked - schedules.bubble(lists, times))
        if abs(errors[-1]) < 0.03:
            return
    raise AssertionError(errors)
