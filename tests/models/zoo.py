"""Small models written the way people write them, each with the reason why it is here.

An animal says what must happen to it under each strategy: the result equals one plain process, or
the strategy refuses it in one line that holds the words given here. ``docs/zoo.md`` is the table.

To add one: write a class with ``@animal("why it is here")``. ``Net`` is a start: three blocks and a
head. A class may have a ``loss`` of its own, and an ``evaluate`` that is run between two steps. The
default is that every strategy equals one process; ``refused`` names those that do not.
"""

from __future__ import annotations

import copy
import functools
import re
import threading
import warnings
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from shardlab.naming import STRATEGIES
from shardlab.workloads.base import Batch

STEPS = 3
MICRO = 2
W = 6  # the width of inputs and blocks
CLASSES = 3
THREE = ("blocks.0", "blocks.1", "blocks.2")

GROUPS = {  # names for several strategies at once
    "all": tuple(STRATEGIES),
    "ours": tuple(s for s in STRATEGIES if not s.startswith("pytorch_")),
    "ddp": ("pytorch_ddp", "pytorch_zero1"),
    "fsdp": ("pytorch_zero2", "pytorch_zero3", "pytorch_hsdp"),
    "fsdp3": ("pytorch_zero3", "pytorch_hsdp"),  # which free parameters after forward
    "pytorch": tuple(s for s in STRATEGIES if s.startswith("pytorch_")),
    "flat": ("zero1", "zero2", "zero3"),
    "buckets": ("simple_ddp_hook", "simple_ddp_async", "bucket_ddp_async", "zero1", "zero2"),
    "ranks": tuple(s for s in STRATEGIES if s != "single"),
}


# Words of refusals that several animals meet.
OUTSIDE = "outside the forward of its block"
IN_STEP = "same blocks in the same order"
TIED = "are one parameter in two"
ONE_DTYPE = "the same dense type"
REENTRANT = "re-entrant checkpointing"


@dataclass(frozen=True, slots=True)
class Sample(Batch):
    """A batch that knows when and where it is used: models may behave differently by step."""

    step: int
    rank: int


@dataclass(frozen=True, eq=False)  # each is itself
class Animal:
    name: str
    why: str
    make: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Any], Tensor]
    blocks: tuple[str, ...]
    evaluate: Callable[[nn.Module, Any], Tensor] | None
    refused: Mapping[str, str]  # strategy: words of its refusal
    empty_ranks: bool  # whether some batches have no rows
    shows_at: int  # the first step in which it does what a strategy may refuse; -1: when it is made
    tolerance: float

    def build(self, seed: int) -> nn.Module:
        torch.default_generator.manual_seed(seed)
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            return self.make()
        finally:
            torch.set_default_dtype(before)

    def batch(self, step: int, rank: int, micro: int) -> Sample:
        """Different for each argument; ragged in rows, and some labels do not count."""
        generator = torch.Generator().manual_seed(10_000 * step + 100 * rank + micro)
        rows = [4, 2, 3][(step + 2 * rank + micro) % 3]
        if self.empty_ranks and rank > 0 and (step + rank + micro) % 4 == 0:
            rows = 0
        x = torch.randn(rows, W, generator=generator, dtype=torch.float64)
        y = torch.randint(0, CLASSES, (rows,), generator=generator)
        y[1:][torch.rand(rows, generator=generator)[1:] < 0.25] = -100  # labels that do not count
        return Sample(x, y, int((y != -100).sum()), rows, step, rank)


ZOO: dict[str, Animal] = {}


def animal(
    why: str,
    *,
    blocks: tuple[str, ...] = THREE,
    refused: Mapping[str, str] | None = None,
    empty_ranks: bool = True,
    shows_at: int = 0,
    tolerance: float = 1e-9,
) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """Put a class into the zoo, under its name in small letters."""

    def add(model: type[nn.Module]) -> type[nn.Module]:
        name = re.sub(r"(?<!^)(?=[A-Z])", "_", model.__name__).lower()
        assert name not in ZOO, name
        words = {s: text for key, text in (refused or {}).items() for s in GROUPS.get(key, (key,))}
        loss, evaluate = getattr(model, "loss", cross_entropy), getattr(model, "evaluate", None)
        ZOO[name] = Animal(
            name, why, model, loss, blocks, evaluate, words, empty_ranks, shows_at, tolerance
        )
        return model

    return add


def cross_entropy(model: nn.Module, batch: Sample) -> Tensor:
    return score(model(batch.inputs), batch)


def score(logits: Tensor, batch: Sample) -> Tensor:
    return F.cross_entropy(logits, batch.targets, reduction="sum", ignore_index=-100)


def by_step(model: nn.Module, batch: Sample) -> Tensor:
    """For models whose forward depends on the step."""
    return score(model(batch.inputs, batch.step), batch)


def by_step_and_rank(model: nn.Module, batch: Sample) -> Tensor:
    return score(model(batch.inputs, batch.step, batch.rank), batch)


def says_so(x: Tensor) -> bool:
    """What the data decides: it differs between ranks and micro-batches."""
    return bool(len(x)) and bool(x[0, 0] > 0)


def tokens(x: Tensor, of: int = 11) -> Tensor:
    """Inputs (rows, width) read as token numbers."""
    return (x.abs() * 10).long() % of


class Block(nn.Module):
    def __init__(self, width: int = W) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:  # (rows, width)
        return x + torch.tanh(self.linear(x))


class Net(nn.Module):
    """Three blocks and a head, one after another: what the animals change."""

    BLOCK: Callable[[], Any] = Block

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.BLOCK() for _ in range(depth))
        self.head = nn.Linear(W, CLASSES, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (rows, width)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def changed(why: str, **about: Any) -> Callable[[Callable[[Any], None]], None]:
    """Put a net into the zoo that a function changes once it is built, under its name."""

    def add(change: Callable[[Any], None]) -> None:
        class Changed(Net):
            def __init__(self) -> None:
                super().__init__()
                change(self)

        Changed.__name__ = change.__name__
        animal(why, **about)(Changed)

    return add


# ------------------------------------------------------------------ what trains, and when


@animal("the simplest: if this fails, look here first")
class Plain(Net):
    pass


@changed("the first block is frozen: backward never comes to it")
def first_block_frozen(net: Any) -> None:
    net.blocks[0].requires_grad_(False)


@changed("a frozen block in the middle: gradients go through it, its own are not wanted")
def middle_block_frozen(net: Any) -> None:
    net.blocks[1].requires_grad_(False)


@changed("linear probing: every block is frozen, only the head trains")
def only_the_head_trains(net: Any) -> None:
    net.blocks.requires_grad_(False)


@changed("only the first block trains: backward must come all the way")
def only_the_first_block_trains(net: Any) -> None:
    net.requires_grad_(False)
    net.blocks[0].requires_grad_(True)


class Adapted(Block):
    def __init__(self) -> None:
        super().__init__()
        self.linear.requires_grad_(False)
        self.down, self.up = nn.Linear(W, 2, bias=False), nn.Linear(2, W, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x) + self.up(self.down(x)))


