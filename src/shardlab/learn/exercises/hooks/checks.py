"""Hooks: the mean, sent once per step, launched in backward, waited for after."""

from __future__ import annotations

from typing import Any

from shardlab.learn import mistakes, overlapped
from shardlab.learn.exercise import Case, Finding, Rows, Stage, each_step, judging, say

CASES = (
    Case("two ranks", 2, {"toy": "deep", "micros": 1}),
    Case("frozen layer", 2, {"toy": "frozen", "micros": 1}),
    Case("tied weights, three micro-batches", 2, {"toy": "tied", "micros": 3}),
    Case("three ranks", 3, {"toy": "deep", "micros": 1}),
    Case("a rank is late", 2, {"toy": "deep", "micros": 1, "late_s": 0.05}),
)


def run(at: Stage) -> dict[str, Any]:
    return overlapped.run(at, at.submission.AsyncDDP)


@each_step
def sum_lost(rows: Rows, _step: int) -> Finding | None:
    """Every byte was sent, and p.grad is still the rank's own, whole or divided."""
    n, own = len(rows), rows[0]["own"]
    psi = sum(mistakes.flat(g).size * 8 for g in own[0].values())
    if sum(c["bytes"] for c in rows[0]["calls"]) < psi:
        return None
    for factor, divided in ((1.0, ""), (1 / n, f" divided by {n}")):
        if all(
            mistakes.close(row["got"][name], factor * mistakes.flat(g))
            for r, row in enumerate(rows)
            for name, g in own[r].items()
        ):
            return say("sum-lost", divided=divided)
    return None


def each_once(ranks: Rows) -> Finding | None:
    psi = sum(ranks[0]["sizes"].values())
    for step, row in enumerate(ranks[0]["steps"]):
        sent = sum(c["bytes"] for c in row["calls"])
        if sent != psi:
            return say("not-once", step=step, sent=sent, psi=psi)
    return None


@each_step
def too_late(rows: Rows, _step: int) -> Finding | None:
    """Inside backward, but when all gradients have come."""
    total = len(rows[0]["mean"])
    for row in rows:
        if total > 2 and all(call["ready"] == total for call in row["calls"]):
            return say("too-late", calls=len(row["calls"]), total=total)
    return None


judge = judging(
    overlapped.weights, overlapped.every_microbatch, each_once, mistakes.not_waited,
    overlapped.touched, sum_lost, overlapped.gradients, overlapped.overlap, too_late,
    only_first=True,
)  # fmt: skip
