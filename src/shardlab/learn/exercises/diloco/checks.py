"""DiLoCo: the outer step on the averaged difference, as one process that plays the workers."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from shardlab.learn import workers
from shardlab.learn.exercise import Case, Evidence, Finding, Stage
from shardlab.learn.workers import Memory, Play, sum_of

CASES = (
    Case("AdamW inside, every 3 steps", 2, {"toy": "frozen", "kind": "adamw", "every": 3}),
    Case("SGD inside, every 2 steps", 2, {"toy": "plain", "kind": "sgd", "every": 2}),
    Case("three ranks, tied weights", 3, {"toy": "tied", "kind": "adamw", "every": 2}),
    Case("every step", 2, {"toy": "plain", "kind": "adamw", "every": 1}),
)
OUTER_LR, OUTER_MOMENTUM = 0.7, 0.9


def outer(
    memory: Memory, params: list[Tensor], _shares: list[float], mistake: str = ""
) -> list[Tensor]:
    """SGD with Nesterov momentum on the mean difference, or the same with a mistake in it."""
    anchor, n = memory["anchor"], len(params)
    own = mistake == "differences-not-averaged"
    mean = sum_of(params) / n
    differences = [anchor - p for p in params] if own else [anchor - mean]
    if own and n > 1:
        anchors = memory.setdefault("anchors", [anchor] * n)
        differences = [a - p for a, p in zip(anchors, params, strict=True)]
    if mistake == "differences-summed":
        differences = [n * differences[0]]
    if mistake == "wrong-sign":
        differences = [-differences[0]]
    blank = [torch.zeros_like(anchor)] * len(differences)
    before = memory.get("momentum", blank)
    if mistake == "outer-state-lost":
        before = blank
    fresh = (1 - OUTER_MOMENTUM) if mistake == "momentum-damped" else 1.0
    momentum = [OUTER_MOMENTUM * m + fresh * d for m, d in zip(before, differences, strict=True)]
    memory["momentum"] = momentum
    steps = [d + OUTER_MOMENTUM * m for d, m in zip(differences, momentum, strict=True)]
    if mistake == "not-nesterov":
        steps = momentum
    if mistake == "no-momentum":
        steps = differences
    rate = 1.0 if mistake == "outer-rate-ignored" else OUTER_LR
    if own and n > 1:
        memory["anchors"] = [a - rate * s for a, s in zip(memory["anchors"], steps, strict=True)]
        return list(memory["anchors"])
    moved = anchor - rate * steps[0]
    if mistake == "anchor-is-the-average":
        memory["anchor"] = mean
    elif mistake != "anchor-not-moved":
        memory["anchor"] = moved
    return [moved] * n


def _averaged(_memory: Memory, params: list[Tensor], _shares: list[float]) -> list[Tensor]:
    return [sum_of(params) / len(params)] * len(params)


def _kept(_memory: Memory, params: list[Tensor], _shares: list[float]) -> list[Tensor]:
    return params


IN_THE_OUTER_STEP = (
    "differences-not-averaged", "differences-summed", "wrong-sign", "outer-state-lost",
    "momentum-damped", "not-nesterov", "no-momentum", "outer-rate-ignored",
    "anchor-is-the-average", "anchor-not-moved",
)  # fmt: skip
# By the message that names the mistake. The first that fits is said.
WRONG = {
    "never-exchanged": Play(_kept),
    "no-outer-step": Play(_averaged),
    **{key: Play(functools.partial(outer, mistake=key)) for key in IN_THE_OUTER_STEP},
    "averaged-each-step/outer": Play(outer, each_step=True),
    "wrong-step/early": Play(outer, first=1),
    "exchanged-first": Play(outer, exchanges_first=True),
    "gradients-averaged/too": Play(outer, averages_gradients=True),
    "not-reset/inner": Play(outer, keeps_gradients=True),
    "state-lost/inner": Play(outer, forgets_state=True),
}


def run(at: Stage) -> dict[str, Any]:
    def make(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        return at.submission.DiLoCo(model, optimizer, at.options["every"], OUTER_LR, OUTER_MOMENTUM)

    return workers.run(at, make, lambda diloco, _samples: diloco.step(), Play(outer), WRONG)


def judge(evidence: Evidence) -> list[Finding]:
    return workers.judge(evidence, "outer step")
