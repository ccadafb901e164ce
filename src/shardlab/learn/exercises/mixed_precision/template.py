"""Mixed precision with loss scaling, on several ranks.

The contract. The grader has initialised the process group. On every rank it builds the same fp32
model and an optimizer over its parameters, then

    update = ScaledUpdate(model, optimizer, scale=65536.0, growth_interval=3, clip_norm=1.0)
    for batch in batches:                        # another batch on every rank
        with torch.autocast("cpu", torch.float16):
            loss = ...                           # (), float32: the mean over this rank's samples
        updated = update.step(loss)              # True: stepped; False: skipped
        update.scale                             # what the next loss will be multiplied by

``step`` does everything from backward to the optimizer. Gradients of an earlier step may still be
in ``.grad``. Some parameters have no gradient: frozen, or not used.

Check it: shardlab learn check mixed_precision
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn


class ScaledUpdate:
    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scale: float,
        growth_interval: int,
        clip_norm: float,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.scale = scale
        self.growth_interval = growth_interval
        self.clip_norm = clip_norm
        # TODO: what must be remembered from step to step?

    def step(self, loss: Tensor) -> bool:
        # TODO 1: no gradients of the last step; then backward, on the scaled loss.
        # TODO 2: the mean gradient over all ranks: dist.all_reduce, dist.get_world_size().
        # TODO 3: unscale.
        # TODO 4: not finite? Skip, with all the others; the scale is halved.
        # TODO 5: clip to self.clip_norm, step the optimizer; does the scale grow?
        raise NotImplementedError("ScaledUpdate.step is still to be written")
