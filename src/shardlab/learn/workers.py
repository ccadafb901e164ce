"""Workers that take steps of their own, played one after another by one process: what the exercises
on local SGD and DiLoCo are compared with, and what known mistakes would give instead.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardlab import numbers
from shardlab.learn import mistakes, toys
from shardlab.learn.exercise import Evidence, Finding, Rows, Stage, judging, say

SMALL = 64  # bytes: to agree on numbers of samples is no exchange
Memory = dict[str, Any]  # what an exchange keeps until the next
# The parameters of each worker as one vector, and each worker's share: where they continue.
Exchange = Callable[[Memory, list[Tensor], list[float]], list[Tensor]]


def average(_memory: Memory, workers: list[Tensor], shares: list[float]) -> list[Tensor]:
    mean = sum_of(share * vector for share, vector in zip(shares, workers, strict=True))
    return [mean] * len(workers)


def keep(_memory: Memory, workers: list[Tensor], _shares: list[float]) -> list[Tensor]:
    """No exchange at all: each worker keeps what it has."""
    return workers


def sum_of(vectors: Any) -> Tensor:
    return torch.stack(list(vectors)).sum(0)


@dataclass(frozen=True)
class Play:
    """How workers train and exchange. The defaults are right; a mistake changes one thing."""

    exchange: Exchange = average
    first: int = 0  # 1: an exchange comes that many steps too early
    each_step: bool = False
    samples: str = "since"  # the last exchange; "all" so far, of the "last" step, or "equal"
    exchanges_first: bool = False  # and updates then
    averages_gradients: bool = False
    keeps_gradients: bool = False
    forgets_state: bool = False  # the inner optimizer begins anew after an exchange
    averages_state: bool = False


def samples_of(at: Stage, step: int) -> list[int]:
    """How many samples each rank has. Ragged ones differ between ranks and between steps."""
    if not at.options.get("ragged"):
        return [4] * at.world
    return [1 + (3 * rank + 2 * step + rank * step) % 5 for rank in range(at.world)]


def steps_of(at: Stage) -> int:
    return int(2 * at.options["every"] + 1)


def batch_of(at: Stage, rank: int, step: int) -> toys.Batch:
    return toys.batch(rank, step, 0, rows=samples_of(at, step)[rank])


def vector(model: nn.Module) -> Tensor:
    """All that trains, laid end to end: (elements,)."""
    return torch.cat([p.detach().flatten() for p in toys.parameters(model)])


def played(at: Stage, play: Play) -> Iterator[Tensor]:
    """What this rank's worker holds after each step."""
    every, kind = at.options["every"], at.options["kind"]
    models = [toys.build(toys.TOYS[at.options["toy"]]) for _ in range(at.world)]
    inner = [toys.Factory(kind)(toys.parameters(model)) for model in models]
    seen, memory = [0] * at.world, {"anchor": vector(models[0])}

    def exchange(step: int) -> None:
        nonlocal seen, inner
        last = samples_of(at, step)
        counts = {"equal": [1] * at.world, "last": last}.get(play.samples, seen)
        shares = [count / sum(counts) for count in counts]
        moved = play.exchange(memory, [vector(model) for model in models], shares)
        for model, new in zip(models, moved, strict=True):
            nn.utils.vector_to_parameters(new.clone(), toys.parameters(model))
        if play.samples != "all":
            seen = [0] * at.world
        if play.forgets_state:
            inner = [toys.Factory(kind)(toys.parameters(model)) for model in models]
        if play.averages_state:
            _average_state(inner)

    for step in range(steps_of(at)):
        for rank, model in enumerate(models):
            toys.loss(model, batch_of(at, rank, step)).backward()
            seen[rank] += samples_of(at, step)[rank]
        if play.averages_gradients:
            for same in zip(*map(toys.parameters, models), strict=True):
                mean = torch.stack([_gradient(p) for p in same]).mean(0)
                for p in same:
                    p.grad = mean.clone()
        is_due = play.each_step or (step + 1 + play.first) % every == 0
        if is_due and play.exchanges_first:
            exchange(step)
        for model, optimizer in zip(models, inner, strict=True):
            optimizer.step()
            if not play.keeps_gradients:
                model.zero_grad()
        if is_due and not play.exchanges_first:
            exchange(step)
        yield vector(models[at.rank])


def _gradient(p: nn.Parameter) -> Tensor:
    assert p.grad is not None
    return p.grad