@animal("LoRA: a frozen base, adapters that train inside each block")
class Lora(Net):
    BLOCK = Adapted


@animal("the first block runs under no_grad: its parameters train in theory")
class FirstBlockNoGrad(Net):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.blocks[0](x)
        for block in self.blocks[1:]:
            x = block(x)
        return self.head(x)


@animal("a block's output is thrown away: it runs, and backward never comes")
class OutputUnused(Net):
    def forward(self, x: Tensor) -> Tensor:
        self.blocks[0](x)
        return self.head(self.blocks[2](self.blocks[1](x)))


@animal("the last block's output is thrown away: backward begins before it")
class LastOutputUnused(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[1](self.blocks[0](x))
        self.blocks[2](x)
        return self.head(x)


@animal("detach between two blocks: the first ones get no gradient")
class DetachBetween(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[1](self.blocks[0](x)).detach()
        return self.head(self.blocks[2](x))


@animal("one block trains at a time, in turn: requires_grad changes between steps", shows_at=1)
class AlternatingFreeze(Net):
    loss = staticmethod(by_step)

    def forward(self, x: Tensor, step: int) -> Tensor:
        for i, block in enumerate(self.blocks):
            block.requires_grad_(i == step % 3)
        return super().forward(x)


@animal("all trains in step 0, then the first block is frozen for good", shows_at=1)
class FrozenLater(Net):
    loss = staticmethod(by_step)

    def forward(self, x: Tensor, step: int) -> Tensor:
        self.blocks[0].requires_grad_(step == 0)
        return super().forward(x)


@animal("frozen when the optimizer is made, unfrozen later: one process does not train it either")
class UnfrozenTooLate(Net):
    loss = staticmethod(by_step)

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].requires_grad_(False)

    def forward(self, x: Tensor, step: int) -> Tensor:
        self.blocks[0].requires_grad_(step > 0)
        return super().forward(x)


@animal("used, and frozen before backward: its hooks are called without a gradient")
class FrozenAfterUse(Net):
    loss = staticmethod(by_step)

    def forward(self, x: Tensor, step: int) -> Tensor:
        self.blocks[0].requires_grad_(True)
        out = super().forward(x)
        self.blocks[0].requires_grad_(step == 0)
        return out


@changed("a parameter that nothing uses: its gradient is None, and no decay touches it")
def unused_parameter(net: Any) -> None:
    net.blocks[1].never = nn.Parameter(torch.ones(5))
    net.never = nn.Parameter(torch.ones(3))


@animal("a block that forward never comes to")
class UnusedBlock(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks[2](self.blocks[0](x)))


class Partly(Block):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(W, W)
        self.uses = True

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.extra(x) if self.uses else x)


@animal("a part of each block is not used in the last step")
class PartUnusedLater(Net):
    loss = staticmethod(by_step_and_rank)

    BLOCK = Partly

    def uses(self, step: int, _rank: int) -> bool:
        return step < 2

    def forward(self, x: Tensor, step: int, rank: int) -> Tensor:
        for block in self.blocks:
            block.uses = self.uses(step, rank)
        return super().forward(x)


@animal("a part of each block is not used in the first step, and after that by all")
class PartUnusedAtFirst(PartUnusedLater):
    def uses(self, step: int, _rank: int) -> bool:
        return step > 0


@animal("a part of each block is not used in the first step, and after that on one rank only")
class PartOnOneRankAfterNone(PartUnusedLater):
    def uses(self, step: int, rank: int) -> bool:
        return step > 0 and rank == 0


@animal("a part of each block is used on one rank only")
class PartOnOneRank(PartUnusedLater):
    def uses(self, _step: int, rank: int) -> bool:
        return rank == 0


@animal("a part of each block is used on one rank only, in the last step")
class PartOnOneRankLater(PartUnusedLater):
    def uses(self, step: int, rank: int) -> bool:
        return step < 2 or rank == 0


@animal("in one step nothing trains", shows_at=1, refused={
    "all": "depends on no parameter that requires a gradient",
})  # fmt: skip
class NothingTrainsOnce(Net):
    loss = staticmethod(by_step)

    def forward(self, x: Tensor, step: int) -> Tensor:
        self.requires_grad_(step != 1)
        return super().forward(x)


# ------------------------------------------------------------------ order, branches, reuse


@animal("blocks are listed in the reverse of the order in which they run", blocks=THREE[::-1])
class ListedBackwards(Net):
    pass


@animal("the order of the blocks changes from step to step", shows_at=1)
class OrderChanges(Net):
    loss = staticmethod(by_step)

    def forward(self, x: Tensor, step: int) -> Tensor:
        for i in range(3):
            x = self.blocks[(i + step) % 3](x)
        return self.head(x)


@animal("two branches from one input: backward takes them in an order of its own")
class TwoBranches(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks[0](x) * self.blocks[1](x) + self.blocks[2](x))


@animal("two towers that meet in the loss: two outputs, two ends of backward")
class TwoTowers(Net):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.head(self.blocks[0](x)), self.head(self.blocks[2](self.blocks[1](x)))

    @staticmethod
    def loss(model: nn.Module, batch: Sample) -> Tensor:
        left, right = model(batch.inputs)
        return score(left, batch) + score(right, batch)


@animal("a U-Net's skips: early outputs are used again at the end")
class Skips(Net):
    def forward(self, x: Tensor) -> Tensor:
        first = self.blocks[0](x)
        second = self.blocks[1](first)
        return self.head(self.blocks[2](second) + first + second)


@animal("blocks take turns, three times over")
class SharedThrice(Net):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            for block in self.blocks:
                x = block(x)
        return self.head(x)


