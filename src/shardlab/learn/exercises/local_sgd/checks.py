"""Local SGD: what one process holds that plays the workers, and nothing sent in between."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shardlab.learn import workers
from shardlab.learn.exercise import Case, Stage
from shardlab.learn.workers import Memory, Play, keep, sum_of

CASES = (
    Case("AdamW, every 3 steps", 2, {"toy": "frozen", "kind": "adamw", "every": 3}),
    Case("SGD, every 2 steps", 2, {"toy": "plain", "kind": "sgd", "every": 2}),
    Case("unequal batches", 2, {"toy": "plain", "kind": "adamw", "every": 3, "ragged": True}),
    Case("three ranks", 3, {"toy": "tied", "kind": "adamw", "every": 2, "ragged": True}),
    Case("every step", 2, {"toy": "plain", "kind": "sgd", "every": 1, "ragged": True}),
)


def _summed(_memory: Memory, params: list[Tensor], _shares: list[float]) -> list[Tensor]:
    return [sum_of(params)] * len(params)


def _copied(_memory: Memory, params: list[Tensor], _shares: list[float]) -> list[Tensor]:
    return [params[0]] * len(params)


# Each mistake under the message that names it. The first that fits is reported.
WRONG = {
    "never-averaged": Play(keep),
    "averaged-each-step": Play(each_step=True),
    "parameters-summed": Play(_summed),
    "copied-from-rank-0": Play(_copied),
    "gradients-averaged": Play(keep, averages_gradients=True),
    "wrong-step/early": Play(first=1),
    "exchanged-first": Play(exchanges_first=True),
    "unweighted": Play(samples="equal"),
    "weights-not-reset": Play(samples="all"),
    "weights-of-the-last-step": Play(samples="last"),
    "not-reset/inner": Play(keeps_gradients=True),
    "state-lost/inner": Play(forgets_state=True),
    "state-averaged": Play(averages_state=True),
}


def run(at: Stage) -> dict[str, Any]:
    def make(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        return at.submission.LocalSGD(model, optimizer, at.options["every"])

    return workers.run(at, make, lambda local, samples: local.step(samples), Play(), WRONG)


judge = workers.judging_exchange("average of the workers")
