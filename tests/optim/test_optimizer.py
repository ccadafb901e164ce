"""The user's optimizer under every kind of strategy, against a plain loop in one process."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import swa_utils

import toys
from conformance import Arrays, arrays
from conftest import GetRanks, long_unless
from shardlab import comm, naming
from shardlab import config as configs
from shardlab.checkpoint import load as loading
from shardlab.checkpoint import manifest as manifests
from shardlab.checkpoint.course import own_state
from shardlab.checkpoint.save import About, Checkpoints
from shardlab.checkpoint.start import Start
from shardlab.config import OPTIMIZERS, CheckpointConfig, Config, TrainingConfig
from shardlab.errors import UsageError
from shardlab.naming import STRATEGIES
from shardlab.optim import factory
from shardlab.optim.muon import Muon, matrices
from shardlab.run import assemble, loop
from shardlab.strategies import flat
from shardlab.strategies.base import Setup
from shardlab.strategies.update import Rule
from shardlab.workloads.base import AfterStep, MakeUsers, Workload
from shardlab.world import World

Named = Iterable[tuple[str, nn.Parameter]]
STEPS = 3
BY_BLOCK = ("zero3", "pytorch_zero3")
FLAT = ("zero1", "zero2", "zero3")
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


class Lion(torch.optim.Optimizer):
    """As people write it: one tensor of state, the sign of a mean."""

    def __init__(self, params: Any, lr: float = 1e-2, decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self, _closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["mean"] = torch.zeros_like(p)
                p.mul_(1 - group["lr"] * group["decay"])
                p.add_((0.9 * state["mean"] + 0.1 * p.grad).sign(), alpha=-group["lr"])
                state["mean"].mul_(0.99).add_(p.grad, alpha=0.01)


class Counts(torch.optim.Optimizer):
    """Counts its steps in its groups, and for each parameter in an int: both change the rate."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "taken": 0})

    @torch.no_grad()
    def step(self, _closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            group["taken"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["times"] = state.get("times", 0) + 1
                    rate = group["lr"] / (group["taken"] + state["times"])
                    p.sub_(p.grad, alpha=rate)


class Normed(torch.optim.Optimizer):
    """A rate for each tensor, from its norm, as LARS and LAMB have it: not elementwise."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, _closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / (p.grad.norm() + 1e-9), alpha=group["lr"])


class Coupled(Normed):
    """One rate for all tensors, from the norm of all their gradients."""

    @torch.no_grad()
    def step(self, _closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            mine = [p for p in group["params"] if p.grad is not None]
            norm = sum(p.grad.square().sum() for p in mine) + 1e-9
            for p in mine:
                p.sub_(p.grad / norm, alpha=group["lr"])


class Noisy(Normed):
    @torch.no_grad()
    def step(self, _closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad + torch.randn_like(p), alpha=group["lr"])


class Lists(Normed):
    """Keeps gradients in a list."""

    @torch.no_grad()
    def step(self, _closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    history = self.state[p].setdefault("history", [])
                    history.append(p.grad)
                    p.sub_(sum(history), alpha=group["lr"])


class Outside(Normed):
    """Counts in an attribute."""

    taken = 0

    @torch.no_grad()
    def step(self, _closure: Callable[[], float] | None = None) -> None:
        self.taken += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] / self.taken)


class Remembers(torch.optim.SGD):
    """Keeps a list of its own, as LBFGS does."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        self.own = self.param_groups[0]["params"]


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


def normalizes(
    _step: int, parts: Mapping[str, Tensor], _kept: Mapping[str, dict[str, Tensor]]
) -> None:
    for part in parts.values():
        part.div_(part.norm())


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
    "clip value": Case(by_name, Rule(clip_value=0.01)),
    "clip norm": Case(by_name, Rule(clip_norm=0.05)),
    "average": Case(no_decay, ema=0.7),
    "after step": Case(by_name, after=keeps_largest),
    "muon": Case(by_muon),
    "muon clipped": Case(by_muon, Rule(clip_norm=0.05, schedule=halves)),
    "muon averaged": Case(by_muon, ema=0.7),
    "by tensor": Case(of(Normed)),
}
WHOLE = ("muon", "muon clipped", "muon averaged", "by tensor")  # they need whole parameters
AGAIN = ("adamw", "nadam", "asgd", "adagrad", "counts", "by name", "average", "after step")


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
        if case.rule.clip_value is not None:
            nn.utils.clip_grad_value_(model.parameters(), case.rule.clip_value)
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
    plan = factory.plan(
        TrainingConfig(ema_decay=case.ema), case.make, case.after, model, "the case"
    )
    return make(Setup(model, plan, toys.loss, world.mesh, case.rule, blocks), **options)


def run(world: World, strategy: str, names: list[str]) -> dict[str, tuple[list[Arrays], Arrays]]:
    results = {}
    for name in names:
        instance = build(world, strategy, name, world.rank)
        history = []
        for step in range(STEPS):
            instance.gradients([toys.batch(step, world.rank, 0)])
            instance.step()
            history.append(arrays(instance.full_params()))
        results[name] = history, arrays(beside(instance.state_dict()))
    return results


def beside(state: dict[str, Any]) -> dict[str, Tensor | None]:
    return {
        name: value
        for name, of_parameter in state["optimizer"].items()
        for key, value in of_parameter.items()
        if key.startswith(factory.KEPT)
    }


def close(actual: Arrays, expected: Arrays, what: str) -> None:
    assert actual.keys() == expected.keys(), what
    for name in expected:
        np.testing.assert_allclose(
            actual[name], expected[name], rtol=0, atol=1e-10, err_msg=f"{what} {name}"
        )


@pytest.mark.parametrize("world", long_unless(lambda world: world == 2, [2, 3]))
@pytest.mark.parametrize("strategy", long_unless(lambda name: name == "zero2", KINDS))
def test_every_optimizer_equals_one_process(strategy: str, world: int, ranks: GetRanks) -> None:
    # PyTorch's DTensor cannot do what Rprop does: refused, see below.
    refused = {"pytorch_zero3": ("rprop", *WHOLE), "zero3": WHOLE}.get(strategy, ())
    names = [name for name in CASES if name not in refused]
    for results in ranks(world).run(run, strategy, names, deadline_s=200):
        for name in names:
            history, kept = reference(name, world)
            for step in range(STEPS):
                close(results[name][0][step], history[step], f"{name}, step {step}:")
            close(results[name][1], kept, f"{name}, kept:")


def again(*strategies: str) -> list[str]:
    """The cases that all of the strategies can take."""
    return [*AGAIN, *(() if set(strategies) & set(BY_BLOCK) else ("muon", "muon averaged"))]


def hand_over(world: World, giver: str, takers: list[str]) -> dict[str, dict[str, Arrays]]:
    """Two steps by one strategy, the last by others, from its state."""
    results: dict[str, dict[str, Arrays]] = {}
    for name in again(giver, *takers):
        first = build(world, giver, name, world.rank)
        for step in range(STEPS - 1):
            first.gradients([toys.batch(step, world.rank, 0)])
            first.step()
        state = first.state_dict()
        for taker in takers:
            second = build(world, taker, name, 10 + world.rank)
            second.load_state_dict(copy.deepcopy(state))
            second.gradients([toys.batch(STEPS - 1, world.rank, 0)])
            second.step()
            end = arrays(second.full_params())
            kept = arrays(beside(second.state_dict()))
            results.setdefault(name, {})[taker] = {
                **end,
                **{f"kept {n}": a for n, a in kept.items()},
            }
    return results


@pytest.mark.long
@pytest.mark.parametrize(
    ("giver", "takers"),
    [
        ("zero2", ["bucket_ddp_async", "pytorch_zero1", "zero3", "pytorch_zero3"]),
        ("pytorch_zero1", ["zero1"]),
        ("zero1", ["zero2", "bucket_ddp_async"]),
        ("bucket_ddp_async", ["zero3"]),
        ("pytorch_zero3", ["zero2", "bucket_ddp_async"]),
    ],
)
def test_the_state_goes_from_one_strategy_to_another(
    giver: str, takers: list[str], ranks: GetRanks
) -> None:
    for results in ranks(2).run(hand_over, giver, takers, deadline_s=200):
        for name in again(giver, *takers):
            history, kept = reference(name, 2)
            expected = {**history[-1], **{f"kept {n}": a for n, a in kept.items()}}
            for taker in takers:
                close(results[name][taker], expected, f"{name}, {giver} to {taker}:")


def saved(world: World, strategy: str, folder: str, names: list[str]) -> None:
    for name in names:
        instance = build(world, strategy, name, world.rank)
        for step in range(STEPS - 1):
            instance.gradients([toys.batch(step, world.rank, 0)])
            instance.step()
        about = About({}, strategy, None)
        path = Path(folder) / name
        checkpoints = Checkpoints(path, CheckpointConfig(every=1), world, instance, about)
        checkpoints.save(STEPS - 1, own_state(instance, world.device, None))
        assert checkpoints.last is not None
        assert checkpoints.last.error is None


def went_on(world: World, strategy: str, folder: str, names: list[str]) -> dict[str, Arrays]:
    ends = {}
    for name in names:
        instance = build(world, strategy, name, 10 + world.rank)
        path = Path(folder) / name / "checkpoints" / f"step-{STEPS - 1:06d}"
        loading.load(Start(None, path, manifests.read(path)), instance, world, Config())
        instance.gradients([toys.batch(STEPS - 1, world.rank, 0)])
        instance.step()
        kept = arrays(beside(instance.state_dict()))
        ends[name] = arrays(instance.full_params()) | {f"kept {n}": a for n, a in kept.items()}
    return ends


@pytest.mark.long
@pytest.mark.parametrize(
    ("giver", "taker"),
    [
        ("zero2", "pytorch_zero1"),
        ("pytorch_zero3", "zero3"),
        ("bucket_ddp_async", "pytorch_zero3"),
        ("zero1", "zero2"),
    ],
)
def test_a_checkpoint_has_all_that_an_optimizer_keeps(
    giver: str, taker: str, ranks: GetRanks, tmp_path: Path
) -> None:
    names = again(giver, taker)
    ranks(2).run(saved, giver, str(tmp_path), names, deadline_s=100)
    for ends in ranks(2).run(went_on, taker, str(tmp_path), names, deadline_s=100):
        for name in names:
            history, kept = reference(name, 2)
            expected = {**history[-1], **{f"kept {n}": a for n, a in kept.items()}}
            close(ends[name], expected, f"{name}, {giver} to {taker}:")


def loaded(world: World, folder: str) -> Arrays:
    """Parameters and Muon's state as a checkpoint gives them to this world."""
    path = Path(folder) / "muon" / "checkpoints" / f"step-{STEPS - 1:06d}"
    instance = build(world, "zero2", "muon", 10 + world.rank)
    loading.load(Start(None, path, manifests.read(path)), instance, world, Config())
    state = instance.state_dict()
    kept = {f"{n} {k}": t for n, held in state["optimizer"].items() for k, t in held.items()}
    return arrays(state["model"]) | arrays(kept)


@pytest.mark.long
def test_owners_may_change_with_the_world(ranks: GetRanks, tmp_path: Path) -> None:
    ranks(2).run(saved, "zero1", str(tmp_path), ["muon"], deadline_s=60)
    expected, *_ = ranks(2).run(loaded, str(tmp_path), deadline_s=60)
    assert expected["inlet.weight momentum_buffer"].shape == (7, 6)
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
        for model, optimizers in ((ours, [one]), (theirs, two)):
            toys.loss(model, toys.batch(step, 0, 0)).backward()
            for optimizer in optimizers:
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


def planted(world: World, bug: str) -> Arrays:
    """Two steps of zero1 with Muon, and something wrong in how owners are treated."""
    plain_scatter, plain_gather = comm.reduce_scatter, comm.all_gather

    def drop_momentum(instance: Any) -> None:
        for state in instance.optimizer.state.values():
            if "momentum_buffer" in state:
                state["momentum_buffer"].zero_()

    def own_gradient(shard: Tensor, tensor: Tensor, *args: Any, **how: Any) -> Any:
        before = shard.clone() if how["sizes"] is not None else None
        pending = plain_scatter(shard, tensor, *args, **how)
        if bug == "not summed" and before is not None:
            pending.wait()
            shard.copy_(before)
        return pending

    def stale(output: Tensor, shard: Tensor, *args: Any, **how: Any) -> Any:
        before = output.clone() if how["sizes"] is not None else None
        pending = plain_gather(output, shard, *args, **how)
        if bug == "not sent back" and before is not None:
            pending.wait()
            output.copy_(before)
        return pending

    with (
        mock.patch.object(comm, "reduce_scatter", own_gradient),
        mock.patch.object(comm, "all_gather", stale),
    ):
        instance = build(world, "zero1", "muon", world.rank)
        for step in range(2):
            instance.gradients([toys.batch(step, world.rank, 0)])
            instance.step()
            instance.settle()
            if bug == "momentum is lost":
                drop_momentum(instance)
            if bug == "transposed":
                for p in instance.optimizer.state:
                    if p.dim() == 2 and p.shape[0] > p.shape[1]:
                        p.data.copy_(p.data.T.reshape(p.shape))
    return arrays(dict(instance.model.named_parameters()))


@pytest.mark.parametrize("bug", ["not summed", "not sent back", "momentum is lost", "transposed"])
def test_a_bug_in_the_owners_shows(bug: str, ranks: GetRanks) -> None:
    expected = reference("muon", 2)[0][1]
    close(ranks(2).run(planted, "", deadline_s=60)[0], expected, "without a bug")
    ends = ranks(2).run(planted, bug, deadline_s=60)
    assert any(not np.allclose(end[n], expected[n], atol=1e-10) for end in ends for n in expected)


@given(st.lists(st.integers(1, 500), max_size=40), st.integers(1, 9))
def test_whole_parameters_are_dealt_evenly(sizes: list[int], ranks: int) -> None:
    params = {str(i): torch.empty(size, device="meta") for i, size in enumerate(sizes)}
    loads = [0] * ranks
    layout = flat.Layout.dealt(params, flat.deal(params, loads), ranks)
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


def exchanged(world: World, strategy: str) -> list[Arrays]:
    """The parameters; after the exchange, the average; after another, the parameters again."""
    instance = build(world, strategy, "average", world.rank)
    for step in range(STEPS):
        instance.gradients([toys.batch(step, world.rank, 0)])
        instance.step()
    found = [arrays(instance.full_params())]
    for _ in range(2):
        instance.exchange_averages()
        found.append(arrays(instance.full_params()))
        x = toys.batch(0, 0, 0)
        found[-1]["output"] = arrays(instance.infer(lambda m, b: {"y": m(b.inputs)}, x))["y"]
    return found


@pytest.mark.parametrize("strategy", KINDS)
def test_the_average_takes_the_parameters_place_and_gives_it_back(
    strategy: str, ranks: GetRanks
) -> None:
    history, kept = reference("average", 2)
    average = {**history[-1], **kept}
    model = build_net(0)
    model.load_state_dict({n: torch.from_numpy(a) for n, a in average.items()})
    output = model(toys.batch(0, 0, 0).inputs).detach().numpy()
    for before, there, back in ranks(2).run(exchanged, strategy, deadline_s=60):
        close(before, history[-1], "before")
        close(there, {**average, "output": output}, "the average")
        assert not np.allclose(back.pop("output"), output)
        close(back, history[-1], "back")


# ------------------------------------------------------------------ what is refused


def plan_of(make: MakeUsers | None = None, after: AfterStep | None = None, **settings: Any) -> Any:
    return factory.plan(TrainingConfig(**settings), make, after, build_net(0), "the workload")


def refusals(world: World, make: MakeUsers, after: AfterStep | None) -> dict[str, str]:
    found = {}
    for strategy in (*KINDS, "simple_ddp"):
        model = build_net(0)
        kind = naming.resolve(strategy, STRATEGIES, "strategy")
        plan = factory.plan(TrainingConfig(), make, after, model, "the workload")
        try:
            kind(Setup(model, plan, toys.loss, world.mesh))
        except UsageError as error:
            found[strategy] = str(error)
    return found


@pytest.mark.parametrize(
    ("make", "after", "refusing", "reason"),
    [
        (of(Normed), None, BY_BLOCK, "Normed does not update each element by it"),
        (
            of(torch.optim.Adafactor), None, (*FLAT, "pytorch_zero3"),
            "Adafactor does not update each element by itself",
        ),
        (
            of(Coupled), None, (*FLAT, "pytorch_zero3", "pytorch_zero1"),
            "Coupled updates a parameter from what it knows of others",
        ),
        (
            of(torch.optim.SGD, lr=0.1), normalizes, BY_BLOCK,
            "after_step does not update each element by itself",
        ),
        (of(torch.optim.Rprop), None, ("pytorch_zero3",), "Rprop fails on it (RuntimeError"),
        (of(Noisy), None, (*KINDS, "simple_ddp"), ""),
        (
            of(Remembers), None, BY_BLOCK,
            "Remembers keeps parameters in 'own' beside its groups",
        ),
    ],
)  # fmt: skip
def test_what_is_not_elementwise_is_refused_where_elements_are_apart(
    make: MakeUsers,
    after: AfterStep | None,
    refusing: tuple[str, ...],
    reason: str,
    ranks: GetRanks,
) -> None:
    for found in ranks(2).run(refusals, make, after, deadline_s=100):
        assert sorted(found) == sorted(refusing)
        for message in found.values():
            assert reason in message
            assert "\n" not in message


def coupled(world: World) -> Arrays:
    """By an optimizer that needs all gradients at once: in buckets, that is after the last."""
    model = build_net(world.rank)
    kind = naming.resolve("bucket_ddp_async", STRATEGIES, "strategy")
    plan = factory.plan(TrainingConfig(), of(Coupled), None, model, "the workload")
    instance = kind(Setup(model, plan, toys.loss, world.mesh), bucket_mb=1e-4, first_bucket_mb=1e-4)
    for step in range(STEPS):
        instance.gradients([toys.batch(step, world.rank, 0)])
        instance.step()
    return arrays(instance.full_params())


def test_buckets_wait_for_each_other_where_the_optimizer_needs_all(
    ranks: GetRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CASES, "coupled", Case(of(Coupled)))
    expected = reference("coupled", 2)[0][-1]
    for end in ranks(2).run(coupled, deadline_s=60):
        close(end, expected, "coupled")


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


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (foreign, "has a tensor that is none of the parameters that its function was given"),
        (frozen_alone, "updates no parameter that trains"),
        (twice, "has the parameter 'scale' twice"),
        (several, "is a list, not one torch.optim.Optimizer: put several into one class"),
        (without_rate, "group 0 of SGD has no learning rate 'lr'"),
        (raising, "KeyError: 'head' (in the optimizer of the workload)"),
        (of(torch.optim.LBFGS), "LBFGS.step() needs a closure: it computes the loss again itself"),
        (of(torch.optim.SparseAdam), "SparseAdam cannot take a step: SparseAdam does not support"),
    ],
)
def test_a_wrong_optimizer_is_refused_in_a_line(make: MakeUsers, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        plan_of(make)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimizer": "rmspop"}, "did you mean 'rmsprop'"),
        ({"betas": [0.9, 1.5]}, "training.betas are 0 or more and below 1, got 1.5"),
        ({"optimizer": "sgd", "betas": [0.9, 0.9]}, "training.betas: SGD has no such setting"),
        ({"optimizer": "rprop", "weight_decay": 0.1}, "weight_decay: Rprop has no such setting"),
        ({"optimizer_options": {"amsgrab": True}}, "did you mean 'amsgrad'"),
        ({"optimizer_options": {"lr": 1.0}}, "has its own key: training.learning_rate"),
        ({"no_decay": "norms_and_biases"}, "set training.weight_decay"),
        ({"no_decay": "norms_and_bias"}, "did you mean 'norms_and_biases'"),
        ({"clip_norm": 1.0, "clip_value": 1.0}, "which comes first? Set one of them"),
        ({"clip_value": 0.0}, "training.clip_value must be above 0"),
        ({"ema_decay": 1.0}, "training.ema_decay must be above 0 and below 1"),
        ({"optimizer": "torch.nn:Linear"}, "is no class of torch.optim.Optimizer's kind"),
        ({"schedule": "test_optimizer:halves", "warmup_steps": 2}, "says it all itself"),
    ],
)
def test_a_wrong_setting_is_refused_in_a_line(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        plan_of(**settings)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_setting_that_the_users_optimizer_would_not_know_of_is_refused() -> None:
    with pytest.raises(UsageError, match=r"training.learning_rate is for an optimizer of the conf"):
        plan_of(no_decay, learning_rate=0.5)
    workload = Workload("w", Net, toys.loss, toys, schedule=halves)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="has a schedule of its own"):
        assemble.make_schedule(TrainingConfig(schedule="cosine"), workload)


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
        plan_of(optimizer="AdamW", learning_rate=0.3, betas=[0.5, 0.6], eps=1e-3,
                optimizer_options={"amsgrad": True})
    )  # fmt: skip
    assert (group["lr"], group["betas"], group["eps"]) == (0.3, (0.5, 0.6), 1e-3)
    assert (group["amsgrad"], group["weight_decay"]) == (True, 0.0)
    (group,) = options_of(
        plan_of(optimizer="test_optimizer:Lion", optimizer_options={"decay": 0.5})
    )
    assert (group["decay"], group["lr"]) == (0.5, 1e-3)
    (group,) = options_of(plan_of(optimizer="rmsprop", momentum=0.5))
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
            optimizer = factory.named_by(TrainingConfig(learning_rate=0.1))([("p", p)])
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
        settings = {"model.size": "tiny", "data.source": "synthetic", "strategy.name": name,
                    "launch.world": world.size, "training.steps": 1}  # fmt: skip
        config = configs.load(None, settings)
        workload = assemble.build_workload(config)
        strategy = assemble.build_strategy(config, workload, world)
        strategy.gradients(next(loop.Batches(workload, config, world)))
        strategy.step()
        optimizer = getattr(strategy.optimizer, "optim", strategy.optimizer)
        if all(group["fused"] for group in optimizer.param_groups):
            found.append(name)
    return tuple(found)


