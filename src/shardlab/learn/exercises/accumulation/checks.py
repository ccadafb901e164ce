"""Accumulation: the mean over ranks and micro-batches, for one round of communication per step."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from shardlab.learn import mistakes, toys
from shardlab.learn.exercise import Case, Evidence, Finding
from shardlab.learn.spy import Spy

# micro: micro-batches of each step, one after the other.
CASES = (
    Case("one micro-batch", 2, {"toy": "plain", "micro": [1]}),
    Case("three micro-batches", 2, {"toy": "plain", "micro": [3]}),
    Case("frozen layer, tied weights", 2, {"toy": "frozen", "micro": [3]}),
    Case("steps of 3, 1 and 2 micro-batches", 2, {"toy": "tied", "micro": [3, 1, 2]}),
    Case("three ranks", 3, {"toy": "plain", "micro": [4]}),
    Case("an error inside no_sync", 2, {"toy": "plain", "micro": [1], "error": True}),
)


class Planned(Exception):
    """Raised inside no_sync, to see that it is left as it was entered."""


def run(case: Case, rank: int, submission: ModuleType, spy: Spy) -> dict[str, Any]:
    model = toys.build(case.options["toy"])
    before = toys.parameters(model)
    spy.watch(model)
    ddp = submission.DDP(model)
    if case.options.get("error"):
        try:
            with ddp.no_sync():
                raise Planned
        except Planned:
            pass
    steps = []
    for step, count in enumerate(case.options["micro"]):
        batches = [
            [toys.batch(r, step=10 * step + i) for i in range(count)] for r in range(case.world)
        ]
        for p in model.parameters():
            p.grad = None
        first_call = len(spy.calls)
        submission.accumulate(ddp, batches[rank], _marked_loss(spy))
        calls = spy.calls[first_call:]
        steps.append(
            {
                "got": toys.gradients(model),
                "want": _divided(toys.mean_gradients(model, batches), count),
                "own": _divided(toys.own_gradients(model, batches[rank]), count),
                "last_only": toys.mean_gradients(model, [b[-1:] for b in batches]),
                "calls": calls,
                "early": sum(c["mark"] != f"micro {count}" for c in calls),
                "micro": count,
            }
        )
    return {
        "steps": steps,
        "before": before,
        "after": toys.parameters(model),
        "calls": spy.calls,
        "bytes": sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad),
    }


def _marked_loss(spy: Spy) -> Any:
    """The loss function that the learner calls; it counts the micro-batches."""
    seen = 0

    def loss(model: nn.Module, batch: toys.Batch) -> Tensor:
        nonlocal seen
        seen += 1
        spy.mark(f"micro {seen}")
        return toys.loss(model, batch)

    return loss


def _divided(gradients: toys.Tensors, count: int) -> toys.Tensors:
    return {name: None if g is None else g / count for name, g in gradients.items()}


def judge(evidence: Evidence) -> list[Finding]:
    findings = []
    for case, ranks in evidence.items():
        n, psi = len(ranks), ranks[0]["bytes"]
        calls = [rank["calls"] for rank in ranks]
        findings += (
            mistakes.not_waited(case, calls)
            or mistakes.weights_averaged(case, ranks)
            or _steps(case, ranks)
            or mistakes.not_by_hand(case, calls)
            or mistakes.too_many_bytes(
                case, calls[0], n, 2 * psi * (n - 1) / n * len(ranks[0]["steps"])
            )
        )
    return findings


def _steps(case: str, ranks: list[dict[str, Any]]) -> list[Finding]:
    for i in range(len(ranks[0]["steps"])):
        step = [rank["steps"][i] for rank in ranks]
        if found := _step(case, i, step):
            return [found]
    return []


def _step(case: str, i: int, ranks: list[dict[str, Any]]) -> Finding | None:
    micro, early = ranks[0]["micro"], ranks[0]["early"]
    found = mistakes.gradients(case, ranks)
    if micro > 1 and early and all(rank["calls"] for rank in ranks):
        message = (
            f"{early} of {len(ranks[0]['calls'])} calls come before the last of {micro} "
            "micro-batches: inside `no_sync` backward must only add to `.grad`"
        )
        if found:
            message += ". What was averaged already is averaged again with the next micro-batch"
        return Finding("communicates-each-micro-batch", message, case)
    if not found:
        return None
    if found[0].cause == "not-communicated" and case.startswith("an error"):
        message = (
            "after an exception inside `no_sync` the next step is not communicated: switch "
            "communication on again in a `finally`"
        )
        return Finding("no-sync-left-on", message, case)
    last = all(
        mistakes.close(rank["got"][name], value)
        for rank in ranks
        for name, value in rank["last_only"].items()
        if value is not None and rank["got"][name] is not None
    )
    if micro > 1 and last:
        message = f"only the last of {micro} micro-batches counts: the others' gradients are lost"
        return Finding("only-the-last", message, case)
    names = [name for name, value in ranks[0]["want"].items() if value is not None]
    ratios = [
        mistakes.ratio(rank["got"][name], rank["want"][name])
        for rank in ranks
        for name in names
        if rank["got"][name] is not None
    ]
    first = ratios[0] if ratios else None
    if first is None or any(r is None or not math.isclose(r, first, rel_tol=1e-5) for r in ratios):
        return found[0]
    if micro > 1 and math.isclose(first, micro, rel_tol=1e-5):
        message = (
            f"the gradients are {micro} times the mean: {micro} micro-batches are summed. Divide "
            f"each loss by {micro} before backward"
        )
        return Finding("micro-batches-summed", message, case)
    if i > 0:
        message = (
            f"step {i + 1} has {micro} micro-batches (the first had more), and its gradients are "
            f"{first:.3g} times the mean: divide by the number that came, not by a fixed one"
        )
        return Finding("nominal-count", message, case)
    return found[0]
