"""Sharded Muon: a whole-matrix update by one owner for each matrix, as one process makes it."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardlab import numbers
from shardlab.learn import mistakes, toys
from shardlab.learn.exercise import Case, Evidence, Finding, Rejected, Rows, Stage, judging, say

STEPS = 3
RATE, MOMENTUM = 0.1, 0.9
CASES = (
    Case("who owns what", 2, {"assigns": True}),
    Case("two ranks", 2, {"widths": [6, 17, 4, 12, 12, 5, 3]}),
    Case("three ranks", 3, {"widths": [6, 17, 4, 12, 12, 5, 3]}),
    Case("more ranks than matrices", 3, {"widths": [6, 9, 3]}),
)
# Shapes to assign, and ranks to assign them to. Some are tall, some wide; the large ones come last.
LISTS: tuple[tuple[list[tuple[int, int]], int], ...] = (
    ([(8, 8)] * 4, 2),
    ([(4, 4), (2, 8), (4, 4), (16, 2), (2, 16), (64, 2)], 2),
    ([(3, 5), (5, 3), (7, 2), (2, 7), (6, 6), (9, 4), (4, 9)], 3),
    ([(4, 6), (10, 10)], 4),
    ([(1, 9)], 1),
)
MOST = 4 / 3  # of the best assignment's fullest rank


class Orthogonal(torch.optim.Optimizer):
    """Muon's idea without its approximation: the update is the orthogonal factor of the momentum,
    from a whole matrix."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__([{"params": list(tensors)}], {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        for p in self.param_groups[0]["params"]:
            if p.grad is None:
                continue
            state = self.state[p]
            state["momentum"] = MOMENTUM * state.get("momentum", torch.zeros_like(p)) + p.grad
            left, _, right = torch.linalg.svd(
                state["momentum"].reshape(len(p), -1), full_matrices=False
            )
            p.sub_(RATE * (left @ right).view_as(p))


class Maker:
    """What the learner calls ``make_muon``. It notes which matrices a rank keeps the state of."""

    def __init__(self, model: nn.Module) -> None:
        self.starts = toys.trained(model)
        self.made: list[Orthogonal] = []
        self.owned: list[str | None] = []  # None: not one of the matrices as a whole

    def __call__(self, tensors: Iterable[Tensor]) -> Orthogonal:
        given = list(tensors)
        self.owned = [self._name(tensor) for tensor in given]
        self.made.append(Orthogonal(given))
        return self.made[-1]

    def _name(self, tensor: Tensor) -> str | None:
        same = (n for n, start in self.starts.items() if start.shape == tensor.shape)
        near = {n: float((self.starts[n] - tensor.detach()).abs().max()) for n in same}
        return min(near, key=near.__getitem__, default=None)


def make_model(widths: Sequence[int]) -> nn.Module:
    pairs = itertools.pairwise(widths)
    return toys.build(
        lambda: nn.Sequential(
            *(m for a, b in pairs for m in (nn.Linear(a, b, bias=False), nn.Tanh()))
        )
    )


def run(at: Stage) -> dict[str, Any]:
    if at.options.get("assigns"):
        random.seed(at.rank)  # as in real life: the ranks' random numbers are not in step
        torch.manual_seed(at.rank)
        return {"answers": [_asked(at, shapes, world) for shapes, world in LISTS]}
    model, one = make_model(at.options["widths"]), make_model(at.options["widths"])
    alone = make_model(at.options["widths"])  # it has only this rank's batches
    maker = Maker(model)
    learner = at.submission.ShardedMuon(dict(model.named_parameters()), maker)
    whole, own = Orthogonal(one.parameters()), Orthogonal(alone.parameters())
    rows: list[dict[str, Any]] = []
    for step in range(STEPS):
        batches = [toys.batch(rank, step, 0) for rank in range(at.world)]
        before = toys.trained(model)
        for batch in batches:
            (toys.loss(one, batch) / at.world).backward()
        toys.loss(alone, batches[at.rank]).backward()
        for optimizer in (whole, own):
            optimizer.step()
            optimizer.zero_grad()
        toys.loss(model, batches[at.rank]).backward()
        first = len(at.spy.calls)
        learner.step()
        rows.append(
            {
                "before": before,
                "got": toys.trained(model),
                "want": toys.trained(one),
                "alone": toys.trained(alone),
                "left": [n for n, p in model.named_parameters() if p.grad is not None],
                "calls": list(at.spy.calls[first:]),
            }
        )
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    return {"steps": rows, "size": size, "owned": maker.owned, "made": len(maker.made)}


def _asked(at: Stage, shapes: Sequence[tuple[int, int]], world: int) -> dict[str, int]:
    named = {f"matrix{i}": shape for i, shape in enumerate(shapes)}
    got = at.submission.assign(dict(named), world)
    if not isinstance(got, Mapping):
        raise Rejected(say("wrong-type/owners", type=type(got).__name__))
    for name, shape in named.items():
        if name not in got:
            raise Rejected(say("unowned", name=name, shape=shape))
        if type(got[name]) is not int or not 0 <= got[name] < world:
            raise Rejected(say("no-such-owner", name=name, owner=got[name], world=world))
    return {name: got[name] for name in named}


