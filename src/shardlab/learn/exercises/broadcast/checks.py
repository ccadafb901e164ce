"""Broadcast: everything that makes up the model, from the rank that was asked for, in place."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from shardlab.learn import mistakes, toys
from shardlab.learn.exercise import Case, Evidence, Finding
from shardlab.learn.spy import Spy

CASES = (
    Case("two ranks", 2, {"toy": "plain", "src": 0}),
    Case("frozen layer", 2, {"toy": "frozen", "src": 0}),
    Case("tied weights", 2, {"toy": "tied", "src": 0}),
    Case("buffers", 2, {"toy": "buffers", "src": 0}),
    Case("three ranks, from rank 2", 3, {"toy": "plain", "src": 2}),
)


class Buffers(nn.Module):
    """BatchNorm (one of its buffers is an integer), and a buffer that no state_dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 5)
        self.norm = nn.BatchNorm1d(5)
        self.register_buffer("drift", torch.randn(7), persistent=False)


def _build(toy: str, rank: int) -> nn.Module:
    """Different on every rank: a broadcast that is missing shows."""
    if toy != "buffers":
        return toys.build(toy, seed=10 + rank)
    torch.manual_seed(10 + rank)
    model = Buffers().double()
    model.norm.running_mean.add_(rank)  # type: ignore[union-attr]
    model.norm.num_batches_tracked.add_(3 * rank + 1)  # type: ignore[union-attr]
    return model


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {n: t.detach().clone() for n, t in (*model.named_parameters(), *model.named_buffers())}


def run(case: Case, rank: int, submission: ModuleType, spy: Spy) -> dict[str, Any]:
    toy, src = case.options["toy"], case.options["src"]
    model = _build(toy, rank)
    own = _tensors(model)
    before = [id(p) for p in model.parameters()]
    trains = [p.requires_grad for p in model.parameters()]
    spy.watch(model)
    submission.broadcast_model(model, src)
    return {
        "got": _tensors(model),
        "own": own,
        "want": _tensors(_build(toy, src)),
        "mean": {
            n: sum(_tensors(_build(toy, r))[n].double() for r in range(case.world)) / case.world
            for n in own
        },
        "first": _tensors(_build(toy, 0)),
        "src": src,
        "buffers": [n for n, _ in model.named_buffers()],
        "frozen": [n for n, p in _build(toy, 0).named_parameters() if not p.requires_grad],
        "same_objects": before == [id(p) for p in model.parameters()],
        "same_flags": trains == [p.requires_grad for p in model.parameters()],
        "bytes": sum(t.numel() * t.element_size() for t in own.values()),
        "calls": spy.calls,
    }


def judge(evidence: Evidence) -> list[Finding]:
    findings = []
    for case, ranks in evidence.items():
        calls = [rank["calls"] for rank in ranks]
        n, psi = len(ranks), ranks[0]["bytes"]
        tensors = [c for c in calls[0] if c["dtype"] != "uint8"]  # pickled objects are allowed
        findings += (
            mistakes.calls_differ(case, calls)
            or mistakes.not_waited(case, calls)
            or _source_changed(case, ranks)
            or _values(case, ranks)
            or _objects(case, ranks)
            or mistakes.too_many_bytes(case, tensors, n, psi * (n - 1) / n)
        )
    return findings


def _values(case: str, ranks: list[dict[str, Any]]) -> list[Finding]:
    src = ranks[0]["src"]
    wrong = [
        (r, name)
        for r, rank in enumerate(ranks)
        for name, want in rank["want"].items()
        if not mistakes.close(rank["got"][name], want)
    ]
    if not wrong:
        return []
    names = list(dict.fromkeys(name for _, name in wrong))

    def all_are(what: str) -> bool:
        return all(mistakes.close(ranks[r]["got"][n], ranks[r][what][n]) for r, n in wrong)

    first, name = wrong[0]
    if src != 0 and all_are("first"):
        message = f"asked for rank {src}'s model, every rank has rank 0's: pass `src` on"
        return [Finding("wrong-source", message, case)]
    if all_are("mean"):
        message = (
            f"{mistakes.listed(names)}: every rank has the *mean* of the ranks' values. That is "
            f"neither rank's model; copy rank {src}'s"
        )
        return [Finding("averaged", message, case)]
    if all_are("own"):
        if set(names) <= set(ranks[0]["buffers"]):
            message = (
                f"not broadcast: {mistakes.listed(names)}, of which rank {first} has its own. "
                "`model.parameters()` has no buffers; see `model.buffers()`, which also has those "
                "that a state_dict leaves out"
            )
            return [Finding("buffers-forgotten", message, case)]
        if set(names) <= set(ranks[0]["frozen"]):
            message = (
                f"{mistakes.listed(names)} do not train, and are not broadcast: rank {first} "
                "computes with other values than rank 0. Frozen parameters are part of the model"
            )
            return [Finding("frozen-forgotten", message, case)]
        message = f"rank {first} still has its own {mistakes.listed(names)}, not rank {src}'s"
        return [Finding("not-communicated", message, case)]
    message = (
        f"`{name}` on rank {first} is not rank {src}'s: off by up to "
        f"{mistakes.error(ranks[first]['got'][name], ranks[first]['want'][name]):.2g}"
    )
    return [Finding("wrong-values", message, case)]


def _source_changed(case: str, ranks: list[dict[str, Any]]) -> list[Finding]:
    src = ranks[0]["src"]
    rank = ranks[src]
    changed = [n for n in rank["own"] if not mistakes.close(rank["got"][n], rank["own"][n])]
    means = all(mistakes.close(rank["got"][n], rank["mean"][n]) for n in changed)
    firsts = src != 0 and all(mistakes.close(rank["got"][n], rank["first"][n]) for n in changed)
    if not changed or means or firsts:
        return []
    message = f"rank {src} gives its model, and its {mistakes.listed(changed)} changed on the way"
    return [Finding("source-changed", message, case)]


def _objects(case: str, ranks: list[dict[str, Any]]) -> list[Finding]:
    if not all(rank["same_objects"] for rank in ranks):
        message = (
            "the parameters are other objects than before: an optimizer that was made from the old "
            "ones would update those. Write into the tensors, in place"
        )
        return [Finding("not-in-place", message, case)]
    if not all(rank["same_flags"] for rank in ranks):
        message = "`requires_grad` of some parameters has changed"
        return [Finding("flags-changed", message, case)]
    return []