@animal("ALBERT: the only block there is makes all layers", blocks=("blocks.0",))
class Albert(Net):
    def __init__(self) -> None:
        super().__init__(depth=1)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = self.blocks[0](x)
        return self.head(x)


class Recursive(Block):
    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        x = super().forward(x)
        return self(x, depth - 1) if depth else x


@animal("a block that calls itself")
class Recursion(Net):
    BLOCK = Recursive


@animal("a module that a block and the root both call", blocks=("blocks.0", "blocks.1", "shared"))
class CalledFromTwoPlaces(Net):
    def __init__(self) -> None:
        super().__init__(depth=2)
        self.shared = nn.Linear(W, W)

    def forward(self, x: Tensor) -> Tensor:
        x = self.shared(self.blocks[0](self.shared(x)))
        return self.head(self.blocks[1](x))


@animal(
    "the model is called twice before one backward, which needs a buffer: the second forward must "
    "not overwrite it"
)
class CalledTwiceWithABuffer(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.linspace(0.5, 1, W))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.blocks[0](x) * self.scale)

    @staticmethod
    def loss(model: nn.Module, batch: Sample) -> Tensor:
        one, two = model(batch.inputs), model(batch.inputs * 0.5)
        return score(one, batch) + (one - two).square().sum()


@animal("an evaluation that calls the model twice, between two steps of training")
class EvaluatesTwice(Net):
    @staticmethod
    def evaluate(model: nn.Module, batch: Sample) -> Tensor:
        return score(model(batch.inputs) + model(batch.inputs * 0.5), batch)


@animal("the same module under two names, both of them listed", blocks=(*THREE, "last"))
class ListedTwice(Net):
    def __init__(self) -> None:
        super().__init__()
        self.last = self.blocks[2]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.last(self.blocks[1](self.blocks[0](x))))


@animal("one layer norm serves every block", refused={"fsdp": TIED})
class SharedNorm(Net):
    def __init__(self) -> None:
        super().__init__()
        norm = nn.LayerNorm(W)
        for block in self.blocks:
            block.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block.norm(block(x))
        return self.head(x)


@animal("a block inside a block, both named", blocks=("blocks.0", "blocks.0.inner", "blocks.1"))
class NestedBlocks(Net):
    def __init__(self) -> None:
        super().__init__(depth=2)
        self.blocks[0] = Outer()


class Outer(Block):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.inner(x))


@animal("the inner block is named before the outer", blocks=("blocks.0.inner", "blocks.0"))
class NestedInnerFirst(Net):
    def __init__(self) -> None:
        super().__init__(depth=1)
        self.blocks[0] = Outer()


@animal("no blocks are named: all is root", blocks=())
class NoBlocks(Net):
    pass


@animal("one block only", blocks=("blocks.1",))
class OneBlock(Net):
    pass


@animal("everything is in blocks: the root has nothing", blocks=(*THREE, "head"))
class EmptyRoot(Net):
    pass


@animal("many blocks, so small that most ranks have none of it", blocks=tuple(map(str, range(12))))
class ManyTinyBlocks(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*(nn.LayerNorm(W, bias=i % 2 == 0) for i in range(12)), nn.Linear(W, 3))


@animal("a block that has no parameters", blocks=("blocks.0", "blocks.1", "quiet"))
class ParameterlessBlock(Net):
    def __init__(self) -> None:
        super().__init__()
        self.quiet = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.quiet(x))


@changed("blocks of very different sizes")
def uneven_blocks(net: Any) -> None:
    net.blocks[1] = nn.Sequential(nn.Linear(W, 41), nn.Tanh(), nn.Linear(41, W))
    net.blocks[2] = nn.LayerNorm(W, bias=False)


# ------------------------------------------------------------------ what the data decides


@animal("the data decides in which order two blocks run: ranks differ", refused={"fsdp": IN_STEP})
class DataDependentOrder(Net):
    def forward(self, x: Tensor) -> Tensor:
        first, second = (0, 1) if says_so(x) else (1, 0)
        return self.head(self.blocks[2](self.blocks[second](self.blocks[first](x))))


