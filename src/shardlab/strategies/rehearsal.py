"""Does a model that ranks share still compute what it did as a whole? One sample tells.

What a workload says of its model may be wrong: code in a block that mixes positions which it should
treat by themselves changes the result, and nothing else would show it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from shardlab.errors import UsageError
from shardlab.strategies.stages import probing
from shardlab.workloads.base import Batch, LossFn

# How much the losses may differ, by the coarsest numbers that the forward computes with.
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}
LOW_PRECISION = 0.05


@dataclass(frozen=True)
class Rehearsal:
    sample: Batch
    trains: bool  # False: it draws random numbers while it trains, and is evaluated instead
    expected: float
    tolerance: float

    @classmethod
    def of(cls, model: nn.Module, loss: LossFn, sample: Batch) -> Rehearsal | None:
        """The loss of the whole model. None: there is nothing to compare with. It always draws
        random numbers, is not finite, or cannot be run on one sample alone."""
        if any(isinstance(p, FakeTensor) for p in model.parameters()):
            return None
        dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}

        def note_precision(_module: nn.Module, _args: Any) -> None:
            device = next(model.parameters()).device.type
            if torch.is_autocast_enabled(device):
                dtypes.add(torch.get_autocast_dtype(device))

        def noted(model: nn.Module, batch: Batch) -> Tensor:
            value = loss(model, batch)
            dtypes.add(value.dtype)  # transformers' own is float32, whatever the model is
            return value

        hook = model.register_forward_pre_hook(note_precision)
        try:
            for trains in (True, False):
                first, again = (_run(model, noted, sample, trains, chance) for chance in (1, 2))
                tolerance = max(TOLERANCE.get(dtype, LOW_PRECISION) for dtype in dtypes)
                if _are_close(first, again, tolerance):
                    return cls(sample, trains, first, tolerance)
        except (RuntimeError, ValueError, IndexError):
            return None
        finally:
            hook.remove()
        return None

    def hold(self, run: Callable[[], float], what: str, hint: str) -> None:
        """Refuse a model that ranks share now, if ``run()`` fails or gives another loss."""
        try:
            found = run()
        except (RuntimeError, ValueError, IndexError) as error:
            raise UsageError(
                f"{what}: the forward of one sample fails in the ranks' parts of the model, and "
                f"did not in the whole: {str(error).splitlines()[0]} ({hint})"
            ) from error
        if not _are_close(found, self.expected, self.tolerance):
            raise UsageError(
                f"{what}: for one sample the ranks together compute the loss {found:.6g}, and one "
                f"process {self.expected:.6g} ({hint})"
            )

    def again(self, model: nn.Module, loss: LossFn, sample: Batch) -> float:
        """The loss of a model that was cut, for the sample or a part of it."""
        return _run(model, loss, sample, self.trains, 1)


def _are_close(one: float, other: float, tolerance: float) -> bool:
    return abs(one - other) <= tolerance * max(abs(other), 1.0)  # not if one is no number


def _run(model: nn.Module, loss: LossFn, sample: Batch, trains: bool, chance: int) -> float:
    """The loss of one sample. Nothing of the model is changed."""
    modes = {module: module.training for module in model.modules()}
    with probing(model), torch.no_grad():
        torch.manual_seed(chance)
        try:
            if not trains:
                model.eval()
            return float(loss(model, sample))
        finally:
            for module, mode in modes.items():
                module.training = mode
