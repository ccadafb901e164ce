"""ZeRO-2: one process's update, with no more full gradients alive than a parameter or two."""

from __future__ import annotations

from typing import Any

from shardlab.learn import mistakes_sharded, toys
from shardlab.learn.exercise import Case, Finding, Rows, Stage, say

CASES = (
    Case("SGD", 2, {"kind": "sgd", "micros": 1}),
    Case("SGD, three micro-batches", 2, {"kind": "sgd", "micros": 3}),
    Case("AdamW, three ranks", 3, {"kind": "adamw", "micros": 2}),
    Case("memory", 2),
)
STEPS = 2
DEPTH = 14  # layers of the model that is weighed


def run(at: Stage) -> dict[str, Any]:
    make = at.submission.Zero2
    if at.case.name == "memory":
        return toys.weigh(at, DEPTH, make)
    return toys.train_sharded(at, "odd", STEPS, make, drops=True)


def memory(ranks: Rows) -> Finding | None:
    """This rank's share, four of the largest parameter, and one more for the activations."""
    for r, rank in enumerate(ranks):
        psi, largest, share = rank["psi"], rank["block"], rank["psi"] / len(ranks)
        if rank["after"] > share + 4 * largest:
            return say("gradients-kept/after", rank=r, after=rank["after"], share=share, psi=psi)
        between = psi + 3 * share  # parameters; this rank's share, and AdamW's state of it
        if rank["idle"] > between + 4 * largest:
            return say("gradients-kept/idle", rank=r, idle=rank["idle"], between=between)
        if rank["backward"] > share + 5 * largest:
            return say(
                "gradients-kept/peak", rank=r, backward=rank["backward"], psi=psi,
                allowed=share + 4 * largest,
            )  # fmt: skip
    return None


judge = mistakes_sharded.judging_sharded(lambda k: k + 1, "(k+1)Ψ(n-1)/n with k = {k}", memory)
