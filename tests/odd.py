"""Odd models, written the way people write them, for PyTorch's own strategies: equal or refused.

Each is a few lines with the reason why it is there. ``run`` trains one under a strategy, ``plain``
in one process; both return losses, gradients and parameters of each step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from shardlab import naming
from shardlab.naming import STRATEGIES
from shardlab.optim import factory
from shardlab.strategies.base import Setup
from shardlab.workloads.base import Batch
from shardlab.world import World

STEPS = 3
Loss = Callable[[nn.Module, Batch], Tensor]


def batch(step: int, rank: int, micro: int = 0) -> Batch:
    """(4, 6) numbers; the first says the step, the second the rank: a model may branch on them."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + micro)
    x = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    x[0, 0], x[0, 1] = step, rank
    y = torch.randint(0, 3, (4,), generator=generator)
    return Batch(x, y, 4, 4)


def plain_loss(model: nn.Module, b: Batch) -> Tensor:
    out = model(b.inputs)
    return F.cross_entropy(out, b.targets, reduction="sum")


class Net(nn.Module):
    """A stem, two blocks, a head. The odd ones change one thing."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(self.block(i) for i in range(2))
        self.head = nn.Linear(6, 3)

    def block(self, _i: int) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 6), nn.Tanh())

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Any:
        return self.head(self.body(torch.tanh(self.stem(x))))


class With(nn.Module):
    """A linear layer and one more parameter, which ``use`` puts to use."""

    def __init__(self, extra: Tensor, use: Callable[[Tensor, Tensor], Tensor], train: bool = True):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.extra = nn.Parameter(extra, requires_grad=train)
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.use(self.linear(x), self.extra))


def net_with(make: Callable[[], Tensor], use: Any, train: bool = True) -> type[Net]:
    class Odd(Net):
        def block(self, _i: int) -> nn.Module:
            return With(make(), use, train)

    return Odd


def nothing(x: Tensor, p: Tensor) -> Tensor:
    return x + p.sum()


class Nested(Net):
    """A block inside another block."""

    def block(self, _i: int) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.Tanh()))


class NoParameters(Net):
    def block(self, _i: int) -> nn.Module:
        return nn.Tanh() if _i else nn.Linear(6, 6)


class Tied(Net):
    """One weight in two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1][0].weight = self.blocks[0][0].weight


class Twice(Net):
    """Each block runs twice."""

    def body(self, x: Tensor) -> Tensor:
        return super().body(super().body(x))


class SameModule(Net):
    """One module under two names, as in ALBERT."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = self.blocks[0]


@dataclass
class Output:
    logits: Tensor
    hidden: Tensor | None = None


class DataclassBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Output:
        return Output(torch.tanh(self.linear(x)))


class DataclassOutput(Net):
    """Blocks and the model return dataclasses."""

    def block(self, _i: int) -> nn.Module:
        return DataclassBlock()

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).logits
        return x

    def forward(self, x: Tensor) -> Output:
        return Output(super().forward(x))


def dataclass_loss(model: nn.Module, b: Batch) -> Tensor:
    return F.cross_entropy(model(b.inputs).logits, b.targets, reduction="sum")


class HiddenOutput(Net):
    """The output is an object that nobody can look into."""

    class Box:
        def __init__(self, logits: Tensor) -> None:
            self.logits = logits

    def forward(self, x: Tensor) -> Any:
        return self.Box(super().forward(x))


class WritesIntoDict(Net):
    """Blocks return nothing: they write into what they are given."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, state: dict[str, Tensor]) -> None:
            state["x"] = torch.tanh(self.linear(state["x"]))

    def block(self, _i: int) -> nn.Module:
        return self.Block()

    def body(self, x: Tensor) -> Tensor:
        state = {"x": x}
        for block in self.blocks:
            block(state)
        return state["x"]


class CollectsLosses(Net):
    """Blocks add to a list of losses, as mixtures of experts do."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x: Tensor, losses: list[Tensor]) -> Tensor:
            losses.append(self.linear.bias.square().sum())
            return torch.tanh(self.linear(x))

    def block(self, _i: int) -> nn.Module:
        return self.Block()

    def body(self, x: Tensor) -> Tensor:
        losses: list[Tensor] = []
        for block in self.blocks:
            x = block(x, losses)
        return x + sum(losses)


class OtherValues(Net):
    """functional_call: a block with other values of its parameters."""

    def body(self, x: Tensor) -> Tensor:
        scaled = {n: p * 0.9 for n, p in self.blocks[1].named_parameters()}
        return torch.func.functional_call(self.blocks[1], scaled, self.blocks[0](x))


class OutputUnused(Net):
    """The second block runs, and nothing comes of it."""

    def body(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        self.blocks[1](x)
        return x


class PassedThrough(Net):
    """The second block returns its input in odd steps (stochastic depth)."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)
            self.skips = False

        def forward(self, x: Tensor) -> Tensor:
            return x if self.skips else torch.tanh(self.linear(x))

    def block(self, _i: int) -> nn.Module:
        return self.Block()

    def forward(self, x: Tensor) -> Any:
        self.blocks[1].skips = int(x[0, 0]) % 2 == 1
        return super().forward(x)