@animal("the data decides how often a block is run", refused={"fsdp": IN_STEP})
class DataDependentDepth(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        for _ in range(3 if says_so(x) else 1):
            x = self.blocks[1](x)
        return self.head(self.blocks[2](x))


@animal(
    "early exit: the rest of the model is not run where the data says so", refused={"fsdp": IN_STEP}
)
class EarlyExit(Net):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            if says_so(x):
                break
        return self.head(x)


@animal("a block is run on rank 1 only", refused={"fsdp": IN_STEP})
class BlockOnOneRank(Net):
    def forward(self, x: Tensor, rank: int) -> Tensor:
        x = self.blocks[0](x)
        if rank == 1:
            x = self.blocks[1](x)
        return self.head(self.blocks[2](x))

    @staticmethod
    def loss(model: nn.Module, batch: Sample) -> Tensor:
        return score(model(batch.inputs, batch.rank), batch)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(W, 3)
        self.experts = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        gate = self.router(x).softmax(-1)  # (rows, experts)
        choice = gate.argmax(-1)  # (rows,)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows = (choice == i).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * gate[rows, i, None])
        return out


@animal(
    "a mixture of experts inside each block, the best one only: some are unused on some ranks",
    refused={"fsdp": IN_STEP},
)
class ExpertsInBlocks(Net):
    BLOCK = Experts


@animal(
    "each expert is a block: whether it is run depends on the data",
    blocks=tuple(f"mixture.experts.{i}" for i in range(3)),
    refused={"fsdp": IN_STEP},
)
class ExpertsAreBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixture = Experts()
        self.head = nn.Linear(W, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.mixture(x))


class Dropped(Block):
    """Stochastic depth that goes by the step, so that one process does the same."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = False

    def forward(self, x: Tensor) -> Tensor:
        return x if self.drop else super().forward(x)


@animal("stochastic depth: a dropped block returns its own input, the first one the model's own")
class StochasticDepth(Net):
    loss = staticmethod(by_step)

    BLOCK = Dropped

    def forward(self, x: Tensor, step: int) -> Tensor:
        for i, block in enumerate(self.blocks):
            block.drop = (i + step) % 3 == 0
        return super().forward(x)


@animal("LayerDrop: in each step another block is left out altogether")
class LayerDrop(Net):
    loss = staticmethod(by_step)

    def forward(self, x: Tensor, step: int) -> Tensor:
        for i, block in enumerate(self.blocks):
            if i != step % 3:
                x = block(x)
        return self.head(x)


@animal(
    "LayerDrop that is off where FSDP runs it, as in transformers' speech models: one process drops"
)
class LayerDropUnlessFsdp(LayerDrop):
    def forward(self, x: Tensor, step: int) -> Tensor:
        if not getattr(self, "_is_fsdp_managed_module", False):
            return super().forward(x, step)
        return Net.forward(self, x)


# ------------------------------------------------------------------ what blocks take and give


class Biased(nn.Module):
    def __init__(self, first: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(W, W)
        self.bias = nn.Embedding(4, W) if first else None

    def forward(self, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        if bias is None:
            assert self.bias is not None
            bias = self.bias(torch.tensor([1, 2])).sum(0)  # (width,)
        return x + torch.tanh(self.linear(x) + bias), bias


@animal("T5's position bias: every block returns a tensor that the first one made")
class PositionBias(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Biased(i == 0) for i in range(3))

    def forward(self, x: Tensor) -> Tensor:
        bias = None
        for block in self.blocks:
            x, bias = block(x, bias)
        return self.head(x)


class Memory(Block):
    def forward(self, x: Tensor, before: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        out = super().forward(x + sum(before[1:], before[0]))
        return out, [*before, out]


@animal("blocks hand on a growing list of all earlier outputs (DenseNet)")
class GrowingList(Net):
    BLOCK = Memory

    def forward(self, x: Tensor) -> Tensor:
        seen = [x]
        for block in self.blocks:
            x, seen = block(x, seen)
        return self.head(x)


@dataclass
class Result:
    hidden: Tensor
    note: str = ""
    extra: list[Tensor] = field(default_factory=list)


Pair = namedtuple("Pair", ["hidden", "note"])


class ModelOutput(OrderedDict):  # type: ignore[type-arg]
    """As in transformers: a dict with attributes."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__(hidden=hidden)

    @property
    def hidden(self) -> Tensor:
        return self["hidden"]


class Opaque:
    """Something that no tree knows to look into."""

    __slots__ = ("hidden",)

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


# How a block wraps what it returns, and how that is taken out again.
WRAPS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "dataclass": (Result, lambda out: out.hidden),
    "named_tuple": (lambda y: Pair(y, None), lambda out: out.hidden),
    "output": (ModelOutput, lambda out: out.hidden),
    "opaque": (Opaque, lambda out: out.hidden),
    "nested": (lambda y: ({"a": [y, None, "text"]}, 3), lambda out: out[0]["a"][0]),
    "views": (lambda y: y.chunk(2, -1), lambda out: torch.cat(out[::-1], -1)),
    "iterator": (lambda y: iter([y]), next),
}


class Wrapped(Block):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        return WRAPS[self.kind][0](super().forward(x))


class Wrapping(Net):
    """A net whose blocks wrap their output."""

    KIND = ""

    def __init__(self) -> None:
        self.BLOCK = functools.partial(Wrapped, self.KIND)
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = WRAPS[self.KIND][1](block(x))
        return self.head(x)


@animal("blocks return a dataclass")
class DataclassOutput(Wrapping):
    KIND = "dataclass"


@animal("blocks return a named tuple with a None in it")
class NamedtupleOutput(Wrapping):
    KIND = "named_tuple"


@animal("blocks return a dict with attributes, as transformers' models do")
class ModelOutputs(Wrapping):
    KIND = "output"


@animal("blocks return an object that only they know", refused={"fsdp3": "finds no tensor"})
class OpaqueOutput(Wrapping):
    KIND = "opaque"


@animal("blocks return dicts in lists in tuples")
class NestedOutput(Wrapping):
    KIND = "nested"


@animal("blocks return an iterator of tensors", refused={"fsdp3": "finds no tensor"})
class IteratorOutput(Wrapping):
    KIND = "iterator"


@animal("blocks return views of one tensor")
class ViewsReturned(Wrapping):
    KIND = "views"


@animal("the model itself returns a dataclass with several tensors")
class DataclassOfTheModel(Net):
    def forward(self, x: Tensor) -> Result:
        hidden = self.blocks[1](self.blocks[0](x))
        return Result(self.head(hidden), "ok", [self.head(self.blocks[2](hidden))])

    @staticmethod
    def loss(model: nn.Module, batch: Sample) -> Tensor:
        out = model(batch.inputs)
        return score(out.hidden, batch) + score(out.extra[0], batch)


@animal(
    "the model itself returns an object that only it knows",
    refused={
        "ddp": "or an output that it cannot look into",
        "fsdp3": "finds no tensor",
    },
)
class OpaqueOutputOfTheModel(Net):
    def forward(self, x: Tensor) -> Any:
        return Opaque(super().forward(x))

    @staticmethod
    def loss(model: nn.Module, batch: Sample) -> Tensor:
        return score(model(batch.inputs).hidden, batch)


@animal(
    "the same, and all is root: nothing tells FSDP of backward",
    blocks=(),
    refused={"ddp": "or an output that it cannot look into", "fsdp": "finds no tensor"},
)
class OpaqueOutputOfTheRoot(OpaqueOutputOfTheModel):
    pass


class Keywords(Block):
    def forward(self, *, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        out = super().forward(hidden)
        return out if mask is None else out * mask


@animal("blocks take keyword arguments only, some of them None")
class KeywordOnly(Net):
    BLOCK = Keywords

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            x = block(hidden=x, mask=None if i else torch.ones(W))
        return self.head(x)


class FromDict(Block):
    def forward(self, state: dict[str, Any]) -> None:
        state["hidden"] = super().forward(state["hidden"])


@animal(
    "blocks return None: they write into a dict that they are given",
    refused={"fsdp": "writes into a dict that it is given"},
)
class NoneOutput(Net):
    BLOCK = FromDict

    def forward(self, x: Tensor) -> Tensor:
        state = {"hidden": x}
        for block in self.blocks:
            block(state)
        return self.head(state["hidden"])


class Appending(Block):
    def forward(self, x: Tensor, losses: list[Tensor]) -> Tensor:
        losses.append(self.linear.bias.square().sum())
        return super().forward(x)


@animal(
    "blocks add to a list of losses that they are given, as mixtures of experts do",
    refused={"fsdp": "writes into a list that it is given"},
)
class CollectedLosses(Net):
    BLOCK = Appending

    def forward(self, x: Tensor) -> Tensor:
        losses: list[Tensor] = []
        for block in self.blocks:
            x = block(x, losses)
        return self.head(x + sum(losses))


class GivesWeight(Block):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), self.linear.weight


