"""A strategy against one plain process: the law that every strategy must obey.

``conform`` runs the strategy on real ranks, each initialised differently, on every toy, and
returns what differs from the reference: a plain loop that sees all ranks' micro-batches one
after another and knows nothing of shardlab's strategies. Where a strategy's ranks take steps of
their own, the loop plays them as workers one after another.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import toys
from shardlab import config as configs
from shardlab import naming
from shardlab.config import TrainingConfig
from shardlab.launch.ranks import Ranks
from shardlab.ledger import LEDGER
from shardlab.naming import STRATEGIES
from shardlab.optim import optimizers
from shardlab.strategies.base import Rounds, Setup
from shardlab.strategies.local.rounds import cut, due
from shardlab.strategies.update import Rule
from shardlab.training import builders, loop
from shardlab.workloads.base import Batch, LossFn
from shardlab.world import World

STEPS = 3
STEPS_OF_WORKERS = 5  # two rounds of two, and a step of the third
TOLERANCE = 1e-10
SUMS = ("all_reduce", "reduce_scatter")  # gathered parameters may travel on until they are used

Arrays = dict[str, np.ndarray | None]


@dataclass(frozen=True)
class Case:
    toy: str
    micro: int
    optimizer: str


@dataclass
class Trajectory:
    """What a run looked like: a loss, the gradients and the tensors after each step."""

    losses: list[float] = field(default_factory=list)
    grads: list[Arrays | None] = field(default_factory=list)  # none: not looked at
    params: list[Arrays | None] = field(default_factory=list)
    evaluated: list[float] = field(default_factory=list)  # if asked for
    unfinished: list[str] = field(default_factory=list)  # sums still under way after step()
    rounds: Rounds | None = None  # of a strategy whose ranks are workers

    def take_step(self, strategy: Any, microbatches: Sequence[Batch]) -> None:
        self.losses.append(float(strategy.gradients(microbatches)))
        self.grads.append(arrays(strategy.full_grads()))
        strategy.step()
        self.params.append(arrays(strategy.full_tensors()))


MICRO, OPTIMIZERS = (1, 2, 3), ("sgd", "adamw")
ALL_CASES = [Case(*c) for c in itertools.product(toys.TOYS, MICRO, OPTIMIZERS)]


def covering(
    *factors: Sequence[Hashable], but: Callable[..., bool] = lambda *_: False
) -> list[tuple[Any, ...]]:
    """Some rows of a product, in which each two values of two factors meet at least once. ``but``:
    whether a row is none."""
    rows = [row for row in itertools.product(*factors) if not but(*row)]
    pairs_of = [frozenset(itertools.combinations(enumerate(row), 2)) for row in rows]
    left = set().union(*pairs_of)
    chosen = []
    while left:
        best = max(range(len(rows)), key=lambda i: len(left & pairs_of[i]))
        left -= pairs_of[best]
        chosen.append(rows[best])
    return chosen


def make_optimizer(
    name: str, model: nn.Module | None = None
) -> Callable[[Any], torch.optim.Optimizer]:
    """``model``: Muon alone needs it."""
    if name == "muon":  # it knows what must stay whole
        assert model is not None
        training = TrainingConfig(optimizer="muon", learning_rate=0.05, weight_decay=0.1)
        return optimizers.build(training, None, None, model, "a toy")
    if name == "sgd":
        return optimizers.of_class(torch.optim.SGD, lr=0.1, momentum=0.9)
    # A decay, so that an unused parameter with a zero gradient instead of none would show.
    return optimizers.of_class(torch.optim.AdamW, lr=0.05, weight_decay=0.1)


def arrays(tensors: Mapping[str, Tensor | None]) -> Arrays:
    return {name: None if t is None else _plain(t).numpy().copy() for name, t in tensors.items()}


def _plain(tensor: Tensor) -> Tensor:
    """What numpy takes: it has no bfloat16, and knows no sparse tensors."""
    tensor = tensor.detach()
    tensor = tensor.to_dense() if tensor.is_sparse else tensor
    return tensor.double() if tensor.dtype is torch.bfloat16 else tensor


def one_process(
    model: nn.Module,
    make: Callable[[Any], torch.optim.Optimizer],
    loss_fn: Callable[[nn.Module, Any], Tensor],
    shares: Callable[[int], Sequence[Sequence[Batch]]],
    steps: int = STEPS,
    clip: float | None = None,
    before_step: Callable[[int], None] = lambda _step: None,
) -> Trajectory:
    """A plain loop that sees the micro-batches of all ranks, ``shares(step)``, one after another.

    What forward changes beside the gradients (buffers, parameters, which of them train) it changes
    on each rank from the same start, and rank 0's is kept, as DDP does with buffers.
    """
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    optimizer = make(trained)
    result = Trajectory()
    for step in range(steps):
        before_step(step)
        by_rank = shares(step)
        count = max(1, sum(b.count for batches in by_rank for b in batches))
        total = 0.0
        for rank in each_rank(model, len(by_rank)):
            for b in by_rank[rank]:
                loss = loss_fn(model, b)
                (loss / count).backward()
                total += float(loss.detach())
        result.losses.append(total / count)
        result.grads.append(arrays({n: p.grad for n, p in trained.items()}))
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(list(trained.values()), clip)
        optimizer.step()
        optimizer.zero_grad()
        tensors = (*model.named_parameters(), *model.named_buffers())
        result.params.append(arrays(dict(tensors)))
    return result


State = dict[str, tuple[Tensor, bool]]  # the value, and whether it trains now


def each_rank(model: nn.Module, world: int) -> Iterator[int]:
    """The ranks in turn, each with the state that the first has found; the first one's stays."""
    start = kept = state_of(model)
    for rank in range(world):
        set_state(model, start)
        yield rank
        if rank == 0:
            kept = state_of(model)
    set_state(model, kept)