class LateUnused(Net):
    """From the third step on a part of a block is not used."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)
            self.extra = nn.Linear(6, 6)
            self.uses = True

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.linear(x) + (self.extra(x) if self.uses else 0))

    def block(self, _i: int) -> nn.Module:
        return self.Block()

    def uses(self, step: int, _rank: int) -> bool:
        return step < 2

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            block.uses = self.uses(int(x[0, 0]), int(x[0, 1]))
        return super().forward(x)


class LateUnusedOnOneRank(LateUnused):
    def uses(self, step: int, rank: int) -> bool:
        return step < 2 or rank == 0


class UnusedOnOneRank(LateUnused):
    def uses(self, _step: int, rank: int) -> bool:
        return rank == 0


class LateSkip(Net):
    """From the third step on the second block does not run."""

    def runs(self, step: int, _rank: int) -> bool:
        return step < 2

    def forward(self, x: Tensor) -> Any:
        self.now = int(x[0, 0]), int(x[0, 1])
        return super().forward(x)

    def body(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        return self.blocks[1](x) if self.runs(*self.now) else x


class SkipsOnOneRank(LateSkip):
    def runs(self, _step: int, rank: int) -> bool:
        return rank == 0


class LateSkipOnOneRank(LateSkip):
    def runs(self, step: int, rank: int) -> bool:
        return step < 2 or rank == 0


class SwappedOnOneRank(Net):
    """Blocks of one size in another order: paired, they would exchange their weights."""

    def forward(self, x: Tensor) -> Any:
        self.order = reversed if int(x[0, 1]) else iter
        return super().forward(x)

    def body(self, x: Tensor) -> Tensor:
        for block in self.order(list(self.blocks)):
            x = block(x)
        return x


class Unfreezing(Net):
    """The first block trains from the second step on; the stem in the first only."""

    def forward(self, x: Tensor) -> Any:
        self.blocks[0].requires_grad_(int(x[0, 0]) >= 1)
        self.stem.requires_grad_(int(x[0, 0]) < 1)
        return super().forward(x)


class OldWeightNorm(Net):
    """A forward pre-hook of the user's computes the weight."""

    def block(self, _i: int) -> nn.Module:
        import warnings

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return nn.utils.weight_norm(nn.Linear(6, 6))


class WeightNorm(Net):
    def block(self, _i: int) -> nn.Module:
        return nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))


class Attention(Net):
    """MultiheadAttention reads its parameters without calling their module."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            y = x.unsqueeze(0)
            return (x + self.attention(y, y, y, need_weights=False)[0].squeeze(0)).clone()

    def block(self, _i: int) -> nn.Module:
        return self.Block()


class Recurrent(Net):
    """An LSTM keeps a list of its weights."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.lstm(x)[0].clone()

    def block(self, _i: int) -> nn.Module:
        return self.Block()


class KeepsReferences(Net):
    """A list of parameters, as some repositories have it."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = [self.blocks[0][0].weight]

    def body(self, x: Tensor) -> Tensor:
        return super().body(F.linear(x, self.kept[0]))


class GradientHook(Net):
    """A hook that halves a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.stem.weight.register_hook(lambda g: g / 2)


class ExpandedBuffer(Net):
    """4,096 elements in the memory of one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(1, dtype=torch.float64).expand(4096))

    def forward(self, x: Tensor) -> Any:
        return super().forward(x * self.mask[:6])


class Reentrant(Net):
    """Re-entrant checkpointing of a block that runs twice: its gradient comes in two parts."""

    def body(self, x: Tensor) -> Tensor:
        for block in (*self.blocks, *self.blocks):
            x = checkpoint(block, x, use_reentrant=True)
        return x


class NothingTrains(Net):
    """In the second step nothing requires a gradient."""

    def forward(self, x: Tensor) -> Any:
        self.requires_grad_(int(x[0, 0]) != 1)
        return super().forward(x)


class Lazy(Net):
    def block(self, _i: int) -> nn.Module:
        return nn.LazyLinear(6)


class LazyBuffer(Net):
    def block(self, _i: int) -> nn.Module:
        return nn.LazyBatchNorm1d(affine=False)


class Sparse(Net):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 6, sparse=True)

    def forward(self, x: Tensor) -> Any:
        return super().forward(self.table(x[:, 0].long().clamp(0, 8)))


class SparseBag(Sparse):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(9, 6, sparse=True, mode="sum")  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Any:
        return Net.forward(self, self.table(x.long().clamp(0, 8)))


class MaxNorm(Net):
    """Forward changes the rows of the weight that it looks up."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 6, max_norm=0.5)


