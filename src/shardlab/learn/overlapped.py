"""The exercises that communicate during backward: their loop, and their known mistakes, pure
functions of one step's rows. The spy's marks are "micro 0", "micro 1" …, "finish", "end".
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from shardlab.learn import mistakes, toys
from shardlab.learn.exercise import Case, Finding, say
from shardlab.learn.mistakes import Rows, described
from shardlab.learn.spy import Spy

STEPS = 2  # the second finds what the first left


def run(case: Case, rank: int, spy: Spy, make: Callable[[nn.Module], Any]) -> dict[str, Any]:
    """The loop of the contract. ``late_s``: how much later than the others rank 1 comes."""
    micros, late_s = case.options["micros"], case.options.get("late_s", 0.0)
    model, one = toys.prepare(case.options["toy"], spy)
    ddp = make(model)

    def work(batches: list[toys.Batch]) -> None:
        for i, batch in enumerate(batches):
            spy.mark(f"micro {i}")
            ddp.is_last = i == micros - 1
            if rank == 1:
                time.sleep(late_s)
            (toys.loss(model(batch[0]), batch) / micros).backward()
        spy.mark("finish")
        ddp.finish()
        spy.mark("end")

    return toys.train(model, one, spy, rank, case.world, [micros] * STEPS, work)


def weights(rows: Rows, _step: int) -> Finding | None:
    for row in rows:
        for call in row["calls"]:
            kind, _, name = call["what"].partition(":")
            if kind == "param":
                return say("weights-averaged/in-a-hook", line=call["line"], name=name)
    return None


def waits(rows: Rows, step: int) -> Finding | None:
    """Never waited for; written to while under way."""
    if found := mistakes.not_waited([row["calls"] for row in rows]):
        return found
    for rank, row in enumerate(rows):
        for call in row["calls"]:
            if call["touched"] and step > 0:
                return say("not-reset", step=step, what=f"It writes to {described(call)} too early")
            if call["touched"]:
                return say("touched-under-way", rank=rank, call=described(call))
    return None


def every_microbatch(rows: Rows, _step: int) -> Finding | None:
    for rank, row in enumerate(rows):
        last = row["micros"] - 1
        early = [c for c in row["calls"] if c["mark"] in {f"micro {i}" for i in range(last)}]
        if early:
            micro = early[0]["mark"].removeprefix("micro ")
            return say("every-microbatch", rank=rank, micro=micro, last=last, early=len(early))
    return None


def overlap(rows: Rows, step: int) -> Finding | None:
    """Launched by hooks, in time, and not waited for there."""
    for rank, row in enumerate(rows):
        calls = row["calls"]
        if late := [c for c in calls if not c["in_backward"]]:
            return say(
                "after-backward", step=step, rank=rank, late=len(late), calls=len(calls),
                call=described(late[0]),
            )  # fmt: skip
        blocking = [c for c in calls if not c["is_async"]]
        if in_hook := blocking or [calls[i] for i in waited_in_backward(row["events"])]:
            key = "waited-in-backward/blocking" if blocking else "waited-in-backward"
            return say(key, rank=rank, times=len(in_hook), call=described(in_hook[0]))
    return None


def waited_in_backward(events: Sequence[Sequence[Any]]) -> list[int]:
    """The calls that were waited for before finish() began."""
    finish = [tuple(event) for event in events].index(("mark", "finish"))
    return [value for kind, value in events[:finish] if kind == "wait"]


def gradients(rows: Rows, step: int) -> Finding | None:
    """Against one process. What is right in the first step and wrong later was not set back."""
    found = mistakes.gradients(rows)
    return say("not-reset", step=step, what=found.message) if found and step > 0 else found
