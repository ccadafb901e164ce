"""ZeRO-1: one process's update, with one n-th of the optimizer's state on each rank."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from shardlab.learn import mistakes, mistakes_sharded, sharded
from shardlab.learn.exercise import Case, Evidence, Finding
from shardlab.learn.spy import Spy

CASES = (
    Case("SGD", 2, {"kind": "sgd"}),
    Case("SGD, clipped", 2, {"kind": "sgd", "max_norm": 0.1}),
    Case("AdamW", 2, {"kind": "adamw"}),
    Case("AdamW, three ranks, clipped", 3, {"kind": "adamw", "max_norm": 0.1}),
)
STEPS = 3


def run(case: Case, rank: int, submission: ModuleType, spy: Spy) -> dict[str, Any]:
    kind, max_norm = case.options["kind"], case.options.get("max_norm")
    model = sharded.build(sharded.Frozen)
    single = sharded.Single(model, kind, max_norm)
    factory = sharded.Factory(kind)
    params = [p for p in model.parameters() if p.requires_grad]
    zero = submission.Zero1(iter(params), factory, max_norm)
    subject = sharded.Subject(
        zero, model.forward, lambda: sharded.trained(model), model, factory, False
    )
    return sharded.train(subject, single, spy, rank, case.world, STEPS, micros=1)


def judge(evidence: Evidence) -> list[Finding]:
    findings: list[Finding] = []
    for case, ranks in evidence.items():
        calls = [[c for row in rank["steps"] for c in row["calls"]] for rank in ranks]
        findings += (
            mistakes.not_waited(case, calls)
            or mistakes_sharded.judge(case, ranks)
            or mistakes_sharded.sent(case, ranks, 3, "3Ψ(n-1)/n")
        )
    return mistakes_sharded.most_telling(findings)