class OneParameter(nn.Module):
    """Fewer parameters than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3, bias=False)

    def forward(self, x: Tensor) -> Any:
        return self.head(x)


class SparseFunction(Net):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(9, 6))

    def forward(self, x: Tensor) -> Any:
        return super().forward(F.embedding(x[:, 0].long().clamp(0, 8), self.table, sparse=True))


class AllComplex(Net):
    """Every parameter is complex."""

    def __init__(self) -> None:
        super().__init__()
        for module in self.modules():
            for name, p in module.named_parameters(recurse=False):
                setattr(module, name, nn.Parameter(p.detach().to(torch.complex128) * (1 + 1j)))

    def forward(self, x: Tensor) -> Any:
        return super().forward(x.to(torch.complex128)).abs()


class ViewInPlace(Net):
    """A block returns a view, which the model then changes in place."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(torch.tanh(x)).view(-1, 6)

    def block(self, _i: int) -> nn.Module:
        return self.Block()

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            x += 1
        return x


class LastBlockInPlace(Net):
    """The last block's output is changed in place, and returned."""

    def forward(self, x: Tensor) -> Any:
        out = super().forward(x)
        out *= 2
        return out


def in_place_loss(model: nn.Module, b: Batch) -> Tensor:
    out = model(b.inputs)
    out += 1
    return F.cross_entropy(out, b.targets, reduction="sum")


def loss_of_parts(model: Any, b: Batch) -> Tensor:
    """The model's own forward is never called."""
    out = model.head(model.body(torch.tanh(model.stem(b.inputs))))
    return F.cross_entropy(out, b.targets, reduction="sum")


def loss_and_part(model: Any, b: Batch) -> Tensor:
    """The model's forward, and its head once more."""
    return plain_loss(model, b) + model.head(b.inputs).square().sum()


def with_penalty(model: nn.Module, b: Batch) -> Tensor:
    penalty = torch.stack([p.square().sum() for p in model.parameters()]).sum()
    return plain_loss(model, b) + 0.1 * penalty


def two_forwards(model: nn.Module, b: Batch) -> Tensor:
    """A siamese loss."""
    return plain_loss(model, b) + (model(b.inputs * 2) - model(-b.inputs)).square().sum()


