"""Hooks: each gradient is averaged inside backward, when it is ready, once."""

from __future__ import annotations

from typing import Any

from shardlab.learn import mistakes, toys
from shardlab.learn.exercise import Case, Finding, Rows, Stage, each_step, judging, say

CASES = (
    Case("two ranks", 2, {"toy": "plain"}),
    Case("five layers", 2, {"toy": "deep"}),
    Case("frozen layer", 2, {"toy": "frozen"}),
    Case("tied weights", 2, {"toy": "tied"}),
    Case("three ranks", 3, {"toy": "deep"}),
)
STEPS = 2  # the second finds hooks that were meant for the first


def run(at: Stage) -> dict[str, Any]:
    model, one = toys.prepare(at)
    at.submission.install_hooks(model)

    def work(batches: list[toys.Batch]) -> None:
        at.spy.mark("backward")
        toys.loss(model, batches[0]).backward()

    return toys.train(at, model, one, [1] * STEPS, work)


@each_step
def gradients(rows: Rows, step: int) -> Finding | None:
    found = mistakes.wrong_gradient(rows)
    return say("first-step-only", what=found.message) if found and step > 0 else found


@each_step
def when(rows: Rows, _step: int) -> Finding | None:
    """Each call when its gradient is ready: not before backward, and not when all have come."""
    total = len(rows[0]["mean"])
    for rank, row in enumerate(rows):
        calls = row["calls"]
        if outside := [c for c in calls if not c["in_backward"]]:
            return say(
                "outside-backward", outside=len(outside), calls=len(calls), rank=rank,
                call=mistakes.described(outside[0]),
            )  # fmt: skip
        if total > 2 and all(c["ready"] == total for c in calls):
            return say("too-late", calls=len(calls), total=total)
    return None


judge = judging(
    mistakes.not_waited, mistakes.weights_averaged, gradients, mistakes.not_by_hand, when,
    mistakes.sent_by_hand,
)  # fmt: skip