@animal(
    "blocks return a parameter of their own, which is used after them",
    refused={"fsdp3": "is used after the block"},
)
class ReturnsItsWeight(Net):
    BLOCK = GivesWeight

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x, weight = block(x)
            x = x + x @ weight * 0.1
        return self.head(x)


@animal("outputs of blocks are changed in place")
class InPlaceOnOutputs(Net):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            x += 1
            x.mul_(0.9)
        return self.head(x)


class Viewing(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.tanh(x)).view(-1, W)


@animal(
    "outputs of blocks are views, and are changed in place",
    refused={"fsdp3": "its output was changed in place"},
)
class InPlaceOnViews(InPlaceOnOutputs):
    BLOCK = Viewing


@animal("the model's own output is changed in place, by its forward and by the loss")
class InPlaceOnTheLastOutput(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).mul_(2)

    @staticmethod
    def loss(model: nn.Module, batch: Sample) -> Tensor:
        return score(model(batch.inputs).add_(1), batch)


class InPlace(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x.add_(torch.tanh(self.linear(x.clone())))


@animal(
    "blocks change their input in place and return it",
    refused={"fsdp": "changes its input in place"},
)
class InPlaceOnInputs(Net):
    BLOCK = InPlace

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * 1.0)


class Balanced(Block):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.aux = out.square().sum()
        return out


@animal("blocks keep a loss on themselves (router balance), which the loss collects")
class AuxiliaryLosses(Net):
    BLOCK = Balanced

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out = super().forward(x)
        return out, sum(block.aux for block in self.blocks)

    @staticmethod
    def loss(model: nn.Module, batch: Sample) -> Tensor:
        out, aux = model(batch.inputs)
        return score(out, batch) + 0.01 * aux


# ------------------------------------------------------------------ parameters beside their block


@animal("an L2 penalty over model.parameters(), written in the loss", refused={"fsdp": OUTSIDE})
class PenaltyInLoss(Net):
    @staticmethod
    def loss(model: nn.Module, batch: Sample) -> Tensor:
        penalty = sum(p.square().sum() for p in model.parameters())
        return cross_entropy(model, batch) + 0.01 * batch.count * penalty


@animal("the same penalty, before the model is called", refused={"fsdp": OUTSIDE})
class PenaltyFirst(Net):
    @staticmethod
    def loss(model: nn.Module, batch: Sample) -> Tensor:
        penalty = sum(p.square().sum() for p in model.parameters())
        return 0.01 * batch.count * penalty + cross_entropy(model, batch)


@animal(
    "zero times every parameter, so that none is without a gradient", refused={"fsdp3": OUTSIDE}
)
class ZeroTimesParameters(Net):
    @staticmethod
    def loss(model: nn.Module, batch: Sample) -> Tensor:
        return cross_entropy(model, batch) + 0 * sum(p.sum() for p in model.parameters())


@animal("the root uses a block's weight on its own", refused={"fsdp": OUTSIDE})
class BorrowedWeight(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(x, self.blocks[2].linear.weight)
        for block in self.blocks:
            x = block(x)
        return self.head(F.linear(x, self.blocks[0].linear.weight))


@animal(
    "the root keeps a list of parameters of a block",
    refused={"fsdp": "'blocks.0.linear.weight' by a reference of its own"},
)
class KeptReferences(Net):
    def __init__(self) -> None:
        super().__init__()
        self.kept = [self.blocks[0].linear.weight]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.linear(x, self.kept[0]))


class Borrower(Block):
    def __init__(self, lender: list[Block]) -> None:
        super().__init__()
        self.lender = lender  # in a list: no submodule

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.linear(x, self.lender[0].linear.weight))


@changed(
    "a block uses another block's weight, which it holds without owning it",
    refused={"fsdp3": OUTSIDE},
)
def borrowed_by_a_block(net: Any) -> None:
    net.blocks[2] = Borrower([net.blocks[0]])


@animal("block.forward(x) instead of block(x): no hook is called", refused={"fsdp": OUTSIDE})
class ForwardCalledDirectly(Net):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block.forward(x)
        return self.head(x)


@animal(
    "the loss calls parts of the model, never the model",
    blocks=("encoder", "decoder"),
    refused={"ddp": "the loss calls parts of the model", "fsdp": OUTSIDE},
)
class LossOfParts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder, self.head = Block(), Block(), nn.Linear(W, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.decoder(self.encoder(x)))

    @staticmethod
    def loss(model: Any, batch: Sample) -> Tensor:
        code = model.encoder(batch.inputs)
        rebuilt = model.decoder(code)
        return score(model.head(rebuilt), batch) + (rebuilt - batch.inputs).square().sum()


@animal("the loss calls the model, and its head once more", refused={"fsdp3": OUTSIDE})
class LossAndAPart(Net):
    @staticmethod
    def loss(model: Any, batch: Sample) -> Tensor:
        return cross_entropy(model, batch) + model.head(batch.inputs).square().sum()


@animal(
    "the loss reads a parameter of the model by its name",
    refused={"ddp": "used outside forward", "fsdp3": OUTSIDE},
)
class TemperatureInLoss(Net):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(1))

    @staticmethod
    def loss(model: Any, batch: Sample) -> Tensor:
        inner = getattr(model, "module", model)
        return score(model(batch.inputs) * inner.temperature, batch)


@animal("tied embeddings: the head's weight is the embedding's")
class TiedEmbeddings(Net):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, W)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.embed(tokens(x, CLASSES)).mean(1))


@changed(
    "two blocks share a weight",
    refused={
        "fsdp": "'blocks.2.linear.weight' and 'blocks.0.linear.weight' are one parameter in two"
    },
)
def tied_across_blocks(net: Any) -> None:
    net.blocks[2].linear.weight = net.blocks[0].linear.weight


@animal("the root shares a weight with a block", refused={"fsdp": TIED})
class TiedToTheRoot(Net):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(W, W)
        self.project.weight = self.blocks[1].linear.weight

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.project(x))


