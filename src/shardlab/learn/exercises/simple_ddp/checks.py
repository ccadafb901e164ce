"""Gradient averaging: the mean over the ranks, the weights untouched, each gradient sent once."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from shardlab.learn import mistakes, toys
from shardlab.learn.exercise import Case, Finding, judging
from shardlab.learn.mistakes import Rows
from shardlab.learn.spy import Spy

CASES = (
    Case("two ranks", 2, {"toy": "plain"}),
    Case("frozen layer", 2, {"toy": "frozen"}),
    Case("tied weights", 2, {"toy": "tied"}),
    Case("three ranks", 3, {"toy": "plain"}),
    Case("unused parameter", 2, {"toy": "unused"}),
)


def run(case: Case, rank: int, submission: ModuleType, spy: Spy) -> dict[str, Any]:
    model, one = toys.prepare(case.options["toy"], spy)

    def work(batches: list[toys.Batch]) -> None:
        toys.loss(model(batches[0][0]), batches[0]).backward()
        submission.average_gradients(model)

    return toys.train(model, one, spy, rank, case.world, [1], work)


def look(_case: str, ranks: Rows) -> Finding | None:
    return (
        mistakes.not_waited(mistakes.all_calls(ranks))
        or mistakes.first(ranks, mistakes.weights_averaged)
        or mistakes.first(ranks, mistakes.gradients)
        or mistakes.sent_by_hand(ranks)
    )


judge = judging(look)