class Scaled(Net):
    """Backward needs the buffer, which a second forward must not have overwritten."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.linspace(0.5, 1, 6, dtype=torch.float64))

    def forward(self, x: Tensor) -> Any:
        return super().forward(torch.tanh(self.stem(x)) * self.scale)


class Mixed(Net):
    """The first block is float32."""

    def __init__(self) -> None:
        super().__init__()
        self.is_mixed = False

    def double(self) -> Mixed:
        super().double()
        self.blocks[0][0].float()
        return self

    def body(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](x.float()).double())


class MixedInside(Net):
    """float32 and float64 in one block."""

    def block(self, _i: int) -> nn.Module:
        return With(torch.randn(6), lambda x, p: x + p)

    def double(self) -> MixedInside:
        super().double()
        for block in self.blocks:
            block.extra.data = block.extra.data.float()
        return self


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    blocks: tuple[str, ...] = ("blocks.0", "blocks.1")
    loss: Loss = plain_loss


def by_hand(x: Tensor, p: Tensor) -> Tensor:
    return x @ p


def turned(x: Tensor, p: Tensor) -> Tensor:
    return torch.view_as_real(torch.complex(x, x) * p).sum(-1)


CASES: dict[str, Case] = {
    "net": Case(Net),
    "no_blocks": Case(Net, ()),
    "zero_elements": Case(net_with(lambda: torch.zeros(0, 6), nothing)),
    "zero_columns": Case(net_with(lambda: torch.zeros(6, 0), nothing)),
    "not_contiguous": Case(net_with(lambda: torch.randn(6, 6).t(), by_hand)),
    "gaps": Case(net_with(lambda: torch.randn(12, dtype=torch.float64)[::2], lambda x, p: x * p)),
    "scalar": Case(net_with(lambda: torch.tensor(0.5), lambda x, p: x * p)),
    "frozen_integers": Case(net_with(lambda: torch.arange(6), lambda x, p: x[:, p], train=False)),
    "frozen_complex": Case(
        net_with(lambda: torch.randn(6, dtype=torch.complex128), turned, train=False)
    ),
    "complex": Case(net_with(lambda: torch.randn(6, dtype=torch.complex128), turned)),
    "mixed": Case(Mixed),
    "mixed_inside": Case(MixedInside),
    "nested": Case(Nested, ("blocks.0", "blocks.0.1", "blocks.1", "blocks.1.1")),
    "no_parameters": Case(NoParameters),
    "tied": Case(Tied),
    "tied_outside": Case(Tied, ()),
    "twice": Case(Twice),
    "same_module": Case(SameModule),
    "dataclass": Case(DataclassOutput, loss=dataclass_loss),
    "hidden_output": Case(HiddenOutput, loss=dataclass_loss),
    "writes_into_dict": Case(WritesIntoDict),
    "collects_losses": Case(CollectsLosses),
    "other_values": Case(OtherValues),
    "output_unused": Case(OutputUnused),
    "passed_through": Case(PassedThrough),
    "late_unused": Case(LateUnused),
    "late_unused_one": Case(LateUnusedOnOneRank),
    "unused_one": Case(UnusedOnOneRank),
    "late_skip": Case(LateSkip),
    "skip_one": Case(SkipsOnOneRank),
    "late_skip_one": Case(LateSkipOnOneRank),
    "swapped_one": Case(SwappedOnOneRank),
    "unfreezing": Case(Unfreezing),
    "old_weight_norm": Case(OldWeightNorm),
    "weight_norm": Case(WeightNorm),
    "attention": Case(Attention),
    "recurrent": Case(Recurrent),
    "keeps_references": Case(KeepsReferences),
    "gradient_hook": Case(GradientHook),
    "expanded_buffer": Case(ExpandedBuffer),
    "reentrant": Case(Reentrant),
    "nothing_trains": Case(NothingTrains),
    "lazy": Case(Lazy),
    "lazy_buffer": Case(LazyBuffer),
    "sparse": Case(Sparse),
    "sparse_bag": Case(SparseBag),
    "max_norm": Case(MaxNorm),
    "one_parameter": Case(OneParameter, ()),
    "sparse_function": Case(SparseFunction),
    "all_complex": Case(AllComplex),
    "view_in_place": Case(ViewInPlace),
    "in_place": Case(LastBlockInPlace, loss=in_place_loss),
    "parts": Case(Net, loss=loss_of_parts),
    "and_part": Case(Net, loss=loss_and_part),
    "penalty": Case(Net, loss=with_penalty),
    "two_forwards": Case(Scaled, loss=two_forwards),
}

Course = list[tuple[float, dict[str, Any], dict[str, Any]]]


def build(name: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return CASES[name].make().double()


# A decay, so that a zero gradient instead of none would show.
MAKE = factory.of_class(torch.optim.AdamW, lr=0.05, weight_decay=0.1)


def numpy(tensors: dict[str, Any]) -> dict[str, Any]:
    return {n: None if t is None else t.detach().numpy().copy() for n, t in tensors.items()}


@functools.cache
def plain(name: str, ranks: int) -> Course:
    model = build(name, 0)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    optimizer = MAKE(trained)
    course: Course = []
    for step in range(STEPS):
        batches = [batch(step, rank) for rank in range(ranks)]
        total = 0.0
        for b in batches:
            loss = CASES[name].loss(model, b)
            (loss / sum(b.count for b in batches)).backward()
            total += float(loss.detach())
        grads = numpy({n: p.grad for n, p in trained.items()})
        optimizer.step()
        optimizer.zero_grad()
        tensors = numpy(dict(model.named_parameters()))
        course.append((total / sum(b.count for b in batches), grads, tensors))
    return course


def run(world: World, strategy: str, name: str, options: dict[str, Any]) -> Course:
    make = naming.resolve(strategy, STRATEGIES, "strategy")
    model, case = build(name, world.rank), CASES[name]
    instance = make(Setup(model, MAKE, case.loss, world.mesh, blocks=case.blocks), **options)
    course: Course = []
    for step in range(STEPS):
        loss = float(instance.gradients([batch(step, world.rank)]))
        grads = numpy(instance.full_grads())
        instance.step()
        params = instance.full_params()
        course.append((loss, grads, numpy({n: params[n] for n in params if n != "mask"})))
    return course


def difference(got: Course, want: Course, tolerance: float) -> str | None:
    for step, (a, b) in enumerate(zip(got, want, strict=True)):
        if not abs(a[0] - b[0]) <= tolerance:
            return f"step {step}: the loss is {a[0]}, not {b[0]}"
        for what, x, y in (("gradient", a[1], b[1]), ("parameter", a[2], b[2])):
            for n in y:
                if (x[n] is None) != (y[n] is None):
                    return f"step {step}: {what} {n} is {x[n]}, not {y[n]}"
                if y[n] is not None and not np.allclose(x[n], y[n], rtol=0, atol=tolerance):
                    return f"step {step}: {what} {n} is off by {np.abs(x[n] - y[n]).max():.1e}"
    return None
