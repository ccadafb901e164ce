"""Gradient averaging: the mean over the ranks, the weights untouched, each gradient sent once."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from shardlab.learn import mistakes, toys
from shardlab.learn.exercise import Case, Evidence, Finding
from shardlab.learn.spy import Spy

CASES = (
    Case("two ranks", 2, {"toy": "plain"}),
    Case("frozen layer", 2, {"toy": "frozen"}),
    Case("tied weights", 2, {"toy": "tied"}),
    Case("three ranks", 3, {"toy": "plain"}),
    Case("unused parameter", 2, {"toy": "unused"}),
)


def run(case: Case, rank: int, submission: ModuleType, spy: Spy) -> dict[str, Any]:
    model = toys.build(case.options["toy"])
    batches = [[toys.batch(r)] for r in range(case.world)]
    want = toys.mean_gradients(model, batches)
    own = toys.own_gradients(model, batches[rank])
    before = toys.parameters(model)
    spy.watch(model)
    toys.loss(model, batches[rank][0]).backward()
    spy.mark("average")
    submission.average_gradients(model)
    return {
        "got": toys.gradients(model),
        "want": want,
        "own": own,
        "before": before,
        "after": toys.parameters(model),
        "calls": spy.calls,
        "bytes": sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad),
    }


def judge(evidence: Evidence) -> list[Finding]:
    findings = []
    for case, ranks in evidence.items():
        calls = [rank["calls"] for rank in ranks]
        n = len(ranks)
        findings += (
            mistakes.not_waited(case, calls)
            or mistakes.weights_averaged(case, ranks)
            or mistakes.gradients(case, ranks)
            or mistakes.not_by_hand(case, calls)
            or mistakes.too_many_bytes(case, calls[0], n, 2 * ranks[0]["bytes"] * (n - 1) / n)
        )
    return findings