@animal(
    "functional_call: the model with other values of its parameters",
    refused={"fsdp": "blocks.1 is called with another tensor as its 'weight' (functional_call)"},
)
class FunctionalCall(Net):
    def forward(self, x: Tensor) -> Tensor:
        scaled = {n: p * 0.9 for n, p in self.blocks[1].named_parameters()}
        x = torch.func.functional_call(self.blocks[1], scaled, self.blocks[0](x))
        return self.head(self.blocks[2](x))


@animal("vmap over a block: inside, tensors have no storage and take no hooks", empty_ranks=False)
class Vmapped(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks[2](self.blocks[1](torch.vmap(self.blocks[0])(x))))


class OwnParameter(nn.Parameter):
    """A class of the user's own, as of quantised weights."""


@animal(
    "parameters of a class of the user's own, one of them used outside of its block",
    refused={"fsdp3": "outside the forward of its block"},
)
class OwnParameters(Net):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.linear.weight = OwnParameter(block.linear.weight.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.blocks[1].linear.weight.sum()


@animal(
    "torch.func.grad inside forward, which refuses to run beside hooks on saved tensors",
    empty_ranks=False,
    refused={"zero3": "torch.func", "fsdp": "torch.func"},
)
class FunctionalGradient(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        slope = torch.func.grad(lambda v: self.blocks[1](v).square().sum())(x)
        return self.head(self.blocks[2](x + 0.1 * slope))


@animal(
    "MAML: an inner step on the parameters, and the loss after it",
    empty_ranks=False,
    refused={"fsdp": "autograd.grad()"},
)
class InnerStep(Net):
    @staticmethod
    def loss(model: nn.Module, batch: Sample) -> Tensor:
        inner = getattr(model, "module", model)
        params = dict(inner.named_parameters())
        first = cross_entropy(model, batch)
        grads = torch.autograd.grad(first, list(params.values()), create_graph=True)
        moved = {n: p - 0.01 * g for (n, p), g in zip(params.items(), grads, strict=True)}
        return score(torch.func.functional_call(inner, moved, batch.inputs), batch)


# ------------------------------------------------------------------ more than one backward


@animal(
    "a gradient penalty: the loss differentiates the model by its input",
    empty_ranks=False,
    refused={"fsdp": "without FSDP's knowing"},
)
class GradientPenalty(Net):
    @staticmethod
    def loss(model: nn.Module, batch: Sample) -> Tensor:
        x = batch.inputs.clone().requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return score(out, batch) + 0.1 * slope.square().sum()


@animal(
    "the slope by one block's input, without a graph of its own",
    empty_ranks=False,
    refused={"fsdp": OUTSIDE},
)
class SlopeWithoutGraph(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = self.blocks[0](x)
        (slope,) = torch.autograd.grad(self.blocks[1](y).sum(), y, retain_graph=True)
        return self.head(self.blocks[2](y + slope))


class Reversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return -grad @ weight.t(), x.t() @ grad


class Reversed(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + Reversal.apply(x, self.linear.weight) + self.linear.bias


@animal("an autograd Function of the user's, which saves the weight")
class CustomFunction(Net):
    BLOCK = Reversed


@animal("checkpoint each block, reentrant: a backward inside backward", refused={"ddp": REENTRANT})
class ReentrantBlocks(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return self.head(x)


@animal(
    "a block used twice under reentrant checkpointing: its gradient hooks fire twice",
    refused={"ddp": REENTRANT, "fsdp": REENTRANT, "buckets": REENTRANT},
)
class ReentrantTwice(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        for i in (0, 1, 1, 0, 2):
            x = checkpoint(self.blocks[i], x, use_reentrant=True)
        return self.head(x)


@animal("a block used twice under non-reentrant checkpointing")
class CheckpointedTwice(Net):
    def forward(self, x: Tensor) -> Tensor:
        for i in (0, 1, 1, 0, 2):
            x = checkpoint(self.blocks[i], x, use_reentrant=False)
        return self.head(x)


@animal("one checkpoint around several blocks")
class CheckpointAroundBlocks(Net):
    def forward(self, x: Tensor) -> Tensor:
        def run(x: Tensor) -> Tensor:
            return self.blocks[1](self.blocks[0](x))

        return self.head(self.blocks[2](checkpoint(run, x, use_reentrant=False)))


class Thrifty(Block):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


@animal("checkpointing inside each block")
class CheckpointInside(Net):
    BLOCK = Thrifty


@animal("reentrant checkpointing of an input without gradient: the first block gets none")
class ReentrantWithoutGradient(Net):
    def forward(self, x: Tensor) -> Tensor:
        with warnings.catch_warnings():  # PyTorch says so
            warnings.simplefilter("ignore")
            for block in self.blocks[:1]:
                x = checkpoint(block, x, use_reentrant=True)
        return self.head(self.blocks[2](self.blocks[1](x)))


# ------------------------------------------------------------------ hooks, norms, parametrizations


@changed("a forward pre-hook of the user's that computes the weight from others")
def users_pre_hook(net: Any) -> None:
    for block in net.blocks:
        block.scale = nn.Parameter(torch.ones(1))
        block.register_forward_pre_hook(lambda m, args: (args[0] * m.scale,))


@changed("nn.utils.weight_norm, the old one: a pre-hook that makes the weight")
def weight_norm_old(net: Any) -> None:
    with warnings.catch_warnings():  # deprecated, and everywhere
        warnings.simplefilter("ignore")
        for block in net.blocks:
            nn.utils.weight_norm(block.linear)


@animal("weight_norm on a module that is itself a block", blocks=("0", "2"))
class WeightNormOnABlock(nn.Sequential):
    def __init__(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            first, second = (nn.utils.weight_norm(nn.Linear(W, W)) for _ in range(2))
        super().__init__(first, nn.Tanh(), second, nn.Linear(W, CLASSES))


@changed("spectral_norm as a parametrization")
def spectral_norm_new(net: Any) -> None:
    for block in net.blocks:
        parametrizations.spectral_norm(block.linear)


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)


@animal("a parametrization of the user's, cached over two uses")
class Parametrized(Net):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            parametrize.register_parametrization(block.linear, "weight", Symmetric())

    def forward(self, x: Tensor) -> Tensor:
        with parametrize.cached():
            return super().forward(x) + self.head(self.blocks[0](x))


@changed("a forward hook of the user's that reads the weight and changes the output")
def users_forward_hook(net: Any) -> None:
    for block in net.blocks:
        block.register_forward_hook(lambda m, _args, out: out + m.linear.weight.mean())


@changed(
    "backward hooks of the user's, on modules and on a parameter",
    refused={"fsdp": "'blocks.1.linear.weight' has a hook on its gradient"},
)
def users_backward_hooks(net: Any) -> None:
    net.blocks[0].register_full_backward_hook(lambda _m, gin, _gout: tuple(gin))
    net.blocks[1].linear.weight.register_hook(lambda grad: grad * 0.5)
    net.blocks[2].register_full_backward_pre_hook(lambda _m, gout: (gout[0] * 2,))


@changed("a hook of the user's that replaces the block's forward (as accelerate's do)")
def patched_forward(net: Any) -> None:
    for block in net.blocks:
        plain = block.forward
        block.forward = lambda x, plain=plain: plain(x * 0.5)


@animal("train() and eval() are called in the middle of forward")
class TrainEvalToggles(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(W)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        self.norm.eval()
        x = self.norm(x)
        self.norm.train()
        return self.head(self.blocks[2](self.blocks[1](x)))


# ------------------------------------------------------------------ tensors of every kind


@animal("an expanded buffer: 4096 elements that share one")
class ExpandedBuffer(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ones", torch.ones(1).expand(4096))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.ones[:W])


@animal("buffers that are views of one another")
class OverlappingBuffers(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("whole", torch.rand(2 * W))
        self.register_buffer("part", self.whole[3 : 3 + W])

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.part + self.whole[:W])


@animal("a causal mask kept as a non-contiguous, non-persistent bool buffer, and counters")
class IntegerBuffers(Net):
    def __init__(self) -> None:
        super().__init__()
        mask = torch.ones(W, W, dtype=torch.bool).tril().t()
        self.register_buffer("mask", mask, persistent=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("missing", None)

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return super().forward(x @ self.mask.to(x.dtype) + self.seen % 5)


@animal("rotary embeddings as a complex buffer (freqs_cis)")
class ComplexBuffer(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("turn", torch.polar(torch.ones(3), torch.rand(3)))

    def forward(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.reshape(-1, 3, 2)) * self.turn
        return super().forward(torch.view_as_real(pairs).reshape(-1, W))


@animal(
    "a complex parameter, as in Fourier layers",
    empty_ranks=False,
    refused={"pytorch_zero1": ONE_DTYPE, "fsdp": "'spectrum' is complex"},
)
class ComplexParameter(Net):
    def __init__(self) -> None:
        super().__init__()
        self.spectrum = nn.Parameter(torch.randn(4, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.fft.irfft(torch.fft.rfft(x) * self.spectrum, n=W))


@animal("every parameter is complex", empty_ranks=False, refused={"fsdp": "is complex"})
class AllComplex(Net):
    def __init__(self) -> None:
        super().__init__()
        self.to(torch.complex128)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(torch.complex128)).abs()


@animal(
    "quantised weights: frozen integer parameters beside trained scales", refused={"fsdp3": OUTSIDE}
)
class IntegerParameter(Net):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            levels = torch.randint(-8, 8, (W, W), dtype=torch.int8)
            block.levels = nn.Parameter(levels, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) + x @ block.levels.to(x.dtype) * 0.01
        return self.head(x)


class Permuting(Block):
    def __init__(self) -> None:
        super().__init__()
        self.order = nn.Parameter(torch.arange(W), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[:, self.order])


class Turning(Block):
    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(W, dtype=torch.complex128), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        turned = torch.complex(x, x) * self.turn
        return super().forward(torch.view_as_real(turned).sum(-1))


@animal(
    "a frozen integer and a frozen complex parameter, each used in its own block", empty_ranks=False
)
class FrozenNumbers(Net):
    BLOCK = Permuting

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = Turning()


@animal(
    "a parameter without elements",
    refused={"pytorch_zero2": "_chunk_cat expects non-empty tensor", "fsdp3": OUTSIDE},
)
class ZeroElements(Net):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.nothing = nn.Parameter(torch.zeros(0, W))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) + block.nothing.sum()
        return self.head(x)


@animal(
    "a parameter without dimensions in each block",
    refused={"fsdp": "doesn't support scalar parameters. Change gain"},
)
class Scalars(Net):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(0.9))
        for block in self.blocks:
            block.gain = nn.Parameter(torch.tensor(1.1))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) * block.gain
        return self.head(x * self.gain)


@changed(
    "non-contiguous parameters: a transposed weight, and every second element",
    refused={
        "pytorch_zero1": "'blocks.1.linear.bias' has gaps in memory",
        "fsdp": "does not support non-contiguous parameters",
    },
)
def non_contiguous(net: Any) -> None:
    for block in net.blocks:
        block.linear.weight = nn.Parameter(torch.randn(W, W).t())
    net.blocks[1].linear.bias = nn.Parameter(torch.randn(2 * W)[::2])


@animal(
    "convolutions whose weights are channels-last",
    empty_ranks=False,
    refused={"fsdp": "does not support non-contiguous parameters"},
)
class ChannelsLast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Conv2d(2, 2, 3, padding=1) for _ in range(3))
        self.head = nn.Linear(W, CLASSES)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        image = x[:, None, None].expand(-1, 2, 3, -1)  # (rows, 2, 3, width)
        for block in self.blocks:
            image = torch.tanh(block(image))
        return self.head(image.mean((1, 2)))


@animal("a float32 block in a float64 model", tolerance=1e-4, refused={"pytorch_zero1": ONE_DTYPE})
class MixedDtypes(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].float()

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[1](self.blocks[0](x).float()).double()
        return self.head(self.blocks[2](x))


@animal(
    "float32 and float64 parameters in one block",
    tolerance=1e-4,
    refused={"pytorch_zero1": ONE_DTYPE, "fsdp": "uniform original parameter dtype"},
)
class MixedInABlock(Net):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.norm = nn.LayerNorm(W, dtype=torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block.norm(block(x).float()).double()
        return self.head(x)


@animal(
    "a frozen base in bfloat16 under trained float64 adapters (QLoRA)",
    tolerance=1e-9,
    refused={"fsdp": OUTSIDE},
)
class FrozenInBf16(Net):
    BLOCK = Adapted

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.linear.to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            base = block.linear(x.detach().to(torch.bfloat16)).double()
            x = x + torch.tanh(base + block.up(block.down(x)))
        return self.head(x)


@animal("parameters in a ParameterList and a ParameterDict")
class ListsOfParameters(Net):
    def __init__(self) -> None:
        super().__init__()
        self.gains = nn.ParameterList([torch.rand(W), torch.rand(1, W)])
        self.named = nn.ParameterDict({"a": torch.rand(W), "b": torch.rand(W, W)})

    def forward(self, x: Tensor) -> Tensor:
        for gain in self.gains:
            x = x * gain
        return super().forward(x @ self.named["b"] + self.named["a"])


@animal("a buffer that forward replaces by a new tensor")
class BufferReplaced(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(W))

    def forward(self, x: Tensor) -> Tensor:
        if len(x):
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return super().forward(x - self.mean)


# ------------------------------------------------------------------ state that forward changes


@animal(
    "a deep-copied teacher: frozen parameters that forward moves after the student's (EMA)",
    refused={"fsdp": OUTSIDE},
)
class EmaTeacherOfParameters(Net):
    loss = staticmethod(by_step)

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.blocks).requires_grad_(False)

    def forward(self, x: Tensor, _step: int) -> Tensor:
        with torch.no_grad():
            for theirs, ours in zip(
                self.teacher.parameters(), self.blocks.parameters(), strict=True
            ):
                theirs.lerp_(ours, 0.1)
            target = x
            for block in self.teacher:
                target = block(target)
        for block in self.blocks:
            x = block(x)
        return self.head(x + target)


@animal("a Wasserstein critic: weights are clipped in place in forward")
class ClippedInForward(Net):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for p in self.blocks.parameters():
                p.clamp_(-0.2, 0.2)
        return super().forward(x)


class Embedded(Net):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, W, **options)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.embed(tokens(x, 40)).mean(1))


@animal("max_norm changes rows of the weight in forward, on each rank others", refused={
    "ranks": "module 'embed' has max_norm",
}, shows_at=-1)  # fmt: skip
class MaxNorm(Embedded):
    def __init__(self) -> None:
        super().__init__(max_norm=0.5)


@animal("BatchNorm: statistics of each rank's own samples, buffers that follow rank 0's")
class BatchNorm(Net):
    BLOCK = staticmethod(lambda: nn.Sequential(nn.Linear(W, W), nn.BatchNorm1d(W), nn.Tanh()))


@animal("BatchNorm that counts its batches (momentum=None), under another momentum per step")
class BatchNormCumulative(Net):
    BLOCK = staticmethod(lambda: nn.Sequential(nn.BatchNorm1d(W, momentum=None), Block()))


# ------------------------------------------------------------------ layers with habits of their own


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rnn = kind(2, 3, batch_first=True, bidirectional=True)
        self.out = nn.Linear(6, W)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.rnn(x.reshape(len(x), 3, 2))[0].mean(1))


@animal("an LSTM: it keeps a flat list of its weights", empty_ranks=False)
class Lstm(Net):
    BLOCK = staticmethod(lambda: Recurrent(nn.LSTM))


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(2, 1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y = x.reshape(len(x), 3, 2)
        return x + self.attend(y, y, y, need_weights=False)[0].reshape(len(x), W)


@animal("MultiheadAttention: it reads its out_proj's weight without calling it", empty_ranks=False)
class Attention(Net):
    BLOCK = Attending


@animal(
    "TransformerEncoder: in evaluation its fast path reads the layers' weights itself",
    blocks=("encoder.layers.0", "encoder.layers.1"),
    empty_ranks=False,
)
class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(2, 2, 5, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(W, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x.reshape(len(x), 3, 2)).reshape(len(x), W))

    @staticmethod
    def evaluate(model: nn.Module, batch: Sample) -> Tensor:
        model.eval()
        loss = cross_entropy(model, batch)
        model.train()
        return loss


@animal("an embedding with sparse gradients: AdamW itself cannot take them", shows_at=-1, refused={
    "all": "module 'embed' has sparse=True",
})  # fmt: skip
class SparseEmbedding(Embedded):
    def __init__(self) -> None:
        super().__init__(sparse=True)


@animal("F.embedding gives a sparse gradient, which no module shows", empty_ranks=False, refused={
    "all": "'table' got a sparse gradient",
})  # fmt: skip
class SparseFunction(Net):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(11, W))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.embedding(tokens(x), self.table, sparse=True).mean(1))


@changed("lazy layers: parameters that have no shape before the first forward", refused={
    "all": "'head.weight' has no shape yet (a lazy module)",
}, shows_at=-1)  # fmt: skip
def lazy(net: Any) -> None:
    net.head = nn.LazyLinear(CLASSES)


@changed(
    "a lazy layer that has buffers alone",
    shows_at=-1,
    refused={"all": "'norm.running_mean' has no shape yet (a lazy module)"},
)
def lazy_buffer(net: Any) -> None:
    net.norm = nn.LazyBatchNorm1d(affine=False)


@animal("DINO: a student, a frozen teacher and a centre kept as a buffer that each forward moves")
class Dino(Net):
    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.head).requires_grad_(False)
        self.register_buffer("centre", torch.zeros(CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        with torch.no_grad():
            target = self.teacher(x) - self.centre
            if len(x):
                self.centre.lerp_(target.mean(0), 0.1)
        return out * target.softmax(-1)


@animal("the loss of some micro-batches does not depend on any block", refused={"fsdp": IN_STEP})
class BackwardNeverComes(Net):
    def forward(self, x: Tensor) -> Tensor:
        hidden = x
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden if says_so(x) else hidden.detach())


@animal(
    "a block that runs in a thread of the model's; hooks on saved tensors are per thread",
    refused={"zero3": "in a thread of its own"},
)
class Threads(Net):
    def forward(self, x: Tensor) -> Tensor:
        with ThreadPoolExecutor(1) as pool:
            hidden = pool.submit(self.blocks[0], x).result()
        return self.head(self.blocks[2](self.blocks[1](hidden)))


@animal(
    "a thread whose result nobody misses: the model runs on without it",
    refused={"zero3": "in a thread of its own"},
)
class LooseThread(Net):
    def forward(self, x: Tensor) -> Tensor:
        found: list[Tensor] = []
        thread = threading.Thread(target=lambda: found.append(self.blocks[0](x)))
        thread.start()
        thread.join()
        return super().forward(x) + sum(f.sum() for f in found)


@changed("everything is frozen: there is nothing to train", refused={
    "all": "has no parameter that trains",
})  # fmt: skip
def all_frozen(net: Any) -> None:
    net.requires_grad_(False)
