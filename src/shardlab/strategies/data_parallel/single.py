"""Rung 0. The reference: one process, no communication."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from shardlab.errors import UsageError
from shardlab.strategies import base, steps
from shardlab.workloads.base import Batch


class Single(base.Strategy):
    """One plain process: what every other strategy must equal.

    Schedule of a step: forward and backward of each micro-batch, then the update. Nothing
    is communicated.
    """

    def __init__(self, setup: base.Setup) -> None:
        if setup.mesh.size() != 1:
            raise UsageError(
                f"strategy 'single' is one process, this world has {setup.mesh.size()}"
            )
        super().__init__(setup)

    def gradients(self, microbatches: Sequence[Batch]) -> Tensor:
        total = steps.local_count(microbatches, self.device).clamp_(min=1.0)  # as of many ranks
        divisor = self.update.divisor(total)
        return steps.accumulate(self.model, self.loss_fn, microbatches, divisor) / total
