"""The user's optimizer under every kind of strategy, against a plain loop in one process."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import swa_utils

import resuming
import toys
from conformance import Arrays, arrays, by_config
from conftest import GetRanks, deep_unless, long_unless
from shardlab import config as configs
from shardlab import naming
from shardlab.checkpoint import load as loading
from shardlab.checkpoint import manifest as manifests
from shardlab.checkpoint import parts, rng
from shardlab.checkpoint.resume import Start
from shardlab.checkpoint.save import About, Checkpoints
from shardlab.config import OPTIMIZERS, CheckpointConfig, Config, TrainingConfig
from shardlab.errors import UsageError
from shardlab.naming import STRATEGIES
from shardlab.optim import after_step, optimizers, traits
from shardlab.optim.muon import Muon, matrices
from shardlab.strategies import flat
from shardlab.strategies.base import Setup
from shardlab.strategies.update import Rule
from shardlab.training import builders
from shardlab.workloads.base import AfterStep, MakeUsers, Workload
from shardlab.world import World

Named = Iterable[tuple[str, nn.Parameter]]
STEPS = 3
BY_BLOCK = ("zero3", "pytorch_zero3")
FLAT = ("zero1", "zero2", "zero3")
BY_RANK = ("zero1", "zero2", "pytorch_zero1")  # a rank updates some of the parameters
KINDS = (*FLAT, "pytorch_zero1", "pytorch_zero3", "bucket_ddp_async")


class Net(nn.Module):
    """Matrices, norms and biases; a frozen layer, a matrix that does not divide by 2 or 3."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(6, 7)
        self.norm = nn.LayerNorm(7)
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.middle = nn.Linear(7, 5)
        self.scale = nn.Parameter(torch.rand(1))
        self.outlet = nn.Linear(5, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (rows, 6)
        y = self.frozen(self.norm(torch.tanh(self.inlet(x))))
        out: Tensor = self.outlet(torch.tanh(self.middle(y)) * self.scale)
        return out


def build_net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return Net().double()


# ------------------------------------------------------------------ optimizers


class Own(torch.optim.Optimizer):
    """Updates each parameter by itself, as ``update`` says."""

    elementwise = True

    def __init__(self, params: Any, lr: float = 0.1, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, _closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, p.grad, self.state[p], group)

    def update(self, p: Tensor, grad: Tensor, state: Any, group: Any) -> None:
        raise NotImplementedError


class Lion(Own):
    """As people write it: one tensor of state, the sign of a mean."""

    def __init__(self, params: Any, lr: float = 1e-2, decay: float = 0.1) -> None:
        super().__init__(params, lr, decay=decay)

    def update(self, p: Tensor, grad: Tensor, state: Any, group: Any) -> None:
        mean = state.setdefault("mean", torch.zeros_like(p))
        p.mul_(1 - group["lr"] * group["decay"])
        p.add_((0.9 * mean + 0.1 * grad).sign(), alpha=-group["lr"])
        mean.mul_(0.99).add_(grad, alpha=0.01)


class Counts(Own):
    """Counts its steps in its groups, and for each parameter in an int: both change the rate."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr, taken=0)

    def step(self, _closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            group["taken"] += 1
        super().step()

    def update(self, p: Tensor, grad: Tensor, state: Any, group: Any) -> None:
        state["times"] = state.get("times", 0) + 1
        p.sub_(grad, alpha=group["lr"] / (group["taken"] + state["times"]))


class Normed(Own):
    """A rate for each tensor, from its norm, as LARS and LAMB have it: not elementwise."""

    elementwise = False
    by_parameter = True

    def update(self, p: Tensor, grad: Tensor, state: Any, group: Any) -> None:  # noqa: ARG002
        p.sub_(grad / (grad.norm() + 1e-9), alpha=group["lr"])


class Coupled(Normed):
    """One rate for all tensors, from the norm of all their gradients."""

    by_parameter = False

    @torch.no_grad()
    def step(self, _closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            mine = [p for p in group["params"] if p.grad is not None]
            norm = sum(p.grad.square().sum() for p in mine) + 1e-9
            for p in mine:
                p.sub_(p.grad / norm, alpha=group["lr"])


class Lists(Normed):
    """Keeps gradients in a list."""

    def update(self, p: Tensor, grad: Tensor, state: Any, group: Any) -> None:
        history = state.setdefault("history", [])
        history.append(grad)
        p.sub_(sum(history), alpha=group["lr"])


class Remembers(torch.optim.SGD):
    """Keeps a list of its own, as LBFGS does."""

    elementwise = True

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        self.own = self.param_groups[0]["params"]


class Anchored(torch.optim.SGD):
    """Has the first parameters as its state before the first step."""

    elementwise = True

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        for p in self.param_groups[0]["params"]:
            self.state[p]["anchor"] = p.detach().clone()


@dataclass(frozen=True)
class Of:
    """Every parameter in one group, by a class."""

    kind: Any
    options: tuple[tuple[str, Any], ...] = ()

    def __call__(self, named: Named) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = self.kind([p for _, p in named], **dict(self.options))
        return made


def of(kind: Any, **options: Any) -> Of:
    return Of(kind, tuple(options.items()))


def no_decay(named: Named) -> torch.optim.Optimizer:
    """The usual rule, by shapes."""
    params = [p for _, p in named if p.requires_grad]
    groups = [
        {"params": [p for p in params if p.ndim >= 2], "weight_decay": 0.3},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.02, betas=(0.8, 0.9))


def by_name(named: Named) -> torch.optim.Optimizer:
    """Rates by names, groups in another order than the parameters; the inlet is left out."""
    params = dict(named)
    last = [p for n, p in params.items() if n.startswith("outlet")]
    norms = [p for n, p in params.items() if "norm" in n]
    rest = [p for n, p in params.items() if n.split(".")[0] in ("middle", "scale", "frozen")]
    return torch.optim.SGD(
        [{"params": last, "lr": 0.3}, {"params": norms, "lr": 0.01}, {"params": rest}],
        lr=0.1,
        momentum=0.9,
    )


def by_muon(named: Named) -> torch.optim.Optimizer:
    """Muon for two matrices, one of them higher than wide, and AdamW for the rest."""
    params = dict(named)
    mine = [p for n, p in params.items() if n in ("inlet.weight", "middle.weight")]
    rest = [p for n, p in params.items() if n not in ("inlet.weight", "middle.weight")]
    groups = [{"params": rest}, {"params": mine, "by_muon": True}]
    return Muon(groups, lr=0.02, weight_decay=0.1)


def named_pairs(named: Named) -> torch.optim.Optimizer:
    """PyTorch takes the pairs as they are."""
    return torch.optim.Adam(named, lr=0.02)


def halves(step: int) -> float:
    return 0.5**step


def keeps_largest(
    step: int, parts: Mapping[str, Tensor], kept: Mapping[str, dict[str, Tensor]]
) -> None:
    """The largest value so far of each element; and it changes the parameters."""
    for name, part in parts.items():
        part.clamp_(-0.4, 0.4).mul_(1 + 0.01 * step)
        largest = kept[name].get("largest", part)
        kept[name]["largest"] = torch.maximum(largest, part)


PLAIN = Rule()


@dataclass(frozen=True)
class Case:
    make: MakeUsers
    rule: Rule = PLAIN
    after: AfterStep | None = None
    ema: float | None = None


CASES = {
    "sgd": Case(of(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True)),
    "adam": Case(of(torch.optim.Adam, lr=0.02, amsgrad=True)),
    "adamw": Case(of(torch.optim.AdamW, lr=0.02)),
    "rmsprop": Case(of(torch.optim.RMSprop, lr=0.02, centered=True)),
    "adagrad": Case(of(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.2)),
    "adadelta": Case(of(torch.optim.Adadelta)),
    "nadam": Case(of(torch.optim.NAdam, lr=0.02)),
    "radam": Case(of(torch.optim.RAdam, lr=0.02)),
    "adamax": Case(of(torch.optim.Adamax, lr=0.02)),
    "asgd": Case(of(torch.optim.ASGD, lr=0.1, t0=1)),
    "rprop": Case(of(torch.optim.Rprop, lr=0.02)),
    "lion": Case(of(Lion)),
    "counts": Case(of(Counts)),
    "no decay": Case(no_decay),
    "by name": Case(by_name),
    "pairs": Case(named_pairs),
    "schedule": Case(no_decay, Rule(schedule=halves)),
    "clip norm": Case(by_name, Rule(clip_norm=0.05)),
    "average": Case(no_decay, ema=0.7),
    "after step": Case(by_name, after=keeps_largest),
    "muon": Case(by_muon),
    "muon clipped": Case(by_muon, Rule(clip_norm=0.05, schedule=halves)),
    "muon averaged": Case(by_muon, ema=0.7),
    "by tensor": Case(of(Normed)),
    "coupled": Case(of(Coupled)),  # buckets must wait for the last gradient
}
WHOLE = ("muon", "muon clipped", "muon averaged", "by tensor")  # they need whole parameters
AGAIN = (
    "adamw", "nadam", "asgd", "adagrad", "counts", "by name", "average", "after step", "muon",
    "muon averaged",
)  # fmt: skip


def taken_by(strategy: str) -> list[str]:
    """The cases that a strategy can take."""
    refused = () if strategy == "bucket_ddp_async" else ("coupled",)
    refused += WHOLE if strategy in BY_BLOCK else ()
    refused += ("rprop",) if strategy == "pytorch_zero3" else ()  # DTensor fails on it, see below
    return [name for name in CASES if name not in refused]


# ------------------------------------------------------------------ both ways


def reference(name: str, world: int) -> tuple[list[Arrays], Arrays]:
    """One process, PyTorch alone; the parameters after each step, and what is kept beside."""
    case, model = CASES[name], build_net(0)
    optimizer = case.make(model.named_parameters())
    rates = [group["lr"] for group in optimizer.param_groups]
    average = swa_utils.AveragedModel(
        model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(case.ema or 0.5)
    )
    kept: dict[str, dict[str, Tensor]] = {n: {} for n, _ in model.named_parameters()}
    updated = {p for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    history = []
    for step in range(STEPS):
        batches = [toys.batch(step, rank, 0) for rank in range(world)]
        count = sum(b.count for b in batches)
        sum((toys.loss(model, b) for b in batches), torch.zeros(())).div(count).backward()
        if case.rule.clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), case.rule.clip_norm)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * case.rule.schedule(step)
        optimizer.step()
        model.zero_grad()
        if case.after is not None:
            with torch.no_grad():
                parts = {n: p for n, p in model.named_parameters() if p in updated}
                case.after(step, parts, kept)
        average.update_parameters(model)
        history.append(arrays(dict(model.named_parameters())))
    beside = {n: k["largest"] for n, k in kept.items() if k}
    if case.ema is not None:
        beside = {n: p for n, p in average.module.named_parameters() if p.requires_grad}
    return history, arrays(beside)


def build(world: World, strategy: str, name: str, seed: int) -> Any:
    case, model = CASES[name], build_net(seed)
    make = naming.resolve(strategy, STRATEGIES, "strategy")
    options: dict[str, Any] = {}
    blocks = ("inlet", "middle") if strategy in BY_BLOCK else ()
    if "first_bucket_mb" in inspect.signature(make).parameters:
        options |= {"bucket_mb": 1e-4, "first_bucket_mb": 1e-4}  # several
    plan = optimizers.build(
        TrainingConfig(ema_decay=case.ema), case.make, case.after, model, "the case"
    )
    return make(Setup(model, plan, toys.loss, world.mesh, case.rule, blocks), **options)


def train(world: World, instance: Any, steps: Iterable[int] = range(STEPS)) -> list[Arrays]:
    """The tensors after each step."""
    history = []
    for step in steps:
        instance.gradients([toys.batch(step, world.rank, 0)])
        instance.step()
        history.append(arrays(instance.full_tensors()))
    return history


@dataclass
class Course:
    tensors: list[Arrays]  # after each step
    kept: Arrays  # of each parameter, beside the optimizer's own state
    # Of an average: with it in the parameters' place, and back again; and what the model returns.
    exchanged: list[tuple[Arrays, Any]]


def run(world: World, giver: str, taker: str, names: list[str]) -> list[Course]:
    """The last step by the taker, from a checkpoint of the giver, if they are two."""
    found = []
    for name in names:
        instance = build(world, giver, name, world.rank)
        tensors = train(world, instance, range(STEPS - 1))
        if taker != giver:
            first, instance = instance, build(world, taker, name, 10 + world.rank)
            resuming.hand_over(world, first, instance)
        tensors += train(world, instance, [STEPS - 1])
        course = Course(tensors, beside(world, instance), [])
        for _ in range(2 if CASES[name].ema else 0):
            instance.exchange_averages()
            output = instance.infer(lambda m, b: m(b.inputs), toys.batch(0, 0, 0))
            course.exchanged.append((arrays(instance.full_tensors()), output))
        found.append(course)
    return found


def beside(world: World, strategy: Any) -> Arrays:
    """What the case keeps of each parameter beside the optimizer's own state."""
    return arrays({
        path.rpartition("/")[0]: value
        for path, value in resuming.whole_state(world, strategy).items()
        if path.rpartition("/")[2].startswith(after_step.KEPT)
    })  # fmt: skip


def close(actual: Arrays, expected: Arrays, what: str) -> None:
    assert actual.keys() == expected.keys(), what
    for name in expected:
        np.testing.assert_allclose(
            actual[name], expected[name], rtol=0, atol=1e-10, err_msg=f"{what} {name}"
        )


def outputs(tensors: Arrays) -> Tensor:
    model = build_net(0)
    model.load_state_dict({n: torch.from_numpy(a) for n, a in tensors.items()})
    out: Tensor = model(toys.batch(0, 0, 0).inputs)
    return out


def compare(ranks: GetRanks, giver: str, taker: str, world: int, names: list[str]) -> None:
    for courses in ranks(world).run(run, giver, taker, names, deadline_s=200):
        for name, course in zip(names, courses, strict=True):
            history, kept = reference(name, world)
            for step in range(STEPS):
                close(course.tensors[step], history[step], f"{name}, step {step}:")
            close(course.kept, kept, f"{name}, kept:")
            places = {**history[-1], **kept}, history[-1]
            for (tensors, output), wanted in zip(course.exchanged, places, strict=False):
                close(tensors, wanted, f"{name}, exchanged:")
                torch.testing.assert_close(output, outputs(wanted))


# Each strategy takes half of its cases with two ranks and the others with three.
HALVES = [
    (strategy, strategy, world, taken_by(strategy)[(world + place) % 2 :: 2])
    for place, strategy in enumerate(KINDS)
    for world in (2, 3)
]
# A checkpoint has whole tensors, so who wrote it does not matter: each kind writes and reads once.
RING = itertools.pairwise(
    ("zero2", "pytorch_zero1", "zero1", "bucket_ddp_async", "zero3", "pytorch_zero3", "zero2")
)
GIVEN = [(a, b, 2, [n for n in AGAIN if {n} <= {*taken_by(a)} & {*taken_by(b)}]) for a, b in RING]
REST = [
    (strategy, strategy, world, [name for name in taken_by(strategy) if name not in names])
    for strategy, _, world, names in HALVES
]


@pytest.mark.parametrize(
    ("giver", "taker", "world", "names"),
    long_unless(
        lambda giver, taker, world, _: (giver, taker, world) == ("zero2", "zero2", 2),
        [*HALVES, *GIVEN, *deep_unless(lambda *_: False, REST)],
    ),
)
def test_every_optimizer_equals_one_process(
    giver: str, taker: str, world: int, names: list[str], ranks: GetRanks
) -> None:
    compare(ranks, giver, taker, world, names)


def saved(world: World, folder: str) -> None:
    instance = build(world, "zero1", "muon", world.rank)
    train(world, instance, range(STEPS - 1))
    about = About({}, "zero1", None)
    checkpoints = Checkpoints(Path(folder), CheckpointConfig(every=1), world, instance, about)
    checkpoints.save(STEPS - 1, rng.get(world.device))
    assert checkpoints.last is not None
    assert checkpoints.last.error is None


def loaded(world: World, folder: str) -> Arrays:
    """Parameters and Muon's state as a checkpoint gives them to this world."""
    path = Path(folder) / "checkpoints" / f"step-{STEPS - 1:06d}"
    instance = build(world, "zero2", "muon", 10 + world.rank)
    loading.load(Start(None, path, manifests.read(path)), instance, world, Config())
    return arrays(instance.full_tensors()) | arrays(resuming.whole_state(world, instance))


@pytest.mark.long
def test_owners_may_change_with_the_world(ranks: GetRanks, tmp_path: Path) -> None:
    ranks(2).run(saved, str(tmp_path), deadline_s=60)
    expected, *_ = ranks(2).run(loaded, str(tmp_path), deadline_s=60)
    assert expected["inlet.weight/momentum_buffer"].shape == (7, 6)
    close(reference("muon", 2)[0][STEPS - 2], {n: expected[n] for n in Net().state_dict()}, "")
    for size in (1, 3):
        for found in ranks(size).run(loaded, str(tmp_path), deadline_s=60):
            close(found, expected, f"world {size}")


def test_our_muon_is_pytorchs_beside_its_adamw() -> None:
    """One optimizer with groups of both kinds does what two separate ones do."""
    ours, theirs = build_net(0), build_net(0)
    one = by_muon(ours.named_parameters())
    names = ("inlet.weight", "middle.weight")
    mine = [p for n, p in theirs.named_parameters() if n in names]
    rest = [p for n, p in theirs.named_parameters() if n not in names]
    settings: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1}
    muon = torch.optim.Muon(mine, adjust_lr_fn="match_rms_adamw", **settings)
    two = [muon, torch.optim.AdamW(rest, **settings)]
    for step in range(STEPS):
        for model, made in ((ours, [one]), (theirs, two)):
            toys.loss(model, toys.batch(step, 0, 0)).backward()
            for optimizer in made:
                optimizer.step()
            model.zero_grad()
    for (name, p), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(p, other), name


