"""ZeRO-3: one process's update, with no more than a block or two of the model alive on any rank."""

from __future__ import annotations

from typing import Any

from shardlab.learn import mistakes_sharded, toys
from shardlab.learn.exercise import Case, Finding, Rows, Stage, say

CASES = (
    Case("SGD", 2, {"kind": "sgd", "micros": 1}),
    Case("SGD, two micro-batches", 2, {"kind": "sgd", "micros": 2}),
    Case("AdamW, three ranks", 3, {"kind": "adamw", "micros": 1}),
    Case("memory", 2),
)
STEPS = 2
BLOCKS = 16  # of the model that is weighed


def run(at: Stage) -> dict[str, Any]:
    make = at.submission.Zero3
    if at.case.name == "memory":
        return toys.weigh(at, BLOCKS, make)
    return toys.train_sharded(at, "blocks", STEPS, make, drops=True)


def memory(ranks: Rows) -> Finding | None:
    """Each limit has a block's room for the activations."""
    n = len(ranks)
    for r, rank in enumerate(ranks):
        block, share = rank["block"], rank["psi"] / n
        facts = {**rank, "rank": r, "n": n, "share": share}
        facts["whole"] = f"a block has {block}, the model {rank['psi']}"
        if rank["held"] > share + block:
            return say("not-sharded/zero3", **facts)
        if rank["between"] > 2 * block:
            return say("not-freed/forward", **facts)
        if rank["forward"] > 4 * block:
            return say("gathered-at-once", **facts)
        idle = rank["idle"] > 3 * share + 2 * block  # the share, and AdamW's state of it
        if idle and rank["params"] > 2 * block:
            return say("not-freed/idle", **facts)
        if idle or rank["after"] > share + block or rank["backward"] > share + 6 * block:
            return say("gradients-kept/zero3", **facts)
    return None


judge = mistakes_sharded.judging_sharded(lambda k: 3 * k, "3kΨ(n-1)/n with k = {k}", memory)
