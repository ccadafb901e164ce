"""Functions that run after each update on this rank's parameters, such as the moving average."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardlab.errors import UsageError
from shardlab.workloads.base import AfterStep
from shardlab.workloads.user_errors import blame

KEPT = "after."  # the optimizer's state has the tensors of after_step under such keys
AVERAGE = f"{KEPT}ema"  # the key of the moving average that training.ema_decay asks for


class AfterStepHooks:
    """Calls ``after_step`` when the optimizer has stepped, and keeps its tensors in the state.

    So checkpoints have them, and they move with their parameter. During step() they are taken out,
    because most optimizers make their own state only if there is none.
    """

    def __init__(self, functions: Sequence[AfterStep]) -> None:
        self.functions = functions
        self.names: dict[nn.Parameter, str] = {}  # of what this rank updates
        self.steps = 0
        self.kept: dict[str, dict[str, Tensor]] = {}

    def take_out(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        self.kept = {name: {} for name in self.names.values()}
        for p, name in self.names.items():
            state = optimizer.state.get(p, {})
            for key in [key for key in state if key.startswith(KEPT)]:
                self.kept[name][key.removeprefix(KEPT)] = state.pop(key)
            if not state:
                optimizer.state.pop(p, None)

    @torch.no_grad()
    def call(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        parts = {name: p.detach() for p, name in self.names.items()}
        with blame("the workload", "after_step"):
            for function in self.functions:
                function(self.steps, parts, self.kept)
        self.steps += 1
        for p, name in self.names.items():
            for key, value in self.kept[name].items():
                if not isinstance(value, Tensor) or value.shape != p.shape:
                    raise UsageError(
                        f"after_step keeps '{key}' of '{name}', which is no tensor of the shape "
                        "that it was given for that parameter"
                    )
                optimizer.state[p][KEPT + key] = value
        self.kept = {}


def moving_average(decay: float) -> AfterStep:
    """``decay`` times the average plus the rest times the new parameters, from the first on."""

    def average(
        _step: int, parts: Mapping[str, Tensor], kept: Mapping[str, dict[str, Tensor]]
    ) -> None:
        for name, part in parts.items():
            if "ema" in kept[name]:
                kept[name]["ema"].lerp_(part, 1 - decay)
            else:
                kept[name]["ema"] = part.clone()

    return average


@torch.no_grad()
def exchange_averages(optimizer: Optimizer) -> None:
    """Swap this rank's parameters with their moving average; a second call swaps them back.

    Before the first update there is no average, and nothing changes.
    """
    for p, state in optimizer.state.items():
        if AVERAGE in state:
            parameters = p.detach().clone()
            p.copy_(state[AVERAGE])
            state[AVERAGE].copy_(parameters)