def test_muon_takes_the_matrices_of_the_blocks() -> None:
    class Language(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(11, 4)
            self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
            self.head = nn.Linear(4, 11)

    inside = {"blocks.0.weight", "blocks.1.weight"}
    assert matrices(Language(), ["blocks.0", "blocks.1"]) == inside
    assert matrices(Language(), ()) == inside | {"head.weight"}
    with pytest.raises(UsageError, match="no matrix that Muon could update"):
        matrices(nn.LayerNorm(3), ())


@given(st.lists(st.integers(1, 500), max_size=40), st.integers(1, 9))
def test_whole_parameters_are_dealt_evenly(sizes: list[int], ranks: int) -> None:
    params = {str(i): torch.empty(size, device="meta") for i, size in enumerate(sizes)}
    loads = [0] * ranks
    layout = flat.Layout.of(params, ranks, flat.deal(params, loads))
    assert layout.sizes == tuple(loads)
    assert layout.padded == layout.size == sum(sizes)
    assert max(loads) <= sum(sizes) / ranks + max(sizes, default=0)
    dealt = [piece for rank in range(ranks) for piece in layout.pieces(rank)]
    assert sorted((p.name, p.start, p.length) for p in dealt) == sorted(
        (name, 0, p.numel()) for name, p in params.items()
    )
    for rank in range(ranks):
        covered = sorted((p.offset, p.offset + p.length) for p in layout.pieces(rank))
        assert [low for low, _ in covered] == [0, *(high for _, high in covered)][: len(covered)]


# ------------------------------------------------------------------ what is refused


def plan_of(make: MakeUsers | None = None, after: AfterStep | None = None, **settings: Any) -> Any:
    named = {f"training.{key}": value for key, value in settings.items()}
    training = configs.load(None, named).training
    return optimizers.build(training, make, after, build_net(0), "the workload")


def made(world: World, make: MakeUsers, strategy: str = "simple_ddp") -> Any:
    model, kind = build_net(0), naming.resolve(strategy, STRATEGIES, "strategy")
    plan = optimizers.build(TrainingConfig(), make, None, model, "the workload")
    return kind(Setup(model, plan, toys.loss, world.mesh))


def refusals(world: World, make: MakeUsers) -> dict[str, str]:
    found = {}
    for strategy in (*KINDS, "simple_ddp"):
        try:
            made(world, make, strategy)
        except UsageError as error:
            found[strategy] = str(error)
    return found


def test_the_function_is_called_once_with_the_models_own_parameters() -> None:
    model, calls = build_net(0), []

    def make(named: Named) -> torch.optim.Optimizer:
        calls.append(dict(named))
        return no_decay(calls[-1].items())

    whole = optimizers.build(TrainingConfig(), make, None, model, "a test")
    piece = nn.Parameter(torch.zeros(3))
    optimizer = whole({"norm.weight": piece})
    (given,) = calls
    assert {n: id(p) for n, p in given.items()} == {n: id(p) for n, p in model.named_parameters()}
    two_dims, vectors = optimizer.param_groups
    assert [p.numel() for p in two_dims["params"]] == [0]
    assert vectors["params"] == [piece]


class Undeclared(torch.optim.SGD):
    """A subclass may update in another way than PyTorch's class does."""


NOT_SAID = "does not update each element by itself, or its class does not say so"
BY_RANKS = "gives each rank some of the parameters, and the"
# What may look at all gradients: a rank would take one rate for all from those of its own.
OF_ALL = {**dict.fromkeys(BY_BLOCK, NOT_SAID), **dict.fromkeys(BY_RANK, BY_RANKS)}


@pytest.mark.parametrize(
    ("make", "refused"),
    [
        (of(Normed), dict.fromkeys(BY_BLOCK, f"Normed {NOT_SAID}")),
        (
            of(torch.optim.Adafactor),
            dict.fromkeys((*FLAT, "pytorch_zero3"), "Adafactor does not update each element by"),
        ),
        (of(torch.optim.Rprop), {"pytorch_zero3": "Rprop fails on them"}),
        (
            of(Remembers),
            dict.fromkeys((*FLAT, "pytorch_zero3"), "Remembers keeps parameters in 'own' beside"),
        ),
        (
            of(Anchored),
            dict.fromkeys(
                (*FLAT, "pytorch_zero3"),
                "can only cut state of the same shape whose elements are equal",
            ),
        ),
        (of(Undeclared, lr=0.1), OF_ALL),
        (of(Coupled), OF_ALL),
    ],
)
def test_an_optimizer_that_needs_more_than_a_rank_has_is_refused(
    make: MakeUsers, refused: dict[str, str], ranks: GetRanks
) -> None:
    for found in ranks(2).run(refusals, make, deadline_s=100):
        assert found.keys() == refused.keys()
        for strategy, message in found.items():
            assert refused[strategy] in message
            assert "\n" not in message
            if refused[strategy] == BY_RANKS:
                assert message.startswith(f"{strategy} ")
                assert "write by_parameter = True in the class" in message


@pytest.mark.parametrize("strategy", ["tensor_parallel", "pipeline_1f1b", "pytorch_pipeline"])
def test_so_it_is_where_the_model_is_cut(strategy: str, ranks: GetRanks) -> None:
    axis = "tensor" if "tensor" in strategy else "pipeline"
    for message in ranks(2).run(refused_by, strategy, deadline_s=60):
        assert message.startswith(f"{axis} gives each rank some of the parameters, and the class")


def refused_by(world: World, strategy: str) -> str:
    config = configs.load(None, {"model.size": "tiny", "strategy.name": strategy})
    workload = replace(builders.build_workload(config), optimizer=of(Undeclared, lr=0.1))
    with pytest.raises(UsageError) as caught:
        builders.build_strategy(config, workload, world)
    return str(caught.value)


# ------------------------------------------------------------------ the table of PyTorch's classes

SHAPES: dict[str, tuple[int, ...]] = {
    "scalar": (),
    "vector": (5,),
    "matrix": (5, 4),
    "cube": (5, 4, 3),
}
OF_PYTORCH = [
    kind for kind in vars(torch.optim).values()
    if isinstance(kind, type) and kind.__name__ not in ("Optimizer", "LBFGS", "SparseAdam")
]  # fmt: skip


def after_steps(kind: Any, shapes: Mapping[str, tuple[int, ...]], cut: bool) -> Any:
    """Small tensors after a few steps: whole, or each as two flat pieces of different sizes."""
    generator = torch.Generator().manual_seed(0)

    def random() -> list[dict[str, Tensor]]:
        """What each rank has."""
        named = {
            name: torch.randn(shape, generator=generator, dtype=torch.float64)
            for name, shape in shapes.items()
        }
        if not cut:
            return [named]
        pieces = {n: t.flatten().tensor_split([t.numel() // 3]) for n, t in named.items()}
        return [{n: of_ranks[rank] for n, of_ranks in pieces.items()} for rank in range(2)]

    start, *gradients = [random() for _ in range(5)]
    model = nn.ParameterDict({n: torch.zeros(shape) for n, shape in shapes.items()})
    plan = optimizers.build(TrainingConfig(), of(kind, lr=0.05), None, model, "a test")
    ends = []
    for rank, mine in enumerate(start):
        held = {name: nn.Parameter(t) for name, t in mine.items()}
        optimizer = plan(held)
        for gradient in gradients:
            for name, p in held.items():
                p.grad = gradient[rank][name]
            optimizer.step()
            optimizer.zero_grad()
        ends.append(held)
    return {n: torch.cat([held[n].detach().flatten() for held in ends]) for n in shapes}


@pytest.mark.parametrize("kind", OF_PYTORCH)
def test_the_table_of_pytorchs_optimizers_is_right(kind: Any) -> None:
    shapes = SHAPES if kind is not torch.optim.Muon else {"matrix": (5, 4)}
    assert kind in traits.KNOWN
    whole = after_steps(kind, shapes, cut=False)
    if kind in traits.ELEMENTWISE:
        torch.testing.assert_close(after_steps(kind, shapes, cut=True), whole)
    else:
        with pytest.raises((AssertionError, ValueError, ZeroDivisionError)):
            torch.testing.assert_close(after_steps(kind, shapes, cut=True), whole)


def foreign(_named: Named) -> torch.optim.Optimizer:
    return torch.optim.SGD(Net().parameters(), lr=0.1)


def frozen_alone(named: Named) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named if not p.requires_grad], lr=0.1)


def twice(named: Named) -> torch.optim.Optimizer:
    made = torch.optim.SGD([p for _, p in named], lr=0.1)
    made.param_groups[0]["params"].append(made.param_groups[0]["params"][0])
    return made


def several(named: Named) -> Any:
    return [torch.optim.SGD([p for _, p in named], lr=0.1)]


def without_rate(named: Named) -> torch.optim.Optimizer:
    made = torch.optim.SGD([p for _, p in named], lr=0.1)
    made.param_groups[0]["lr"] = None
    return made


def raising(_named: Named) -> torch.optim.Optimizer:
    raise KeyError("head")


WRONG: list[tuple[MakeUsers | None, dict[str, Any], str]] = [
    (foreign, {}, "has a tensor that is none of the parameters that its function was given"),
    (frozen_alone, {}, "updates no parameter that trains"),
    (twice, {}, "has the parameter 'scale' twice"),
    (several, {}, "is a list, not one torch.optim.Optimizer: put several into one class"),
    (without_rate, {}, "group 0 of SGD has no learning rate 'lr'"),
    (raising, {}, "KeyError: 'head' (in the optimizer of the workload)"),
    (of(torch.optim.LBFGS), {}, "LBFGS.step() needs a closure: it computes the loss again"),
    (of(torch.optim.SparseAdam), {}, "SparseAdam needs sparse gradients, which no strategy"),
    (None, {"optimizer": "rmspop"}, "did you mean 'rmsprop'"),
    (None, {"optimizer_options": {"betas": [0.9, 1.5]}}, "Invalid beta parameter at index 1: 1.5"),
    (
        None,
        {"optimizer": "sgd", "optimizer_options": {"betas": [0.9, 0.9]}},
        "option of SGD 'betas'",
    ),
    (None, {"optimizer": "rprop", "weight_decay": 0.1}, "decay: Rprop has no such setting"),
    (None, {"optimizer_options": {"amsgrab": True}}, "did you mean 'amsgrad'"),
    (None, {"optimizer_options": {"lr": 1.0}}, "has its own key: training.learning_rate"),
    (None, {"no_decay": "norms_and_biases"}, "has no effect without training.weight_decay"),
    (None, {"no_decay": "norms_and_bias"}, "did you mean 'norms_and_biases'"),
    (None, {"clip_value": 1.0}, "did you mean 'training.clip_norm'"),
    (None, {"ema_decay": 1.0}, "training.ema_decay must be below 1, got 1.0"),
    (None, {"optimizer": "torch.nn:Linear"}, "is no class of torch.optim.Optimizer's kind"),
    (
        None,
        {"schedule": "test_optimizer:halves", "warmup_steps": 2},
        "applies only to built-in schedules",
    ),
    (no_decay, {"learning_rate": 0.5}, "training.learning_rate is for an optimizer of the conf"),
]


@pytest.mark.parametrize(("make", "settings", "message"), WRONG)
def test_what_is_wrong_is_refused_in_a_line(
    make: MakeUsers | None, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError) as caught:
        plan_of(make, **settings)
    assert message in str(caught.value)
    if make is not raising:  # the user's own error is shown with its place
        assert "\n" not in str(caught.value)


def test_two_schedules_are_refused() -> None:
    workload = Workload("w", Net, toys.loss, toys, schedule=halves)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="has a schedule of its own"):
        builders.make_schedule(TrainingConfig(schedule="cosine"), workload)


# ------------------------------------------------------------------ from the config


def test_every_class_of_pytorch_has_its_name_here() -> None:
    """The config is read without torch, so the names stand there."""
    classes = {n.lower() for n, c in vars(torch.optim).items() if isinstance(c, type)}
    assert set(OPTIMIZERS) == classes - {"optimizer"}


def options_of(plan: Any) -> list[dict[str, Any]]:
    params = {n: p for n, p in build_net(0).named_parameters() if p.requires_grad}
    return [dict(group) for group in plan(params).param_groups]


def test_the_configs_keys_are_the_classes_arguments() -> None:
    (group,) = options_of(
        plan_of(optimizer="AdamW", learning_rate=0.3,
                optimizer_options={"betas": [0.5, 0.6], "eps": 1e-3, "amsgrad": True})
    )  # fmt: skip
    assert (group["lr"], group["betas"], group["eps"]) == (0.3, (0.5, 0.6), 1e-3)
    assert (group["amsgrad"], group["weight_decay"]) == (True, 0.0)
    (group,) = options_of(
        plan_of(optimizer="test_optimizer:Lion", optimizer_options={"decay": 0.5})
    )
    assert (group["decay"], group["lr"]) == (0.5, 1e-3)
    (group,) = options_of(plan_of(optimizer="rmsprop", optimizer_options={"momentum": 0.5}))
    assert group["momentum"] == 0.5
    decayed, others = options_of(plan_of(weight_decay=0.2, no_decay="norms_and_biases"))
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.2, 0.0)
    assert all(p.dim() > 1 for p in decayed["params"])
    assert all(p.dim() < 2 for p in others["params"])


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rows": lambda dense: dense.clone(),  # (2, 3, 4, 4)
    "columns": lambda dense: dense.transpose(0, 1).contiguous().transpose(0, 1),
    "channels last": lambda dense: dense.to(memory_format=torch.channels_last),
    "gaps": lambda dense: torch.stack([dense, dense], -1)[..., 0],
    "one for all": lambda dense: dense[:1].expand_as(dense),
}


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("gradient", LAYOUTS)
@pytest.mark.parametrize("parameter", [name for name in LAYOUTS if name != "one for all"])
def test_memory_in_another_order_is_updated_right(
    parameter: str, gradient: str, later: bool
) -> None:
    """PyTorch's fused Adam updates other elements than it should, and says nothing."""
    results = []
    for own in (True, False):
        torch.manual_seed(0)
        dense = torch.randn(2, 3, 4, 4)
        p = nn.Parameter(dense if later else LAYOUTS[parameter](dense))
        if own:
            optimizer = optimizers.named_by(TrainingConfig(learning_rate=0.1))([("p", p)])
        else:
            optimizer = torch.optim.AdamW([p], lr=0.1, weight_decay=0.0)
        for step in range(3):
            if later and step == 1:
                p.data = LAYOUTS[parameter](p.data)
            p.grad = LAYOUTS[gradient](torch.randn(2, 3, 4, 4))
            optimizer.step()
        if own:
            assert optimizer.param_groups[0]["fused"] == (parameter == "rows")
        results.append(p.detach().clone())
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


