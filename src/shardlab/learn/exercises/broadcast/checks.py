"""Broadcast: everything that makes up the model, from the rank that was asked for, in place."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from shardlab.learn import mistakes, toys
from shardlab.learn.exercise import Case, Finding, Rows, Stage, each_step, judging, say
from shardlab.learn.mistakes import close, listed

CASES = (
    Case("two ranks", 2, {"toy": "plain", "src": 0}),
    Case("frozen layer", 2, {"toy": "frozen", "src": 0}),
    Case("tied weights", 2, {"toy": "tied", "src": 0}),
    Case("buffers", 2, {"toy": "buffers", "src": 0}),
    Case("three ranks, from rank 2", 3, {"toy": "plain", "src": 2}),
)


def run(at: Stage) -> dict[str, Any]:
    # Different on every rank: a broadcast that is missing shows.
    models = [toys.build(toys.TOYS[at.options["toy"]], seed=10 + r) for r in range(at.world)]
    everyones = [_tensors(model) for model in models]
    model, src = models[at.rank], at.options["src"]
    before = [id(p) for p in model.parameters()]
    trains = {n: p.requires_grad for n, p in model.named_parameters()}
    at.spy.watch(model)
    at.submission.broadcast_model(model, src)
    row = {
        "src": src,
        "got": _tensors(model),
        "own": everyones[at.rank],
        "want": everyones[src],
        "mean": {n: sum(t[n].double() for t in everyones) / at.world for n in everyones[0]},
        "first": everyones[0],
        "buffers": [n for n, _ in model.named_buffers()],
        "frozen": [n for n, train in trains.items() if not train],
        "same_objects": before == [id(p) for p in model.parameters()],
        "same_flags": trains == {n: p.requires_grad for n, p in model.named_parameters()},
        "bytes": sum(t.numel() * t.element_size() for t in everyones[0].values()),
        "calls": at.spy.calls,
    }
    return {"steps": [row]}


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {n: t.detach().clone() for n, t in (*model.named_parameters(), *model.named_buffers())}


@each_step
def source_changed(rows: Rows, _step: int) -> Finding | None:
    src = rows[0]["src"]
    row = rows[src]
    changed = [n for n in row["own"] if not close(row["got"][n], row["own"][n])]
    means = all(close(row["got"][n], row["mean"][n]) for n in changed)
    firsts = src != 0 and all(close(row["got"][n], row["first"][n]) for n in changed)
    if not changed or means or firsts:  # means and firsts have messages of their own
        return None
    return say("source-changed", src=src, names=listed(changed))


@each_step
def values(rows: Rows, _step: int) -> Finding | None:
    src = rows[0]["src"]
    wrong = [(r, name) for r, row in enumerate(rows) for name, want in row["want"].items()
             if not close(row["got"][name], want)]  # fmt: skip
    if not wrong:
        return None
    rank, name = wrong[0]
    names = list(dict.fromkeys(name for _, name in wrong))
    facts = {"rank": rank, "src": src, "names": listed(names)}

    def all_are(what: str) -> bool:
        return all(close(rows[r]["got"][n], rows[r][what][n]) for r, n in wrong)

    if src != 0 and all_are("first"):
        return say("wrong-source", src=src)
    if all_are("mean"):
        return say("averaged", **facts)
    if all_are("own"):
        if set(names) <= set(rows[0]["buffers"]):
            return say("buffers-forgotten", **facts)
        if set(names) <= set(rows[0]["frozen"]):
            return say("frozen-forgotten", **facts)
        return say("not-communicated/broadcast", **facts)
    off = mistakes.error(rows[rank]["got"][name], rows[rank]["want"][name])
    return say("wrong-values", name=name, rank=rank, src=src, error=off)


@each_step
def objects(rows: Rows, _step: int) -> Finding | None:
    if not all(row["same_objects"] for row in rows):
        return say("not-in-place")
    return None if all(row["same_flags"] for row in rows) else say("flags-changed")


@each_step
def sent(rows: Rows, _step: int) -> Finding | None:
    n, psi = len(rows), rows[0]["bytes"]
    tensors = [c for c in rows[0]["calls"] if c["dtype"] != "uint8"]  # pickled objects are allowed
    return mistakes.too_many_bytes(tensors, n, psi * (n - 1) / n)


judge = judging(mistakes.calls_differ, mistakes.not_waited, source_changed, values, objects, sent)
