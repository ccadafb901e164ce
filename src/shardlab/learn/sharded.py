"""For the ZeRO exercises: their toys, one process beside them, and what a rank really holds."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer

from shardlab.learn.exercise import Rejected
from shardlab.learn.spy import Spy
from shardlab.proof.watch import Memory

Batch = tuple[Tensor, Tensor]  # (rows, 6), (rows, 3)
Tensors = dict[str, Tensor]
T = TypeVar("T")
RATE = 0.5  # of SGD: what an update used is (before - after) / RATE


class Frozen(nn.Module):
    """A layer in the middle does not train. Sizes: 299 elements train, which nothing divides."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 7)
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(4))
        self.scale = nn.Parameter(torch.rand(2))
        self.head = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:  # (rows, 6)
        hidden = torch.tanh(self.frozen(torch.tanh(self.first(x) * self.scale[0])))
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        out: Tensor = self.head(hidden * self.scale[1])
        return out


def blocks() -> nn.Sequential:
    """Blocks of odd sizes, one of them without parameters."""
    return nn.Sequential(
        nn.Sequential(nn.Linear(6, 7), nn.Tanh()),
        nn.Sequential(nn.Linear(7, 9, bias=False), nn.Tanh(), nn.Linear(9, 7)),
        nn.Tanh(),
        nn.Linear(7, 7),
        nn.Linear(7, 3),
    )


def wide(depth: int, width: int = 48) -> nn.Sequential:
    """Blocks of one size, large beside their activations: what is weighed is parameters."""
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(width, width, bias=False), nn.Tanh()) for _ in range(depth))
    )


def build(make: Callable[[], nn.Module]) -> nn.Module:
    """The same on every rank."""
    torch.manual_seed(0)
    return make().double()


def batch(rank: int, step: int, micro: int, rows: int = 4, into: int = 6, out: int = 3) -> Batch:
    generator = torch.Generator().manual_seed(10_000 * step + 100 * micro + rank)
    x = torch.randn(rows, into, generator=generator, dtype=torch.float64)
    return x, torch.randn(rows, out, generator=generator, dtype=torch.float64)


class Factory:
    """What the learner calls ``make_optimizer``; it remembers what was asked of it."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.made: list[Optimizer] = []

    def __call__(self, tensors: Iterable[Tensor]) -> Optimizer:
        chosen = list(tensors)
        made: Optimizer = (
            SGD(chosen, lr=RATE) if self.kind == "sgd" else AdamW(chosen, lr=0.05, weight_decay=0.1)
        )
        self.made.append(made)
        return made

    def held(self) -> int:
        """Elements of the parameters in the optimizers that are there."""
        return sum(p.numel() for o in self.made[-1:] for g in o.param_groups for p in g["params"])

    def state(self) -> int:
        """Elements of AdamW's state, both moments."""
        return sum(
            value.numel()
            for optimizer in self.made[-1:]
            for entry in optimizer.state.values()
            for key, value in entry.items()
            if isinstance(value, Tensor) and key != "step"
        )


def loss(output: Tensor, batch: Batch) -> Tensor:
    return F.mse_loss(output, batch[1])


# ------------------------------------------------------------------ one process


def local_gradients(model: nn.Module, batches: Sequence[Batch]) -> Tensors:
    """The mean over the micro-batches of one rank; the model is left alone."""
    twin = copy.deepcopy(model)
    twin.zero_grad()
    for one in batches:
        (loss(twin(one[0]), one) / len(batches)).backward()
    return {n: p.grad.clone() for n, p in twin.named_parameters() if p.grad is not None}


class Single:
    """One process that sees every rank's batches: the parameters after each step."""

    def __init__(self, model: nn.Module, kind: str, max_norm: float | None = None) -> None:
        self.model = copy.deepcopy(model)
        self.params = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = Factory(kind)(self.params)
        self.max_norm = max_norm

    def step(self, batches: Sequence[Sequence[Batch]]) -> Tensors:
        """``batches`` by rank, then by micro-batch."""
        self.optimizer.zero_grad()
        parts = [local_gradients(self.model, each) for each in batches]
        for name, p in self.model.named_parameters():
            if p.requires_grad:
                p.grad = torch.stack([part[name] for part in parts]).mean(0)
        if self.max_norm is not None:
            nn.utils.clip_grad_norm_(self.params, self.max_norm)
        self.optimizer.step()
        return trained(self.model)


def trained(model: nn.Module) -> Tensors:
    return {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}