def state_of(model: nn.Module) -> State:
    tensors = (*model.named_parameters(), *model.named_buffers())
    return {name: (t.detach().clone(), t.requires_grad) for name, t in tensors}


@torch.no_grad()
def set_state(model: nn.Module, state: State) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        value, trains = state[name]
        if not torch.equal(tensor, value):
            tensor.copy_(value)
        if tensor.is_leaf:
            tensor.requires_grad_(trains)


@functools.cache
def reference(case: Case, world: int, rounds: Rounds | None = None) -> Trajectory:
    if rounds is not None:
        return played(case, world, rounds)
    model = toys.build(case.toy, seed=0)

    def shares(step: int) -> list[list[Batch]]:
        return [[toys.batch(step, r, m) for m in range(case.micro)] for r in range(world)]

    return one_process(model, make_optimizer(case.optimizer, model), toys.loss, shares)


def played(case: Case, world: int, rounds: Rounds) -> Trajectory:
    """One process that plays the workers one after another, in the words of the DiLoCo paper."""
    models = [toys.build(case.toy, seed=0) for _ in range(world)]
    workers = [{n: p for n, p in m.named_parameters() if p.requires_grad} for m in models]
    inner = [make_optimizer(case.optimizer, m)(p) for m, p in zip(models, workers, strict=True)]
    anchor = {n: p.detach().clone() for n, p in workers[0].items()}
    momentum = {n: torch.zeros_like(p) for n, p in anchor.items()}
    fragments = cut(rounds, anchor)
    sent: dict[int, dict[str, Any]] = {}
    seen = [[0] * world for _ in fragments]
    result = Trajectory(rounds=rounds)
    for step in range(STEPS_OF_WORKERS):
        total, counts = 0.0, []
        for rank, model in enumerate(models):
            batches = [toys.batch(step, rank, m) for m in range(case.micro)]
            counts.append(sum(b.count for b in batches))
            for b in batches:
                loss = toys.loss(model, b)
                (loss / max(1, counts[-1])).backward()
                total += float(loss.detach())
        result.losses.append(total / sum(counts))
        result.grads.append(arrays({
            n: None if all(w[n].grad is None for w in workers)
            else sum(c * w[n].grad for c, w in zip(counts, workers, strict=True)
                     if w[n].grad is not None) / sum(counts)
            for n in anchor
        }))  # fmt: skip
        for optimizer in inner:
            optimizer.step()
            optimizer.zero_grad()
        seen = [[a + b for a, b in zip(of, counts, strict=True)] for of in seen]
        now = step + 1
        with torch.no_grad():
            for number, names in enumerate(fragments):
                first = due(rounds, number)  # then after every round
                if now >= first and (now - first) % rounds.every == 0:
                    mean = mean_of(workers, names, seen[number])
                    sent[number] = {n: anchor[n] - mean[n] for n in names}
                    seen[number] = [0] * world
                was = now - rounds.delay
                if was >= first and (was - first) % rounds.every == 0:
                    for n, outer in sent.pop(number).items():
                        momentum[n] = rounds.outer_momentum * momentum[n] + outer
                        move = outer + rounds.outer_momentum * momentum[n]
                        anchor[n] -= rounds.outer_lr * move
                        for worker in workers:
                            worker[n].mul_(rounds.mix).add_((1 - rounds.mix) * anchor[n])
            if now % rounds.every == 0:
                for model in models:
                    for mine, first in zip(model.buffers(), models[0].buffers(), strict=True):
                        mine.copy_(first)
            mean = {}
            for names, of in zip(fragments, seen, strict=True):
                mean |= mean_of(workers, names, of)
        tensors = (*models[0].named_parameters(), *models[0].named_buffers())
        result.params.append(arrays({**dict(tensors), **mean}))
    return result


