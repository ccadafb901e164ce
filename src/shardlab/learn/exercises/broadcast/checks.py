"""Broadcast: everything that makes up the model, from the rank that was asked for, in place."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from torch import Tensor, nn

from shardlab.learn import mistakes, toys
from shardlab.learn.exercise import Case, Finding, judging, say
from shardlab.learn.mistakes import Rows, close, listed
from shardlab.learn.spy import Spy

CASES = (
    Case("two ranks", 2, {"toy": "plain", "src": 0}),
    Case("frozen layer", 2, {"toy": "frozen", "src": 0}),
    Case("tied weights", 2, {"toy": "tied", "src": 0}),
    Case("buffers", 2, {"toy": "buffers", "src": 0}),
    Case("three ranks, from rank 2", 3, {"toy": "plain", "src": 2}),
)


def run(case: Case, rank: int, submission: ModuleType, spy: Spy) -> dict[str, Any]:
    # Different on every rank: a broadcast that is missing shows.
    models = [toys.build(toys.TOYS[case.options["toy"]], seed=10 + r) for r in range(case.world)]
    everyones = [_tensors(model) for model in models]
    model = models[rank]
    before = [id(p) for p in model.parameters()]
    trains = {n: p.requires_grad for n, p in model.named_parameters()}
    spy.watch(model)
    submission.broadcast_model(model, case.options["src"])
    return {
        "got": _tensors(model),
        "own": everyones[rank],
        "want": everyones[case.options["src"]],
        "mean": {n: sum(t[n].double() for t in everyones) / case.world for n in everyones[0]},
        "first": everyones[0],
        "src": case.options["src"],
        "buffers": [n for n, _ in model.named_buffers()],
        "frozen": [n for n, train in trains.items() if not train],
        "same_objects": before == [id(p) for p in model.parameters()],
        "same_flags": trains == {n: p.requires_grad for n, p in model.named_parameters()},
        "bytes": sum(t.numel() * t.element_size() for t in everyones[0].values()),
        "calls": spy.calls,
    }


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {n: t.detach().clone() for n, t in (*model.named_parameters(), *model.named_buffers())}


def look(_case: str, ranks: Rows) -> Finding | None:
    calls = [rank["calls"] for rank in ranks]
    n, psi = len(ranks), ranks[0]["bytes"]
    tensors = [c for c in calls[0] if c["dtype"] != "uint8"]  # pickled objects are allowed
    return (
        mistakes.calls_differ(calls)
        or mistakes.not_waited(calls)
        or _source_changed(ranks)
        or _values(ranks)
        or _objects(ranks)
        or mistakes.too_many_bytes(tensors, n, psi * (n - 1) / n)
    )


judge = judging(look)


def _values(ranks: Rows) -> Finding | None:
    src = ranks[0]["src"]
    wrong = [(r, name) for r, rank in enumerate(ranks) for name, want in rank["want"].items()
             if not close(rank["got"][name], want)]  # fmt: skip
    if not wrong:
        return None
    rank, name = wrong[0]
    names = list(dict.fromkeys(name for _, name in wrong))
    facts = {"rank": rank, "src": src, "names": listed(names)}

    def all_are(what: str) -> bool:
        return all(close(ranks[r]["got"][n], ranks[r][what][n]) for r, n in wrong)

    if src != 0 and all_are("first"):
        return say("wrong-source", src=src)
    if all_are("mean"):
        return say("averaged", **facts)
    if all_are("own"):
        if set(names) <= set(ranks[0]["buffers"]):
            return say("buffers-forgotten", **facts)
        if set(names) <= set(ranks[0]["frozen"]):
            return say("frozen-forgotten", **facts)
        return say("not-communicated/broadcast", **facts)
    off = mistakes.error(ranks[rank]["got"][name], ranks[rank]["want"][name])
    return say("wrong-values", name=name, rank=rank, src=src, error=off)


def _source_changed(ranks: Rows) -> Finding | None:
    src = ranks[0]["src"]
    rank = ranks[src]
    changed = [n for n in rank["own"] if not close(rank["got"][n], rank["own"][n])]
    means = all(close(rank["got"][n], rank["mean"][n]) for n in changed)
    firsts = src != 0 and all(close(rank["got"][n], rank["first"][n]) for n in changed)
    if not changed or means or firsts:
        return None
    return say("source-changed", src=src, names=listed(changed))


def _objects(ranks: Rows) -> Finding | None:
    if not all(rank["same_objects"] for rank in ranks):
        return say("not-in-place")
    return None if all(rank["same_flags"] for rank in ranks) else say("flags-changed")
