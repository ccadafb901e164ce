"""A strategy against one plain process: the law that every strategy must obey.

``conform`` runs the strategy on real ranks, each initialised differently, on every toy, and
returns what differs from the reference: a plain loop that sees all ranks' micro-batches one
after another and knows nothing of shardlab's strategies. Where a strategy's ranks take steps of
their own, the loop plays them as workers one after another.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

import toys
from shardlab import comm, naming
from shardlab.config import TrainingConfig
from shardlab.naming import STRATEGIES
from shardlab.optim import factory
from shardlab.proof.reference import rounded
from shardlab.run.ranks import Ranks
from shardlab.strategies.base import Rounds, Setup
from shardlab.workloads.base import Batch
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
    params: list[Arrays] = field(default_factory=list)
    unfinished: list[str] = field(default_factory=list)  # sums still under way after step()
    rounds: Rounds | None = None  # of a strategy whose ranks are workers


ALL_CASES = [Case(*c) for c in itertools.product(toys.TOYS, (1, 2, 3), ("sgd", "adamw"))]


def make_optimizer(
    name: str, model: torch.nn.Module | None = None
) -> Callable[[Any], torch.optim.Optimizer]:
    """``model``: Muon alone needs it."""
    if name == "muon":  # it needs whole matrices, which is measured
        assert model is not None
        training = TrainingConfig(optimizer="muon", learning_rate=0.05, weight_decay=0.1)
        return factory.plan(training, None, None, model, "a toy")
    if name == "sgd":
        return factory.of_class(torch.optim.SGD, lr=0.1, momentum=0.9)
    # A decay, so that an unused parameter with a zero gradient instead of none would show.
    return factory.of_class(torch.optim.AdamW, lr=0.05, weight_decay=0.1)


def arrays(tensors: dict[str, torch.Tensor | None]) -> Arrays:
    return {n: None if t is None else t.detach().numpy().copy() for n, t in tensors.items()}


@functools.cache
def reference(case: Case, world: int, rounds: Rounds | None = None) -> Trajectory:
    """One plain process. Buffers follow rank 0's, as DDP's do."""
    if rounds is not None:
        return played(case, world, rounds)
    model = toys.build(case.toy, seed=0)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    optimizer = make_optimizer(case.optimizer, model)(trained)
    result = Trajectory()
    for step in range(STEPS):
        share = [[toys.batch(step, r, m) for m in range(case.micro)] for r in range(world)]
        count = sum(b.count for batches in share for b in batches)
        start = {n: b.clone() for n, b in model.named_buffers()}
        total, buffers_of_rank_0 = 0.0, start
        for rank, batches in enumerate(share):
            _set_buffers(model, start)
            for b in batches:
                loss = toys.loss(model, b)
                (loss / count).backward()
                total += float(loss.detach())
            if rank == 0:
                buffers_of_rank_0 = {n: b.clone() for n, b in model.named_buffers()}
        _set_buffers(model, buffers_of_rank_0)
        result.losses.append(total / count)
        result.grads.append(arrays({n: p.grad for n, p in trained.items()}))
        optimizer.step()
        optimizer.zero_grad()
        tensors = (*model.named_parameters(), *model.named_buffers())
        result.params.append(arrays(dict(tensors)))
    return result


def played(case: Case, world: int, rounds: Rounds) -> Trajectory:
    """One process that plays the workers one after another, in the words of the DiLoCo paper."""
    models = [toys.build(case.toy, seed=0) for _ in range(world)]
    workers = [{n: p for n, p in m.named_parameters() if p.requires_grad} for m in models]
    inner = [make_optimizer(case.optimizer, m)(p) for m, p in zip(models, workers, strict=True)]
    anchor = {n: p.detach().clone() for n, p in workers[0].items()}
    momentum = {n: torch.zeros_like(p) for n, p in anchor.items()}
    fragments = rounds.cut(anchor)
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
                first = rounds.due(number)  # then after every round
                if now >= first and (now - first) % rounds.every == 0:
                    mean = mean_of(workers, names, seen[number])
                    sent[number] = {n: anchor[n] - mean[n] for n in names}
                    if rounds.bits < 32:
                        parts = [c / max(1, sum(seen[number])) for c in seen[number]]
                        sent[number] = {
                            n: sum(rounded(part * (anchor[n] - w[n]), rounds.bits)
                                   for part, w in zip(parts, workers, strict=True))
                            for n in names
                        }  # fmt: skip
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
                    _set_buffers(model, {n: b.clone() for n, b in models[0].named_buffers()})
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


@torch.no_grad()
def _set_buffers(model: torch.nn.Module, values: dict[str, torch.Tensor]) -> None:
    for name, buffer in model.named_buffers():
        buffer.copy_(values[name])


def run_cases(
    world: World, strategy: Any, cases: Sequence[Case], options: dict[str, Any]
) -> list[Trajectory]:
    """On a rank: the same, by the strategy. Each rank starts from other weights."""
    make = (
        naming.resolve(strategy, STRATEGIES, "strategy") if isinstance(strategy, str) else strategy
    )
    results = []
    for case in cases:
        model = toys.build(case.toy, seed=world.rank)
        optimizer, blocks = make_optimizer(case.optimizer, model), toys.BLOCKS[case.toy]
        instance = make(Setup(model, optimizer, toys.loss, world.mesh, blocks=blocks), **options)
        result = Trajectory(rounds=instance.rounds)
        steps = steps_of(result.rounds)
        for step in range(steps):
            microbatches: list[Batch] = [toys.batch(step, world.rank, m) for m in range(case.micro)]
            comm.LEDGER.reset()
            result.losses.append(float(instance.gradients(microbatches)))
            # To look at gradients is to wait for them: step() must do so too, where nobody looks.
            looks = step + 1 < steps
            result.grads.append(arrays(instance.full_grads()) if looks else None)
            instance.step()
            if instance.rounds is None:  # what workers exchange may travel during their next step
                result.unfinished += [
                    e.label for e in comm.LEDGER.entries if e.op in SUMS and e.ready_ns is None
                ]
            result.params.append(arrays(instance.full_params()))
        results.append(result)
    return results


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


def first_difference(actual: Trajectory, expected: Trajectory) -> str | None:
    for step in range(steps_of(actual.rounds)):
        error = abs(actual.losses[step] - expected.losses[step])
        if not error <= TOLERANCE:
            return f"step {step}: the loss is off by {error:.1e}"
        for what in ("grads", "params"):
            got: Arrays | None = getattr(actual, what)[step]
            want: Arrays = getattr(expected, what)[step]
            if got is None:
                continue
            if got.keys() != want.keys():
                return f"step {step}: {what} has names {sorted(got)}, not {sorted(want)}"
            for name in want:
                a, b = got[name], want[name]
                if (a is None) != (b is None):
                    return f"step {step}: {what} {name} is {a}, not {b}"
                if (
                    a is not None
                    and b is not None
                    and not np.allclose(a, b, rtol=0, atol=TOLERANCE)
                ):
                    return f"step {step}: {what} {name} is off by {np.abs(a - b).max():.1e}"
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
