"""Asynchronous all-reduce: the mean, sent once per step, launched in backward, waited for after."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from shardlab.learn import mistakes, overlapped
from shardlab.learn.exercise import Case, Finding, judging, say
from shardlab.learn.mistakes import Rows
from shardlab.learn.spy import Spy

CASES = (
    Case("two ranks", 2, {"toy": "deep", "micros": 1}),
    Case("frozen layer", 2, {"toy": "frozen", "micros": 1}),
    Case("tied weights, three micro-batches", 2, {"toy": "tied", "micros": 3}),
    Case("a rank is late", 2, {"toy": "deep", "micros": 1, "late_s": 0.05}),
)


def run(case: Case, rank: int, submission: ModuleType, spy: Spy) -> dict[str, Any]:
    return overlapped.run(case, rank, spy, submission.AsyncDDP)


def look(_case: str, ranks: Rows) -> Finding | None:
    return (
        mistakes.first(ranks, overlapped.weights)
        or mistakes.first(ranks, overlapped.every_microbatch)
        or mistakes.first(ranks, overlapped.waits)
        or mistakes.first(ranks, _sum_lost)
        or mistakes.first(ranks, overlapped.gradients)
        or mistakes.first(ranks, overlapped.overlap)
        or _bytes(ranks)
    )


judge = judging(look, only_first=True)


def _sum_lost(rows: Rows, _step: int) -> Finding | None:
    """Every byte was sent, and p.grad is still the rank's own, whole or divided."""
    n, own = len(rows), rows[0]["own"]
    psi = sum(len(mistakes.flat(g)) * 8 for g in own[0].values())
    if sum(c["bytes"] for c in rows[0]["calls"]) < psi:
        return None
    for factor, divided in ((1.0, ""), (1 / n, f" divided by {n}")):
        if all(
            mistakes.same(row["got"][name], [factor * x for x in mistakes.flat(g)])
            for r, row in enumerate(rows)
            for name, g in own[r].items()
        ):
            return say("sum-lost", divided=divided)
    return None


def _bytes(ranks: Rows) -> Finding | None:
    """Each gradient once, and one message for each."""
    psi = sum(ranks[0]["sizes"].values())
    for step, row in enumerate(ranks[0]["steps"]):
        sent = sum(c["bytes"] for c in row["calls"])
        if sent != psi:
            key = "too-many-bytes/once" if sent > psi else "too-few-bytes/once"
            return say(key, step=step, sent=sent, psi=psi)
    return None