def candidates(
    model: nn.Module, batches: Sequence[Sequence[Batch]], max_norm: float | None
) -> dict[str, Tensor]:
    """What an update may have used in place of the mean gradient, flat, by the mistake's name."""
    world, micros = len(batches), len(batches[0])
    own = [local_gradients(model, each) for each in batches]
    flat = [torch.cat([g.flatten() for g in part.values()]) for part in own]
    mean = torch.stack(flat).mean(0)
    last = [local_gradients(model, each[-1:]) for each in batches]
    found = {"mean": mean, "sum": mean * world, "mean/n": mean / world}
    found |= {f"own {r}": g for r, g in enumerate(flat)}
    if micros > 1:
        parts = [torch.cat([g.flatten() for g in part.values()]) / micros for part in last]
        found["last micro-batch"] = torch.stack(parts).mean(0)
    if max_norm is not None:
        found["clipped first"] = torch.stack([g * _factor(g, max_norm) for g in flat]).mean(0)
        found["clipped"] = mean * _factor(mean, max_norm)
    return found


def _factor(gradient: Tensor, max_norm: float) -> float:
    return min(1.0, max_norm / (float(gradient.norm()) + 1e-6))


# ------------------------------------------------------------------ the learner's loop


@dataclass(frozen=True)
class Subject:
    """The learner's object in the loop of the contract, and how to look at it."""

    zero: Any
    forward: Callable[[Tensor], Tensor]
    params: Callable[[], Tensors]  # what this rank has now, whole
    model: nn.Module  # the learner's
    factory: Factory
    drops_in_backward: bool  # whether p.grad must be None already after backward


def train(
    subject: Subject, single: Single, spy: Spy, rank: int, world: int, steps: int, micros: int
) -> dict[str, Any]:
    """The loop of the contract, and one process beside it; plain evidence for ``judge``."""
    before, rows = trained(single.model), []
    for step in range(steps):
        batches = [[batch(r, step, m) for m in range(micros)] for r in range(world)]
        maybe = candidates(single.model, batches, single.max_norm)
        first, left = len(spy.calls), set()
        for i, one in enumerate(batches[rank]):
            spy.mark(f"micro {i}")
            backward(loss(subject.forward(one[0]), one) / micros)
            if subject.drops_in_backward:
                left |= with_gradient(subject.model)
        spy.mark("step")
        subject.zero.step()
        spy.mark("after")
        left |= with_gradient(subject.model)
        row = {"before": before, "maybe": maybe, "calls": spy.calls[first:], "left": sorted(left)}
        row |= {"got": subject.params(), "want": single.step(batches)}
        before = trained(single.model)
        rows.append(row)
    sizes = {n: p.numel() for n, p in single.model.named_parameters() if p.requires_grad}
    factory = subject.factory
    return {
        "steps": rows,
        "made": len(factory.made),
        "held": factory.held(),
        "state": factory.state(),
        "kind": factory.kind,
        "max_norm": single.max_norm,
        "micros": micros,
        "sizes": sizes,  # elements
    }


def backward(loss: Tensor) -> None:
    """Torch's own words for reading what was freed say nothing to a learner."""
    try:
        loss.backward()
    except RuntimeError as error:
        if "storage of size 0" not in str(error):
            raise
        message = (
            "backward came to a block whose parameters were freed: they must be gathered again, "
            "into the same storage, before it. output.register_hook(f) calls f just then"
        )
        raise Rejected("freed-too-early", message) from None


def with_gradient(model: nn.Module) -> set[str]:
    return {name for name, p in model.named_parameters() if p.grad is not None}


# ------------------------------------------------------------------ what a rank holds


# The frequent views: they make no storage, so there is nothing new to weigh.
VIEWS = {
    "alias",
    "detach",
    "expand",
    "select",
    "slice",
    "split",
    "t",
    "transpose",
    "view",
}  # aten's


class Weigher(Memory):
    """Weighs at every operation, for a storage may also grow and shrink by resize_()."""

    def __init__(self) -> None:
        super().__init__()
        gc.freeze()  # what is here already is of no interest, and makes gc.collect() slow

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func._schema.name.removeprefix("aten::") not in VIEWS:
            self.peak = max(self.peak, self.count())
        return result

    def measure(self, work: Callable[[], T]) -> tuple[T, int, int]:
        """Its result; the most bytes alive in it and those alive after it, beyond those before."""
        before = self.peak = self.count()
        with self:
            result = work()
        gc.collect()
        return result, self.peak - before, self.count() - before
