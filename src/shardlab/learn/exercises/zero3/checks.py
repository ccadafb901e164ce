"""ZeRO-3: one process's update, with no more than a block or two of the model alive on any rank."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from torch import Tensor

from shardlab.learn import mistakes_sharded, toys
from shardlab.learn.exercise import Case, Evidence, Finding, Rejected, say
from shardlab.learn.mistakes import Rows
from shardlab.learn.spy import Spy

CASES = (
    Case("SGD", 2, {"kind": "sgd", "micros": 1}),
    Case("SGD, two micro-batches", 2, {"kind": "sgd", "micros": 2}),
    Case("AdamW, three ranks", 3, {"kind": "adamw", "micros": 1}),
    Case("memory", 2),
)
STEPS = 2
BLOCKS = 16  # of the model that is weighed


def run(case: Case, rank: int, submission: ModuleType, spy: Spy) -> dict[str, Any]:
    if case.name == "memory":
        return toys.weigh(submission.Zero3, BLOCKS, rank, spy)
    kind = case.options["kind"]
    model = toys.build(toys.blocks)
    one, factory = toys.OneProcess(model, kind), toys.Factory(kind)
    zero = submission.Zero3(model, factory)
    return toys.train_sharded(
        zero, model, one, factory, spy, rank, case.world, [case.options["micros"]] * STEPS,
        drops=True, forward=zero.forward, params=lambda: whole(zero),
    )  # fmt: skip


def whole(zero: Any) -> dict[str, Tensor]:
    params = zero.full_params()
    if not isinstance(params, dict) or not all(isinstance(v, Tensor) for v in params.values()):
        raise Rejected(say("wrong-type/zero3"))
    if any(v.numel() and not v.untyped_storage().nbytes() for v in params.values()):
        raise Rejected(say("freed-too-early"))  # to read them would end the process
    return {name: value.detach().clone() for name, value in params.items()}


def judge(evidence: Evidence) -> list[Finding]:
    formula = "3kΨ(n-1)/n with k = {k}"
    return mistakes_sharded.judge(evidence, lambda k: 3 * k, formula, memory)


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
