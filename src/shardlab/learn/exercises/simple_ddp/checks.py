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
        findings += (
            _weights(case, ranks)
            or mistakes.gradients(case, ranks)
            or mistakes.not_waited(case, calls)
            or _by_hand(case, ranks)
            or _bytes(case, ranks)
        )
    return findings


def _weights(case: str, ranks: list[dict[str, Any]]) -> list[Finding]:
    """The famous one: the parameters are averaged, the gradients never."""
    for rank in ranks:
        changed = [
            n for n in rank["before"] if not mistakes.close(rank["before"][n], rank["after"][n])
        ]
        sent = [c for c in rank["calls"] if c["what"].startswith("param:")]
        if changed or sent:
            names = changed or [c["what"].partition(":")[2] for c in sent]
            message = (
                f"your code communicates or changes the weights ({mistakes.listed(names)}): what "
                "must be averaged is each parameter's `.grad`"
            )
            return [Finding("weights-averaged", message, case)]
    return []


def _by_hand(case: str, ranks: list[dict[str, Any]]) -> list[Finding]:
    if any(rank["calls"] for rank in ranks):
        return []
    message = (
        "the gradients are right, but no collective was called: do it by hand, with all_reduce"
    )
    return [Finding("not-by-hand", message, case)]


def _bytes(case: str, ranks: list[dict[str, Any]]) -> list[Finding]:
    """Each gradient once: 2Ψ(n-1)/n per rank; agreeing on who has a gradient is a few bytes."""
    n, psi = len(ranks), ranks[0]["bytes"]
    sent = sum(mistakes.wire_bytes(call, n) for call in ranks[0]["calls"])
    should = 2 * psi * (n - 1) / n
    if sent <= should + 16 * len(ranks[0]["want"]) + 64:
        return []
    ops = sorted({call["op"] for call in ranks[0]["calls"]})
    message = (
        f"each rank sends {sent:.0f} bytes ({', '.join(ops)}) on {n} ranks; all-reducing each "
        f"gradient once takes {should:.0f}: {sent / should:.1f} times too many"
    )
    return [Finding("too-many-bytes", message, case)]