FUSED = ("simple_ddp", "bucket_ddp_async", "zero1", "zero2", "zero3", "pytorch_zero1")


def test_every_strategy_updates_in_one_pass(ranks: GetRanks) -> None:
    """Those that shard too, whose optimizer is made before its shards are there."""
    assert set(ranks(2).run(is_fused, FUSED, deadline_s=60)) == {FUSED}


def is_fused(world: World, strategies: Sequence[str]) -> tuple[str, ...]:
    found = []
    for name in strategies:
        (strategy, _), *_ = by_config(world, {"strategy.name": name, "training.steps": 1})
        optimizer = getattr(strategy.optimizer, "optim", strategy.optimizer)
        if all(group["fused"] for group in optimizer.param_groups):
            found.append(name)
    return tuple(found)


def test_complex_parameters_are_updated_as_pytorch_does_by_default() -> None:
    p = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    optimizer = optimizers.named_by(TrainingConfig())([("p", p)])
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert not optimizer.defaults["fused"]
    assert bool((p != 1).all())


def test_state_is_counted_after_a_step() -> None:
    sizes = {n: p.numel() for n, p in build_net(0).named_parameters() if p.requires_grad}
    counted = {}
    for name in ("sgd", "adam", "adamw", "adagrad", "lion", "counts", "average", "by name"):
        plan = plan_of(CASES[name].make, ema_decay=CASES[name].ema)
        tensors = optimizers.state_tensors(plan, dict(build_net(0).named_parameters()))
        kept = sum(count * sizes[n] for n, count in tensors.items())
        counted[name] = kept / sum(sizes.values())
    left_out = 1 - (sizes["inlet.weight"] + sizes["inlet.bias"]) / sum(sizes.values())
    assert counted == {
        "sgd": 1, "adam": 3, "adamw": 2, "adagrad": 1, "lion": 1, "counts": 0, "average": 3,
        "by name": pytest.approx(left_out),
    }  # fmt: skip