def mean_of(workers: Sequence[Any], names: Sequence[str], seen: Sequence[int]) -> dict[str, Any]:
    weights = seen if any(seen) else [1] * len(workers)
    total = sum(weights)
    return {n: sum(c * w[n] for c, w in zip(weights, workers, strict=True)) / total for n in names}


def build(
    strategy: Any,
    toy: str,
    world: World,
    seed: int | None = None,
    optimizer: Any = "adamw",
    rule: Rule = Rule(),
    loss: LossFn = toys.loss,
    dtype: torch.dtype = torch.float64,
    per_node: int = 0,
    **options: Any,
) -> Any:
    """On a rank: a strategy, by its name or its class, that trains a toy. Without a seed each rank
    starts from other weights."""
    if isinstance(strategy, str):
        strategy = naming.resolve(strategy, STRATEGIES, "strategy")
    model = toys.build(toy, world.rank if seed is None else seed).to(dtype)
    make = make_optimizer(optimizer, model) if isinstance(optimizer, str) else optimizer
    blocks = toys.BLOCKS[toy]
    return strategy(Setup(model, make, loss, world.mesh, rule, blocks, per_node), **options)


def run_cases(
    world: World, strategy: Any, cases: Sequence[Case], options: dict[str, Any]
) -> list[Trajectory]:
    """On a rank: the same, by the strategy."""
    results = []
    for case in cases:
        instance = build(strategy, case.toy, world, optimizer=case.optimizer, **options)
        result = Trajectory(rounds=instance.rounds)
        steps = steps_of(result.rounds)
        for step in range(steps):
            microbatches: list[Batch] = [toys.batch(step, world.rank, m) for m in range(case.micro)]
            LEDGER.reset()
            result.losses.append(float(instance.gradients(microbatches)))
            # To look at gradients is to wait for them: step() must do so too, where nobody looks.
            looks = step + 1 < steps
            result.grads.append(arrays(instance.full_grads()) if looks else None)
            instance.step()
            if instance.rounds is None:  # what workers exchange may travel during their next step
                result.unfinished += [
                    e.label for e in LEDGER.entries if e.op in SUMS and e.ready_ns is None
                ]
            result.params.append(arrays(instance.full_tensors()))
        results.append(result)
    return results


