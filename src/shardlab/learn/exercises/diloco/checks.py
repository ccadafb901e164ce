"""DiLoCo: the outer step on the averaged difference, as one process that plays the workers."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from shardlab.learn import workers
from shardlab.learn.exercise import Case, Stage
from shardlab.learn.workers import Memory, Play, keep, sum_of

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
    n = len(params)
    averages = [sum_of(params) / n] * n
    anchors = memory.get("anchors", [memory["anchor"]] * n)
    ends = params if mistake == "differences-not-averaged" else averages
    factor = {"differences-summed": n, "wrong-sign": -1}.get(mistake, 1)
    differences = [factor * (a - end) for a, end in zip(anchors, ends, strict=True)]
    before = [torch.zeros_like(anchors[0])] * n
    if mistake != "outer-state-lost":
        before = memory.get("momentum", before)
    fresh = (1 - OUTER_MOMENTUM) if mistake == "momentum-damped" else 1.0
    momentum = [OUTER_MOMENTUM * m + fresh * d for m, d in zip(before, differences, strict=True)]
    memory["momentum"] = momentum
    steps = [d + OUTER_MOMENTUM * m for d, m in zip(differences, momentum, strict=True)]
    steps = {"not-nesterov": momentum, "no-momentum": differences}.get(mistake, steps)
    rate = 1.0 if mistake == "outer-rate-ignored" else OUTER_LR
    moved = [a - rate * step for a, step in zip(anchors, steps, strict=True)]
    kept = {"anchor-is-the-average": averages, "anchor-not-moved": anchors}
    memory["anchors"] = kept.get(mistake, moved)
    return moved


IN_THE_OUTER_STEP = (
    "differences-not-averaged", "differences-summed", "wrong-sign", "outer-state-lost",
    "momentum-damped", "not-nesterov", "no-momentum", "outer-rate-ignored",
    "anchor-is-the-average", "anchor-not-moved",
)  # fmt: skip
# Each mistake under the message that names it. The first that fits is reported.
WRONG = {
    "never-exchanged": Play(keep),
    "no-outer-step": Play(),
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


judge = workers.judging_exchange("outer step")