def _average_state(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    states = [list(optimizer.state.values()) for optimizer in optimizers]
    for same in zip(*states, strict=True):
        for key in same[0]:
            mean = torch.stack([copy.deepcopy(state[key]) for state in same]).mean(0)
            for state in same:
                state[key].copy_(mean)


def run(
    at: Stage, make: Callable[[nn.Module, torch.optim.Optimizer], Any],
    step_of: Callable[[Any, int], object], right: Play, wrong: Mapping[str, Play],
) -> dict[str, Any]:  # fmt: skip
    """The learner's steps, and what one process that plays the workers would have after each, right
    and with each known mistake."""
    model = toys.build(toys.TOYS[at.options["toy"]])
    at.spy.watch(model)
    learner = make(model, toys.Factory(at.options["kind"])(toys.parameters(model)))
    rows: list[dict[str, Any]] = []
    at.spy.mark("made")
    for step in range(steps_of(at)):
        toys.loss(model, batch_of(at, at.rank, step)).backward()
        first = len(at.spy.calls)
        step_of(learner, samples_of(at, step)[at.rank])
        rows.append({"got": vector(model), "calls": list(at.spy.calls[first:])})
    got = [row["got"] for row in rows]
    wanted = list(played(at, right))
    is_right = _fits(got, wanted)
    # A mistake shows on every rank: a rank that is right need not look for one.
    fits = [key for key, play in wrong.items() if not is_right and _fits(got, played(at, play))]
    size = vector(model).numel() * 8
    return {"steps": rows, "size": size, "right": wanted, "is_right": is_right, "fits": fits}


def _fits(got: Iterable[Tensor], wanted: Iterable[Tensor]) -> bool:
    """Whether a play gives what the learner's code gave; it ends at the first difference."""
    return all(torch.allclose(a, b, 1e-8, 1e-9) for a, b in zip(got, wanted, strict=False))


def judging_exchange(only: str) -> Callable[[Evidence], list[Finding]]:
    """A ``judge``. ``only`` is what the exercise calls an exchange. The cases become harder, so it
    reports one finding at a time."""

    def result(ranks: Rows) -> Finding | None:
        if all(rank["is_right"] for rank in ranks):
            return None
        common = [key for key in ranks[0]["fits"] if all(key in rank["fits"] for rank in ranks)]
        if common == ["never-exchanged"] and any(mistakes.all_calls(ranks)):
            common = ["workers-not-moved"]
        if common:
            return say(common[0], n=len(ranks), every=ranks[0]["every"])
        steps = range(len(ranks[0]["steps"]))
        step = next((s for s in steps if not _right_at(ranks, s)), None)
        if step is None:
            return None
        rows = [rank["steps"][step]["got"] for rank in ranks]
        every = ranks[0]["every"]
        if step + 1 < every:
            return say("wrong-local-step", step=step + 1, every=every)
        if (step + 1) % every == 0 and not all(mistakes.close(row, rows[0]) for row in rows):
            return say("workers-differ", step=step + 1, only=only)
        off = max(
            mistakes.error(row, rank["right"][step]) for row, rank in zip(rows, ranks, strict=True)
        )
        return say("wrong-exchange", step=step + 1, only=only, error=off)

    return judging(mistakes.not_waited, result, _between, _sent, only_first=True)


def _right_at(ranks: Rows, step: int) -> bool:
    return all(
        mistakes.close(rank["steps"][step]["got"], rank["right"][step], 1e-8) for rank in ranks
    )


def _between(ranks: Rows) -> Finding | None:
    """Right, but something travels in steps that are the worker's own."""
    every = ranks[0]["every"]
    for step, row in enumerate(ranks[0]["steps"]):
        sent = sum(call["bytes"] for call in row["calls"])
        if (step + 1) % every and sent > SMALL:
            call = mistakes.described(row["calls"][0])
            return say("communicates-between", step=step + 1, every=every, sent=sent, call=call)
    return None


def _sent(ranks: Rows) -> Finding | None:
    n, every, steps = len(ranks), ranks[0]["every"], len(ranks[0]["steps"])
    should = steps // every * numbers.wire_bytes("all_reduce", ranks[0]["size"], n)
    calls = mistakes.all_calls(ranks)[0]
    return mistakes.not_by_hand(ranks) or mistakes.too_many_bytes(calls, n, should)
