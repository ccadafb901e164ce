"""Asynchronous all-reduce: the mean, sent once per step, launched in backward, waited for after."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from shardlab.learn import mistakes, overlapped, toys
from shardlab.learn.exercise import Case, Evidence, Finding
from shardlab.learn.spy import Spy

CASES = (
    Case("two ranks", 2, {"toy": "deep", "micros": 1}),
    Case("frozen layer", 2, {"toy": "frozen", "micros": 1}),
    Case("tied weights, three micro-batches", 2, {"toy": "tied", "micros": 3}),
    Case("a rank is late", 2, {"toy": "deep", "micros": 1, "late_s": 0.05}),
)
STEPS = 2


def run(case: Case, rank: int, submission: ModuleType, spy: Spy) -> dict[str, Any]:
    options = dict(case.options)
    model = toys.build(options.pop("toy"))
    spy.watch(model)
    ddp = submission.AsyncDDP(model)
    return overlapped.run(ddp, model, rank, case.world, steps=STEPS, spy=spy, **options)


def judge(evidence: Evidence) -> list[Finding]:
    for case, ranks in evidence.items():
        for look in (
            overlapped.weights,
            overlapped.every_microbatch,
            overlapped.waits,
            _sum_lost,
            overlapped.gradients,
            overlapped.overlap,
        ):
            if found := overlapped.first(case, ranks, look):
                return found  # one thing at a time: the cases after it are harder
        if found := _bytes(case, ranks):
            return found
    return []


def _sum_lost(case: str, ranks: list[dict[str, Any]], _step: int) -> list[Finding]:
    """Every byte was sent, and p.grad is still the rank's own, whole or divided."""
    sent = sum(len(mistakes.flat(g)) * 8 for g in ranks[0]["own"].values() if g is not None)
    own = [name for name, g in ranks[0]["own"].items() if g is not None]
    for factor, words in ((1.0, ""), (1 / len(ranks), f" divided by {len(ranks)}")):
        if sum(c["bytes"] for c in ranks[0]["calls"]) >= sent and all(
            rank["got"][n] is not None
            and mistakes.close(rank["got"][n], [factor * g for g in mistakes.flat(rank["own"][n])])
            for rank in ranks
            for n in own
        ):
            message = (
                f"the gradients were all-reduced, but p.grad is still the rank's own{words}: the "
                "sum went into another tensor than the one that p.grad is now. Work in place "
                "(p.grad /= n), and after the wait"
            )
            return [Finding("sum-lost", message, case)]
    return []


def _bytes(case: str, ranks: overlapped.Ranks) -> list[Finding]:
    """Each gradient once, and one message for each."""
    psi = sum(ranks[0]["sizes"].values())
    for step, row in enumerate(ranks[0]["steps"]):
        sent = sum(c["bytes"] for c in row["calls"])
        if sent != psi:
            message = (
                f"step {step} all-reduces {sent} bytes; the gradients have {psi}: each is sent "
                "exactly once"
            )
            return [Finding("too-many-bytes" if sent > psi else "too-few-bytes", message, case)]
    return []