def by_config(world: World, settings: Mapping[str, Any]) -> Iterator[tuple[Any, float]]:
    """The strategy after each step of a run of a tiny model, and the step's loss."""
    config = configs.load(None, {"model.size": "tiny", "training.steps": 3, **settings})
    workload = builders.build_workload(config)
    strategy: Any = builders.build_strategy(config, workload, world)
    for microbatches in loop.Batches(workload, config, world):
        loss = float(strategy.gradients(microbatches))
        strategy.step()
        yield strategy, loss


def steps_of(rounds: Rounds | None) -> int:
    return STEPS if rounds is None else STEPS_OF_WORKERS


def conform(
    ranks: Ranks,
    strategy: Any,
    cases: Sequence[Case] = ALL_CASES,
    options: dict[str, Any] | None = None,
) -> list[str]:
    """What is wrong with the strategy in this world; nothing, if it is right."""
    by_rank = ranks.run(run_cases, strategy, cases, options or {}, deadline_s=100)
    complaints = []
    for i, case in enumerate(cases):
        expected = reference(case, ranks.size, by_rank[0][i].rounds)
        for rank, results in enumerate(by_rank):
            if results[i].unfinished:
                label = results[i].unfinished[0]
                complaints.append(f"{case} rank {rank}: nobody waited for '{label}'")
            complaint = first_difference(results[i], expected)
            if complaint:
                complaints.append(f"{case} rank {rank}: {complaint}")
        if not _identical([results[i] for results in by_rank]):
            complaints.append(f"{case}: the ranks' parameters are not bitwise equal")
    return complaints


def first_difference(
    actual: Trajectory, expected: Trajectory, tolerance: float = TOLERANCE
) -> str | None:
    """Of what was looked at."""
    for step, (got, want) in enumerate(zip(actual.losses, expected.losses, strict=True)):
        if not abs(got - want) <= tolerance * max(1.0, abs(want)):
            return f"step {step}: the loss is {got}, not {want}"
        for what in ("grads", "params"):
            seen: Arrays | None = getattr(actual, what)[step]
            wanted = getattr(expected, what)[step]
            text = None if seen is None else difference(seen, wanted, tolerance)
            if text:
                return f"step {step}: {what} {text}"
    for got, want in zip(actual.evaluated, expected.evaluated, strict=True):
        if not abs(got - want) <= tolerance * max(1.0, abs(want)):
            return f"evaluated as {got}, not {want}"
    return None


def difference(got: Arrays, want: Arrays, tolerance: float) -> str | None:
    if got.keys() != want.keys():
        return f"has names {sorted(got.keys() ^ want.keys())} too many or too few"
    for name in want:
        a, b = got[name], want[name]
        if (a is None) != (b is None):
            return f"{name} is {'None' if a is None else 'there'}, in one process it is not"
        if a is None or b is None:
            continue
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"{name} is {a.dtype} {a.shape}, not {b.dtype} {b.shape}"
        if a.size and not np.allclose(a, b, rtol=tolerance, atol=tolerance):
            return f"{name} is off by {np.abs(a - b).max():.1e}"
    return None


def _identical(trajectories: list[Trajectory]) -> bool:
    first = trajectories[0].params[-1]
    return all(np.array_equal(first[n], t.params[-1][n]) for t in trajectories[1:] for n in first)


# Strategies whose ranks take steps of their own, and those whose ranks act as one process.
WORKERS = ("local_sgd", "diloco", "streaming_diloco")
AS_ONE = [name for name in STRATEGIES if name not in WORKERS]
FSDP = ("pytorch_zero2", "pytorch_zero3", "pytorch_hsdp")
OPTIONS: dict[str, dict[str, Any]] = {
    **{name: {"find_unused_parameters": True} for name in ("pytorch_ddp", "pytorch_zero1")},
    **{name: {"every": 2} for name in WORKERS},  # the tests take few steps
}
# What FSDP2's twins refuse: parameters without dimensions, and, in "unused", a model that returns
# its block's own output on some ranks only: there backward gathers the two in another order.
REFUSED = {name: ("scalar", "unused") for name in STRATEGIES if name in FSDP}