def test_complex_parameters_are_updated_as_pytorch_does_by_default() -> None:
    p = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    optimizer = factory.named_by(TrainingConfig())([("p", p)])
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert not optimizer.defaults["fused"]
    assert bool((p != 1).all())


def test_state_is_counted_by_measuring() -> None:
    sizes = {n: p.numel() for n, p in build_net(0).named_parameters() if p.requires_grad}
    counted = {}
    for name in ("sgd", "adam", "adamw", "adagrad", "lion", "counts", "average", "by name"):
        tensors = plan_of(CASES[name].make, ema_decay=CASES[name].ema).state_tensors()
        kept = sum(count * sizes[n] for n, count in tensors.items())
        counted[name] = kept / sum(sizes.values())
    left_out = 1 - (sizes["inlet.weight"] + sizes["inlet.bias"]) / sum(sizes.values())
    assert counted == {
        "sgd": 1, "adam": 3, "adamw": 2, "adagrad": 1, "lion": 1, "counts": 0, "average": 3,
        "by name": pytest.approx(left_out),
    }  # fmt: skip


def test_what_a_checkpoint_would_lose_is_refused_before_the_run(ranks: GetRanks) -> None:
    config = configs.load(
        None,
        {
            "model.size": "tiny", "training.steps": 2, "training.optimizer": "test_optimizer:Lists",
            "checkpoint.every": 1, "data.source": "synthetic",
        },
    )  # fmt: skip
    (message,) = set(ranks(2).run(refused, config, deadline_s=60))
    assert "checkpoint.every: Lists keeps a list for a parameter ('history')" in message
    outside = plan_of(of(Outside)).traits
    assert outside.unsaved == "Outside keeps what it needs outside of its state"
    assert plan_of(of(Counts)).traits.unsaved is None


def refused(world: World, config: Config) -> str:
    workload = assemble.build_workload(config)
    with pytest.raises(UsageError) as caught:
        assemble.build_strategy(config, workload, world)
    return str(caught.value)


def trained_by_config(world: World, overrides: dict[str, Any]) -> list[float]:
    config = configs.load(None, {"model.size": "tiny", "training.steps": 3, **overrides})
    workload = assemble.build_workload(config)
    strategy: Any = assemble.build_strategy(config, workload, world)
    rates = []
    for microbatches in loop.Batches(workload, config, world):
        strategy.gradients(microbatches)
        strategy.step()
        rates.append(strategy.optimizer.param_groups[0]["lr"])
    return rates


def test_a_schedule_of_the_users(ranks: GetRanks) -> None:
    overrides = {
        "strategy.name": "zero2", "data.source": "synthetic", "training.learning_rate": 0.01,
        "training.schedule": "test_optimizer:halves", "training.optimizer": "nadam",
    }  # fmt: skip
    for rates in ranks(2).run(trained_by_config, overrides, deadline_s=60):
        assert rates == [0.01, 0.005, 0.0025]
