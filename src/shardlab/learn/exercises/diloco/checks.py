"""DiLoCo against one process that plays the workers one after another, as the task asks and with
each known mistake; and nothing sent between exchanges."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardlab import wire
from shardlab.learn import mistakes, toys
from shardlab.learn.exercise import Case, Finding, Rows, Stage, judging, say

# lr, momentum: of the outer step. ragged: numbers of samples differ between ranks and steps.
OUTER = {"lr": 0.7, "momentum": 0.9}
LOCAL_SGD = {"lr": 1.0, "momentum": 0.0}
CASES = (
    Case("AdamW inside, every 3 steps", 2, OUTER | {"toy": "frozen", "kind": "adamw", "every": 3}),
    Case("SGD inside, every 2 steps", 2, OUTER | {"toy": "plain", "kind": "sgd", "every": 2}),
    Case("unequal batches", 2,
         OUTER | {"toy": "plain", "kind": "adamw", "every": 3, "ragged": True}),
    Case("three ranks, tied weights", 3,
         OUTER | {"toy": "tied", "kind": "adamw", "every": 2, "ragged": True}),
    Case("every step", 2, OUTER | {"toy": "plain", "kind": "adamw", "every": 1}),
    Case("local SGD", 2, LOCAL_SGD | {"toy": "plain", "kind": "sgd", "every": 2, "ragged": True}),
)  # fmt: skip
SMALL = 64  # bytes: to agree on numbers of samples does not count as an exchange

# ------------------------------------------------------------------ exchanges


@dataclass
class Outer:
    """What an exchange keeps until the next."""

    lr: float
    momentum: float
    anchors: list[Tensor]  # of each worker: they are equal unless something is wrong
    velocities: list[Tensor]


# The parameters of each worker as one vector, and each worker's share: where they continue.
Exchange = Callable[[Outer, list[Tensor], list[float]], list[Tensor]]


def average(_outer: Outer, workers: list[Tensor], shares: list[float]) -> list[Tensor]:
    mean = torch.stack([share * w for share, w in zip(shares, workers, strict=True)]).sum(0)
    return [mean] * len(workers)


def keep(_outer: Outer, workers: list[Tensor], _shares: list[float]) -> list[Tensor]:
    """No exchange at all: each worker keeps what it has."""
    return workers


def outer_step(
    outer: Outer, workers: list[Tensor], shares: list[float], mistake: str = ""
) -> list[Tensor]:
    """SGD with Nesterov momentum on the mean difference, or the same with a mistake in it."""
    n, m, anchors = len(workers), outer.momentum, outer.anchors
    averages = average(outer, workers, shares)
    ends = {"differences-not-averaged": workers, "copied-from-rank-0": [workers[0]] * n}
    factor = {"differences-summed": n, "wrong-sign": -1}.get(mistake, 1)
    differences = [
        factor * (a - end) for a, end in zip(anchors, ends.get(mistake, averages), strict=True)
    ]
    before = outer.velocities
    if mistake == "outer-state-lost":
        before = [torch.zeros_like(v) for v in before]
    fresh = (1 - m) if mistake == "momentum-damped" else 1.0
    velocities = [m * v + fresh * d for v, d in zip(before, differences, strict=True)]
    outer.velocities = velocities
    steps = [d + m * v for d, v in zip(differences, velocities, strict=True)]
    steps = {"not-nesterov": velocities, "no-momentum": differences}.get(mistake, steps)
    rate = 1.0 if mistake == "outer-rate-ignored" else outer.lr
    moved = [a - rate * step for a, step in zip(anchors, steps, strict=True)]
    kept = {"anchor-is-the-average": averages, "anchor-not-moved": anchors}
    outer.anchors = kept.get(mistake, moved)
    return moved


# ------------------------------------------------------------------ plays


@dataclass(frozen=True)
class Play:
    """How workers train and exchange. The defaults are right; a mistake changes one thing."""

    exchange: Exchange = outer_step
    first: int = 0  # 1: an exchange comes that many steps too early
    each_step: bool = False
    samples: str = "since"  # the last exchange; "all" so far, of the "last" step, or "equal"
    exchanges_first: bool = False  # and updates then
    averages_gradients: bool = False
    keeps_gradients: bool = False
    forgets_state: bool = False  # the inner optimizer loses its state at an exchange
    averages_state: bool = False


IN_THE_OUTER_STEP = (
    "copied-from-rank-0", "differences-not-averaged", "differences-summed", "wrong-sign",
    "outer-state-lost", "momentum-damped", "not-nesterov", "no-momentum", "outer-rate-ignored",
    "anchor-is-the-average", "anchor-not-moved",
)  # fmt: skip
# Each mistake with the message that names it. The first that fits is reported.
WRONG = (
    ("never-exchanged", Play(keep)),
    ("no-outer-step", Play(average)),
    *((key, Play(functools.partial(outer_step, mistake=key))) for key in IN_THE_OUTER_STEP),
    ("averaged-each-step", Play(each_step=True)),
    ("wrong-step/early", Play(first=1)),
    ("exchanged-first", Play(exchanges_first=True)),
    ("gradients-averaged", Play(keep, averages_gradients=True)),
    ("gradients-averaged", Play(averages_gradients=True)),
    ("unweighted", Play(samples="equal")),
    ("weights-not-reset", Play(samples="all")),
    ("weights-of-the-last-step", Play(samples="last")),
    ("not-reset/inner", Play(keeps_gradients=True)),
    ("state-lost/inner", Play(forgets_state=True)),
    ("state-averaged", Play(averages_state=True)),
)


def samples_of(at: Stage, step: int) -> list[int]:
    """How many samples each rank has."""
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
    starts = [vector(model) for model in models]
    zeros = [torch.zeros_like(start) for start in starts]
    outer = Outer(at.options["lr"], at.options["momentum"], starts, zeros)
    seen = [0] * at.world

    def exchange(step: int) -> None:
        nonlocal seen, inner
        last = samples_of(at, step)
        counts = {"equal": [1] * at.world, "last": last}.get(play.samples, seen)
        shares = [count / sum(counts) for count in counts]
        moved = play.exchange(outer, [vector(model) for model in models], shares)
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


# ------------------------------------------------------------------ on a rank


def run(at: Stage) -> dict[str, Any]:
    """The learner's steps, and what one process that plays the workers would have after each, right
    and with each known mistake."""
    model = toys.build(toys.TOYS[at.options["toy"]])
    at.spy.watch(model)
    inner = toys.Factory(at.options["kind"])(toys.parameters(model))
    every, lr, momentum = (at.options[key] for key in ("every", "lr", "momentum"))
    learner = at.submission.DiLoCo(model, inner, every, lr, momentum)
    rows: list[dict[str, Any]] = []
    at.spy.mark("made")
    for step in range(steps_of(at)):
        toys.loss(model, batch_of(at, at.rank, step)).backward()
        first = len(at.spy.calls)
        learner.step(samples_of(at, step)[at.rank])
        rows.append({"got": vector(model), "calls": list(at.spy.calls[first:])})
    got = [row["got"] for row in rows]
    right = list(played(at, Play()))
    is_right = _fits(got, right)
    # A mistake shows on every rank: a rank that is right need not look for one.
    fits = [key for key, play in WRONG if not is_right and _fits(got, played(at, play))]
    size = vector(model).numel() * 8
    return {"steps": rows, "size": size, "right": right, "is_right": is_right, "fits": fits}


def _fits(got: Iterable[Tensor], wanted: Iterable[Tensor]) -> bool:
    """Whether a play gives what the learner's code gave; it ends at the first difference."""
    return all(torch.allclose(a, b, 1e-8, 1e-9) for a, b in zip(got, wanted, strict=False))


