"""Hooks: each gradient is averaged inside backward, when it is ready, once."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from shardlab.learn import mistakes, toys
from shardlab.learn.exercise import Case, Evidence, Finding
from shardlab.learn.spy import Spy

CASES = (
    Case("two ranks", 2, {"toy": "plain"}),
    Case("five layers", 2, {"toy": "deep"}),
    Case("frozen layer", 2, {"toy": "frozen"}),
    Case("tied weights", 2, {"toy": "tied"}),
    Case("three ranks", 3, {"toy": "deep"}),
)
STEPS = 2  # the second finds hooks that were meant for the first


def run(case: Case, rank: int, submission: ModuleType, spy: Spy) -> dict[str, Any]:
    model = toys.build(case.options["toy"])
    before = toys.parameters(model)
    spy.watch(model)
    submission.install_hooks(model)
    at_once = len(spy.calls)
    steps = []
    for step in range(STEPS):
        batches = [[toys.batch(r, step)] for r in range(case.world)]
        for p in model.parameters():
            p.grad = None
        first_call = len(spy.calls)
        spy.mark(f"step {step}")
        toys.loss(model, batches[rank][0]).backward()
        steps.append(
            {
                "got": toys.gradients(model),
                "want": toys.mean_gradients(toys.build(case.options["toy"]), batches),
                "own": toys.own_gradients(toys.build(case.options["toy"]), batches[rank]),
                "calls": spy.calls[first_call:],
            }
        )
    trained = [p for p in model.parameters() if p.requires_grad]
    return {
        "steps": steps,
        "at_once": at_once,
        "before": before,
        "after": toys.parameters(model),
        "calls": spy.calls,
        "parameters": len(trained),
        "bytes": sum(p.numel() * p.element_size() for p in trained),
    }


def judge(evidence: Evidence) -> list[Finding]:
    findings = []
    for case, ranks in evidence.items():
        n, psi = len(ranks), ranks[0]["bytes"]
        calls = [rank["calls"] for rank in ranks]
        findings += (
            mistakes.not_waited(case, calls)
            or mistakes.weights_averaged(case, ranks)
            or _gradients(case, ranks)
            or mistakes.not_by_hand(case, calls)
            or _when(case, ranks)
            or mistakes.too_many_bytes(case, calls[0], n, STEPS * 2 * psi * (n - 1) / n)
        )
    return findings


def _gradients(case: str, ranks: list[dict[str, Any]]) -> list[Finding]:
    for step in range(STEPS):
        if found := mistakes.gradients(case, [rank["steps"][step] for rank in ranks]):
            if step > 0:
                message = f"the first step is right, in the second {found[0].message}"
                return [Finding("first-step-only", message, case)]
            return found
    return []


def _when(case: str, ranks: list[dict[str, Any]]) -> list[Finding]:
    """Each call when its gradient is ready: not before backward, and not when all have come."""
    total = ranks[0]["parameters"]
    for rank, row in enumerate(ranks):
        calls = row["steps"][0]["calls"]
        outside = [c for c in calls if not c["in_backward"]]
        if outside:
            message = (
                f"{len(outside)} of {len(calls)} calls on rank {rank} are made outside backward "
                f"({mistakes.described(outside[0])}): a hook runs inside it"
            )
            return [Finding("outside-backward", message, case)]
        early = [c for c in calls if c["ready"] < total]
        if total > 2 and not early:
            message = (
                f"all {len(calls)} calls come when the last of {total} gradients is there: that is "
                "after backward, in all but name. Each hook communicates its own gradient"
            )
            return [Finding("too-late", message, case)]
    return []
