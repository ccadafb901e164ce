"""The exercises that communicate during backward: their loop, and their known mistakes, pure
functions of one step's rows. The spy's marks are "micro 0", "micro 1" …, "finish", "end".
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch import nn

from shardlab.learn import toys
from shardlab.learn.exercise import Finding, Row, Rows, Stage, each_step, say
from shardlab.learn.mistakes import described, wrong_gradient

STEPS = 2  # the second finds what the first left


def run(at: Stage, make: Callable[[nn.Module], Any]) -> dict[str, Any]:
    """The loop of the contract. ``late_s``: how much later than the others rank 1 comes."""
    micros, late_s = at.options["micros"], at.options.get("late_s", 0.0)
    model, one = toys.prepare(at)
    ddp = make(model)

    def work(batches: list[toys.Batch]) -> None:
        for i, batch in enumerate(batches):
            at.spy.mark(f"micro {i}")
            ddp.is_last = i == micros - 1
            if at.rank == 1:
                time.sleep(late_s)
            (toys.loss(model, batch) / micros).backward()
        at.spy.mark("finish")
        ddp.finish()
        at.spy.mark("end")

    return toys.train(at, model, one, [micros] * STEPS, work)


@each_step
def weights(rows: Rows, _step: int) -> Finding | None:
    for row in rows:
        for call in row["calls"]:
            kind, _, name = call["what"].partition(":")
            if kind == "param":
                return say("weights-averaged/in-a-hook", line=call["line"], name=name)
    return None


@each_step
def every_microbatch(rows: Rows, _step: int) -> Finding | None:
    for rank, row in enumerate(rows):
        last = row["micros"] - 1
        early = [c for c in row["calls"] if c["mark"] in {f"micro {i}" for i in range(last)}]
        if early:
            micro = early[0]["mark"].removeprefix("micro ")
            return say("every-microbatch", rank=rank, micro=micro, last=last, early=len(early))
    return None


@each_step
def touched(rows: Rows, step: int) -> Finding | None:
    """Written to while under way."""
    for rank, row in enumerate(rows):
        for call in row["calls"]:
            if call["touched"] and step > 0:
                return say("not-reset", step=step, what=f"It writes to {described(call)} too early")
            if call["touched"]:
                return say("touched-under-way", rank=rank, call=described(call))
    return None


@each_step
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
        if in_hook := blocking or waited_in_backward(calls):
            key = "waited-in-backward/blocking" if blocking else "waited-in-backward"
            return say(key, rank=rank, times=len(in_hook), call=described(in_hook[0]))
    return None


def waited_in_backward(calls: Rows) -> list[Row]:
    return [c for c in calls if (c["waited"] or "").startswith("micro")]


@each_step
def gradients(rows: Rows, step: int) -> Finding | None:
    """Against one process. What is right in the first step and wrong later was not set back."""
    found = wrong_gradient(rows)
    return say("not-reset", step=step, what=found.message) if found and step > 0 else found