# ------------------------------------------------------------------ what is wrong


def result(ranks: Rows) -> Finding | None:
    if all(rank["is_right"] for rank in ranks):
        return None
    common = [key for key in ranks[0]["fits"] if all(key in rank["fits"] for rank in ranks)]
    if common == ["never-exchanged"] and any(mistakes.all_calls(ranks)):
        common = ["workers-not-moved"]
    every = ranks[0]["every"]
    if common:
        return say(common[0], n=len(ranks), every=every)
    steps = range(len(ranks[0]["steps"]))
    step = next((s for s in steps if not _right_at(ranks, s)), None)
    if step is None:
        return None
    rows = [rank["steps"][step]["got"] for rank in ranks]
    if step + 1 < every:
        return say("wrong-local-step", step=step + 1, every=every)
    if (step + 1) % every == 0 and not all(mistakes.close(row, rows[0]) for row in rows):
        return say("workers-differ", step=step + 1)
    off = max(
        mistakes.error(row, rank["right"][step]) for row, rank in zip(rows, ranks, strict=True)
    )
    return say("wrong-exchange", step=step + 1, error=off)


def _right_at(ranks: Rows, step: int) -> bool:
    return all(
        mistakes.close(rank["steps"][step]["got"], rank["right"][step], 1e-8) for rank in ranks
    )


def between(ranks: Rows) -> Finding | None:
    """Right, but something travels in steps that are the worker's own."""
    every = ranks[0]["every"]
    for step, row in enumerate(ranks[0]["steps"]):
        sent = sum(call["bytes"] for call in row["calls"])
        if (step + 1) % every and sent > SMALL:
            call = mistakes.described(row["calls"][0])
            return say("communicates-between", step=step + 1, every=every, sent=sent, call=call)
    return None


def sent(ranks: Rows) -> Finding | None:
    n, every, steps = len(ranks), ranks[0]["every"], len(ranks[0]["steps"])
    should = steps // every * wire.wire_bytes("all_reduce", ranks[0]["size"], n)
    calls = mistakes.all_calls(ranks)[0]
    return mistakes.not_by_hand(ranks) or mistakes.too_many_bytes(calls, n, should)


judge = judging(mistakes.not_waited, result, between, sent, only_first=True)