# ------------------------------------------------------------------ what is wrong


def assigned(ranks: Rows) -> Finding | None:
    for number, (shapes, world) in enumerate(LISTS):
        owners = ranks[0]["answers"][number]
        for rank, row in enumerate(ranks[1:], start=1):
            for name, owner in row["answers"][number].items():
                if owner != owners[name]:
                    return say("owners-differ", name=name, a=owners[name], rank=rank, b=owner)
        sizes = [rows * columns for rows, columns in shapes]
        loads = _loads(sizes, list(owners.values()), world)
        best = min(
            max(_loads(sizes, way, world))
            for way in itertools.product(range(world), repeat=len(sizes))
        )
        if max(loads) > MOST * best:
            return say("unbalanced", loads=_listed(loads), best=best, sizes=_listed(sizes))
    return None


def _loads(sizes: Sequence[int], owners: Sequence[int], world: int) -> list[int]:
    loads = [0] * world
    for size, owner in zip(sizes, owners, strict=True):
        loads[owner] += size
    return loads


def _listed(values: Iterable[int]) -> str:
    return ", ".join(map(str, values))


def held(ranks: Rows) -> Finding | None:
    """Which rank's optimizer has which matrix."""
    names = list(ranks[0]["steps"][0]["want"])
    for rank, row in enumerate(ranks):
        if row["made"] == 0:
            return say("no-optimizer", rank=rank)
        if None in row["owned"]:
            return say("matrix-cut", rank=rank)
    if all(set(row["owned"]) == set(names) for row in ranks):
        return say("all-held", n=len(ranks))
    for name in names:
        owners = [rank for rank, row in enumerate(ranks) if name in row["owned"]]
        if not owners:
            return say("unowned/optimizer", name=name)
        if len(owners) > 1:
            return say("owned-twice", name=name, on=mistakes.ranks_text(owners, len(ranks)))
    return None


def updated(ranks: Rows) -> Finding | None:
    """Parameters after each step against one process, and whose fault a difference is."""
    for step in range(STEPS):
        rows = [rank["steps"][step] for rank in ranks]
        wrong = [
            (rank, name)
            for rank, row in enumerate(rows)
            for name, want in row["want"].items()
            if not mistakes.close(row["got"][name], want, 1e-7)
        ]
        if wrong:
            return _explained(ranks, rows, wrong, step)
        for rank, row in enumerate(rows):
            if row["left"]:
                return say("gradients-left", rank=rank, names=mistakes.listed(row["left"]))
    return None


def _explained(ranks: Rows, rows: Rows, wrong: list[tuple[int, str]], step: int) -> Finding:
    owner = {name: r for r, rank in enumerate(ranks) for name in rank["owned"]}
    stale = [(r, n) for r, n in wrong if mistakes.close(rows[r]["got"][n], rows[r]["before"][n])]
    if len(stale) == len(wrong):
        if len(wrong) == sum(len(row["want"]) for row in rows):
            return say("not-updated/muon")
        lost = [(r, n) for r, n in stale if r == owner[n]]
        if not lost:
            return say(
                "not-sent-back", rank=stale[0][0], name=stale[0][1], owner=owner[stale[0][1]]
            )
        return say("overwritten", name=lost[0][1], owner=lost[0][0])
    if step > 0 and max(rank["made"] for rank in ranks) > 1:
        return say("state-lost/muon", step=step, made=max(rank["made"] for rank in ranks))
    if step > 0 and any(row["left"] for row in (rank["steps"][step - 1] for rank in ranks)):
        return say("gradients-left", rank=0, names="those of the matrices that it does not own")
    alone = all(
        mistakes.close(rows[r]["got"][n], rows[owner[n]]["alone"][n], 1e-7) for r, n in wrong
    )
    if alone:
        return say("own-gradient", name=wrong[0][1], owner=owner[wrong[0][1]])
    rank, name = wrong[0]
    off = mistakes.error(rows[rank]["got"][name], rows[rank]["want"][name])
    return say("wrong-update", whose="Muon's", step=step, name=name, rank=rank, error=off)


def sent(ranks: Rows) -> Finding | None:
    n = len(ranks)
    should = STEPS * 3 * numbers.wire_bytes("broadcast", ranks[0]["size"], n)
    calls = mistakes.all_calls(ranks)[0]
    return mistakes.not_by_hand(ranks) or mistakes.too_many_bytes(calls, n, math.ceil(should))


def judge(evidence: Evidence) -> list[Finding]:
    asked = {case: ranks for case, ranks in evidence.items() if "answers" in ranks[0]}
    stepped = {case: ranks for case, ranks in evidence.items() if case not in asked}
    found = judging(mistakes.not_waited)(stepped) + judging(assigned)(asked)
    return found[:1] or judging(held, updated, sent, only_first=True)(stepped)
