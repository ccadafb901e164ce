"""For the exercises that communicate during backward: their loop, and what went wrong in it.

``steps`` is plain evidence, one row per step: ``got`` (the gradients after finish()), ``want`` (one
process), ``own`` (this rank's before it communicated), ``last`` (number of the last micro-batch),
``calls`` and ``events`` (the spy's; marks are "micro 0", "micro 1" …, "finish", "end").
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shardlab.learn import mistakes, toys
from shardlab.learn.exercise import Finding
from shardlab.learn.spy import Spy

Row = dict[str, Any]
Ranks = Sequence[Mapping[str, Any]]  # each rank's evidence of one case
LEARNING_RATE = 0.05


def run(
    ddp: Any, model: nn.Module, rank: int, world: int, micros: int, steps: int, spy: Spy,
    late_s: float = 0.0,
) -> dict[str, Any]:  # fmt: skip
    """The loop of the contract. ``late_s``: how much later than the others rank 1 comes."""
    rows = []
    for step in range(steps):
        batches = [[toys.batch(r, 10 * step + i) for i in range(micros)] for r in range(world)]
        own = [_scaled(toys.own_gradients(model, each), 1 / micros) for each in batches]
        want = _scaled(toys.mean_gradients(model, batches), 1 / micros)
        first_call, first_event = len(spy.calls), len(spy.events)
        for i, batch in enumerate(batches[rank]):
            spy.mark(f"micro {i}")
            ddp.is_last = i == micros - 1
            if rank == 1:
                time.sleep(late_s)
            (toys.loss(model, batch) / micros).backward()
        spy.mark("finish")
        ddp.finish()
        spy.mark("end")
        rows.append(
            {
                "got": toys.gradients(model),
                "want": want,
                "own": own[rank],
                "last": micros - 1,
                "calls": spy.calls[first_call:],
                "events": [
                    (kind, x - first_call if isinstance(x, int) else x)
                    for kind, x in spy.events[first_event:]
                ],
            }
        )
        with torch.no_grad():
            for (
                name,
                p,
            ) in model.named_parameters():  # by our gradients: a mistake stays in its step
                if (mean := want.get(name)) is not None:
                    p.sub_(LEARNING_RATE * mean)
                p.grad = None
    sizes = {
        n: p.numel() * p.element_size() for n, p in model.named_parameters() if p.requires_grad
    }
    return {"steps": rows, "sizes": sizes}


def _scaled(tensors: toys.Tensors, factor: float) -> toys.Tensors:
    return {name: None if t is None else t * factor for name, t in tensors.items()}


# ------------------------------------------------------------------ what went wrong


def first(
    case: str, ranks: Ranks, look: Callable[[str, list[Row], int], list[Finding]]
) -> list[Finding]:
    """The findings of the first step that has some; ``look`` gets each rank's row of a step."""
    for step in range(len(ranks[0]["steps"])):
        found = look(case, [rank["steps"][step] for rank in ranks], step)
        if found:
            return found
    return []


def weights(case: str, ranks: list[Row], _step: int) -> list[Finding]:
    for row in ranks:
        sent = [c for c in row["calls"] if c["what"].startswith("param:")]
        if sent:
            name = sent[0]["what"].partition(":")[2]
            message = (
                f"line {sent[0]['line']} sends the parameter `{name}` itself: the hook's argument "
                "is the parameter; its gradient is `p.grad`"
            )
            return [Finding("weights-averaged", message, case)]
    return []


def waits(case: str, ranks: list[Row], step: int) -> list[Finding]:
    """Never waited for; written to while under way."""
    found = mistakes.not_waited(case, [row["calls"] for row in ranks])
    if found:
        return found
    for rank, row in enumerate(ranks):
        touched = [c for c in row["calls"] if c["touched"]]
        if touched and step > 0:
            return [
                _not_reset(case, step, f"It writes to {mistakes.described(touched[0])} too early")
            ]
        if touched:
            message = (
                f"on rank {rank} the tensor of {mistakes.described(touched[0])} was written to "
                "between its launch and its wait(): the sum was still coming in. Divide before the "
                "launch or after the wait"
            )
            return [Finding("touched-under-way", message, case)]
    return []


def every_microbatch(case: str, ranks: list[Row], _step: int) -> list[Finding]:
    for rank, row in enumerate(ranks):
        last = row["last"]
        early = [c for c in row["calls"] if c["mark"] in {f"micro {i}" for i in range(last)}]
        if early:
            message = (
                f"rank {rank} sends on {early[0]['mark'].replace('micro ', 'micro-batch ')} of "
                f"0–{last}: {len(early)} calls before the last one. Gradients add up by "
                "themselves; send once, on the last micro-batch (is_last)"
            )
            return [Finding("every-microbatch", message, case)]
    return []


def overlap(case: str, ranks: list[Row], step: int) -> list[Finding]:
    """Launched by hooks, in time, and not waited for there."""
    for rank, row in enumerate(ranks):
        calls = row["calls"]
        late = [c for c in calls if not c["in_backward"]]
        if late:
            message = (
                f"in step {step} rank {rank} launched {len(late)} of {len(calls)} calls after "
                f"backward ({mistakes.described(late[0])}): nothing is left to overlap with. "
                "Launch them from the gradients' hooks"
            )
            return [Finding("after-backward", message, case)]
        blocking = [c for c in calls if not c["is_async"]]
        in_hook = blocking or [calls[i] for i in waited_in_backward(row["events"])]
        if in_hook:
            how = "a blocking" if blocking else "an asynchronous"
            tail = (
                ": async_op=True" if blocking else ", which was waited for at once: keep the handle"
            )
            message = (
                f"rank {rank} waits inside backward, {len(in_hook)} times: {how} "
                f"{mistakes.described(in_hook[0])}{tail}, and wait in finish()"
            )
            return [Finding("waited-in-backward", message, case)]
    return []


def waited_in_backward(events: Sequence[Sequence[Any]]) -> list[int]:
    """The calls that were waited for before finish() began."""
    found = []
    for kind, value in events:
        if (kind, value) == ("mark", "finish"):
            break
        if kind == "wait":
            found.append(value)
    return found


def gradients(case: str, ranks: list[Row], step: int) -> list[Finding]:
    """Against one process. What is right in the first step and wrong later was not set back."""
    found = mistakes.gradients(case, ranks)
    return [_not_reset(case, step, found[0].message)] if found and step > 0 else found


def _not_reset(case: str, step: int, what: str) -> Finding:
    text = (
        f"the first step is right, step {step} is not: what the last step left (handles, counters, "
        f"sums) was not cleared in finish(). {what}"
    )
    return Finding("not-reset", text, case)
