"""Gradient averaging: the mean over ranks and micro-batches, the weights untouched, each gradient
sent once per step."""

from __future__ import annotations

import contextlib
import math
from typing import Any

from torch import Tensor, nn

from shardlab.learn import mistakes, toys
from shardlab.learn.exercise import Case, Finding, Rows, Stage, each_step, judging, say

# micros: micro-batches of each step of ``accumulate``; without, ``average_gradients`` is called.
CASES = (
    Case("two ranks", 2, {"toy": "plain"}),
    Case("frozen layer", 2, {"toy": "frozen"}),
    Case("tied weights", 2, {"toy": "tied"}),
    Case("three ranks", 3, {"toy": "plain"}),
    Case("unused parameter", 2, {"toy": "skipping"}),
    Case("three micro-batches", 2, {"toy": "frozen", "micros": [3]}),
    Case("steps of 3, 1 and 2 micro-batches", 2, {"toy": "tied", "micros": [3, 1, 2]}),
    Case("three ranks, four micro-batches", 3, {"toy": "plain", "micros": [4]}),
    Case("an error inside no_sync", 2, {"toy": "plain", "micros": [1], "error": True}),
)


class Planned(Exception):
    """Raised inside no_sync, to see that it is left as it was entered."""


def run(at: Stage) -> dict[str, Any]:
    model, one = toys.prepare(at)
    if "micros" in at.options:
        return accumulate(at, model, one)

    def work(batches: list[toys.Batch]) -> None:
        toys.loss(model, batches[0]).backward()
        at.submission.average_gradients(model)

    return toys.train(at, model, one, [1], work)


def accumulate(at: Stage, model: nn.Module, one: toys.OneProcess) -> dict[str, Any]:
    ddp = at.submission.DDP(model)
    if at.options.get("error"):
        with contextlib.suppress(Planned), ddp.no_sync():
            raise Planned

    def work(batches: list[toys.Batch]) -> None:
        seen = 0

        def loss(model: nn.Module, batch: toys.Batch) -> Tensor:
            """The loss function that the learner calls; it counts the micro-batches."""
            nonlocal seen
            seen += 1
            at.spy.mark(f"micro {seen}")
            return toys.loss(model, batch)

        at.submission.accumulate(ddp, batches, loss)

    return toys.train(at, model, one, at.options["micros"], work)


@each_step
def _steps(rows: Rows, step: int) -> Finding | None:
    micros, calls = rows[0]["micros"], rows[0]["calls"]
    if micros > 1:
        early = sum(call["mark"] != f"micro {micros}" for call in calls)
        if early and all(row["calls"] for row in rows):
            return say(
                "communicates-each-micro-batch", early=early, calls=len(calls), micros=micros
            )
    found = mistakes.wrong_gradient(rows)
    if not found:
        return None
    known = [name for name, value in rows[0]["mean"].items() if value is not None]
    last = all(
        mistakes.close(row["got"][name], row["last"][name])
        for row in rows
        for name in known
        if row["got"][name] is not None
    )
    if micros > 1 and last:
        return say("only-the-last", micros=micros)
    factor = mistakes.common_ratio(rows, known)
    if factor is None:
        return found
    if micros > 1 and math.isclose(factor, micros, rel_tol=1e-5):
        return say("micro-batches-summed", micros=micros)
    if step > 0:
        return say("nominal-count", number=step + 1, micros=micros, ratio=factor)
    return found


def steps(ranks: Rows) -> Finding | None:
    found = _steps(ranks)
    if found and found.cause == "not-communicated" and ranks[0].get("error"):
        return say("no-sync-left-on")
    return found


judge = judging(mistakes.not_waited, mistakes.weights_averaged, steps, mistakes.sent_by_hand)
