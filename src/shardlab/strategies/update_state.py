"""What a checkpoint holds of an update: its steps, the loss scale, what the optimizer counts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardlab.optim import optimizers
from shardlab.strategies.update import Update


def state_of(update: Update) -> dict[str, Any]:
    state = {"steps": update.steps, "scale": update.scale, "good_steps": update.good_steps}
    counters = [  # numbers in a group that step() changes; the rate is the schedule's
        {
            key: value
            for key, value in group.items()
            if type(value) in (int, float) and key != "lr" and value != before.get(key)
        }
        for group, before in zip(update.inner.param_groups, update.begun_with, strict=True)
    ]
    return {**state, "groups": counters} if any(counters) else state


def put_back(update: Update, state: dict[str, Any]) -> None:
    """Last, when the optimizer's own state is in place."""
    update.is_resumed = True
    update.steps, update.scale = state["steps"], state["scale"]
    update.good_steps = state["good_steps"]
    inner = update.inner
    optimizers.resumed(inner, update.steps)
    for optimizer in (inner, update.optimizer):  # ZeRO-1's outer one tells the inner
        for group, values in zip(optimizer.param_groups, state.get("groups", ()), strict=False):
            group.update(values)
    for held in inner.state.values():
        # A fused optimizer counts on the GPU, the others do on the CPU.
        if isinstance(held.get("step"), Tensor):
            where = update.device if inner.defaults.get("fused") else torch.device("cpu")
            held["step"] = held["step"].to(where)