class Apart(torch.optim.SGD):
    """Halves its rate in every step, by a count of its own."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        self.taken = 0
        self.fixed = (2, torch.ones(2))

    def step(self, closure: Any = None) -> Any:
        self.taken += 1
        return super().step(closure)


def begun(world: World, kind: Any, folder: Path) -> None:
    """What can be known when the run begins is refused then."""
    strategy = made(world, of(kind))
    Checkpoints(folder, CheckpointConfig(), world, strategy, About({}, "simple_ddp", 1))
    train(world, strategy, [0])
    parts.held_by(strategy)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Lists, ("a checkpoint cannot hold 'optimizer/", "/history', which is a list")),
        (Apart, ("a checkpoint cannot hold 'taken' of Apart, which step() changes",)),
    ],
)
def test_what_a_checkpoint_would_lose_is_refused(
    kind: Any, words: Sequence[str], ranks: GetRanks, tmp_path: Path
) -> None:
    """A resumed run would begin to count again, without a word."""
    with pytest.raises(UsageError) as caught:
        ranks(2).run(begun, kind, tmp_path, deadline_s=60)
    assert all(part in str(caught.value) for part in words)
    assert list(tmp_path.iterdir()) == []


def rates(world: World, settings: dict[str, Any]) -> list[float]:
    return [s.optimizer.param_groups[0]["lr"] for s, _ in by_config(world, settings)]


def test_a_schedule_of_the_users(ranks: GetRanks) -> None:
    settings = {
        "strategy.name": "zero2", "training.learning_rate": 0.01, "training.optimizer": "nadam",
        "training.schedule": "test_optimizer:halves",
    }  # fmt: skip
    for found in ranks(2).run(rates, settings, deadline_s=60):
        assert found == [0.01, 0.005, 0.0025]
