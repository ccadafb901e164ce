"""ZeRO-1: one process's update, with one n-th of the optimizer's state on each rank."""

from __future__ import annotations

from typing import Any

from torch import nn

from shardlab.learn import mistakes_sharded, toys
from shardlab.learn.exercise import Case, Stage

CASES = (
    Case("SGD", 2, {"kind": "sgd"}),
    Case("SGD, clipped", 2, {"kind": "sgd", "max_norm": 0.1}),
    Case("AdamW", 2, {"kind": "adamw"}),
    Case("AdamW, three ranks, clipped", 3, {"kind": "adamw", "max_norm": 0.1}),
)
STEPS = 3


def run(at: Stage) -> dict[str, Any]:
    def make(model: nn.Module, factory: toys.Factory) -> Any:
        params = iter(toys.parameters(model))  # as model.parameters() is: it can be read once
        return at.submission.Zero1(params, factory, at.options.get("max_norm"))

    return toys.train_sharded(at, "odd", STEPS, make, drops=False)


judge = mistakes_sharded.judging_sharded(lambda _k: 3, "3Ψ(n-1)/n")
