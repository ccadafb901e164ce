"""A pipeline of ranks against one plain process: every schedule, odd models, planted bugs."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from conftest import GetRanks, long_unless
from shardlab import naming
from shardlab.axes import Axes
from shardlab.errors import UsageError
from shardlab.naming import STRATEGIES
from shardlab.optim import factory
from shardlab.run.ranks import Ranks
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


class Tied(nn.Module):
    """A tied and a frozen embedding, parameters that nobody or only some data uses, a statistic
    before the first block and one in each, and a sum before the head of what came first."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.places = nn.Embedding(6, 6).requires_grad_(False)
        self.norm = nn.BatchNorm1d(6)
        self.blocks = nn.ModuleList(
            Branch(6 + 2 * (i % 2), 6 + 2 * ((i + 1) % 2)) for i in range(8)
        )
        self.never = nn.Linear(6, 3)
        self.sometimes = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:  # (rows, 6), read as tokens
        tokens = (x.abs() * 10).long() % 11
        stream = self.embed(tokens) + self.places.weight  # (rows, 6, 6)
        if len(x) and x[0, 0] > 0:
            stream = stream + self.sometimes(stream)
        if len(x) > 1:
            stream = stream + self.norm(stream.mean(1))[:, None]
        y = stream
        for block in self.blocks:
            y = block(y)
        out: Tensor = self.head(y + stream).mean(1)  # past all blocks: each stage makes it again
        return out


class Branch(nn.Module):
    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.main, self.extra = nn.Linear(inside, outside), nn.Linear(inside, outside)
        self.frozen = nn.Linear(inside, outside).requires_grad_(False)
        self.register_buffer("drift", torch.zeros(outside))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.tanh(self.main(x)) + 0.1 * self.frozen(x) + self.drift
        if len(x):
            with torch.no_grad():
                self.drift.mul_(0.9).add_(0.1 * out.mean((0, 1)))
        return out + self.extra(x) if len(x) and x.mean() > 0 else out


class Plain(nn.Module):
    """Uneven layers in a Sequential, the first of which do not train."""

    def __init__(self) -> None:
        super().__init__()
        widths = [6, 9, 4, 17, 5, 8, 3, 12, 7]
        parts: list[nn.Module] = []
        for a, b in zip(widths, widths[1:], strict=False):
            parts += [nn.Linear(a, b), nn.Tanh()]
        self.layers = nn.Sequential(*parts, nn.Linear(7, 3))
        self.layers[0].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
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
    bug: str = "",
) -> tuple[Course, int]:
    if bug:
        return BUGS[bug](lambda: run(world, name, axes, micro, inner, clip))
    toy, strategy = TOYS[name], make(world, name, axes, inner, clip)
    share, _ = axes.data_share(world.rank)
    course: Course = []
    for step in range(STEPS):
        batches = [batch_of(toy, step, share, m) for m in range(micro)]
        value = float(strategy.gradients(batches))
        grads = strategy.full_grads()
        strategy.step()
        course.append((value, grads, strategy.full_params()))
    executor: pipeline.Pipeline = strategy.loss_fn.__self__  # type: ignore[attr-defined]
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


CASES = [
    (toy, schedule, world, micro)
    for toy in TOYS
    for schedule in SCHEDULES
    for world, micro in ((2, 1), (2, 3), (4, 2), (4, 6))
    if world == 2 or toy in ("tied", "pairs") or schedule in ("1f1b", "zbv")
]


def is_quick(toy: str, schedule: str, world: int, micro: int) -> bool:
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


BUGS: dict[str, Callable[..., Any]] = {}
