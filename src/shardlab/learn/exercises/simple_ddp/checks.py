"""Gradient averaging: the mean over the ranks, the weights untouched, each gradient sent once."""

from __future__ import annotations

from typing import Any

from shardlab.learn import mistakes, toys
from shardlab.learn.exercise import Case, Stage, judging

CASES = (
    Case("two ranks", 2, {"toy": "plain"}),
    Case("frozen layer", 2, {"toy": "frozen"}),
    Case("tied weights", 2, {"toy": "tied"}),
    Case("three ranks", 3, {"toy": "plain"}),
    Case("unused parameter", 2, {"toy": "skipping"}),
)
judge = judging(
    mistakes.not_waited, mistakes.weights_averaged, mistakes.gradients, mistakes.sent_by_hand
)


def run(at: Stage) -> dict[str, Any]:
    model, one = toys.prepare(at)

    def work(batches: list[toys.Batch]) -> None:
        toys.loss(model, batches[0]).backward()
        at.submission.average_gradients(model)

    return toys.train(at, model, one, [1], work)
