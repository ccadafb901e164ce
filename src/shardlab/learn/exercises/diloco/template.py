"""Exercise: DiLoCo's outer step.

The contract. Every rank has the same model at the beginning and its own data, batches of one size.
The grader does:

    diloco = DiLoCo(model, optimizer, every, outer_lr, outer_momentum)     # once
    for x, y in batches:
        mse_loss(model(x), y).backward()                                   # p.grad: this rank's own
        diloco.step()

- step() updates the parameters with this rank's own gradients, by the inner optimizer, and leaves
  every p.grad None.
- The anchor is what all ranks held after the last exchange; at the beginning, the parameters.
  After every ``every``-th step the mean over the ranks of (anchor - parameters) is the gradient of
  an outer SGD with Nesterov momentum, as torch.optim.SGD(lr=outer_lr, momentum=outer_momentum,
  nesterov=True) does it. It moves the anchor, and every rank continues from there, in the same
  tensors.
- Both optimizers keep their state. Parameters that do not train are left alone.
- Nothing is sent in the other steps, and at most 2Ψ(n-1)/n bytes in an exchange.

You need: dist.all_reduce, which sums in place.

Check with:  shardlab learn check diloco
"""

import torch
import torch.distributed as dist
from torch import nn


class DiLoCo:
    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        every: int,
        outer_lr: float,
        outer_momentum: float,
    ) -> None:
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = optimizer
        self.every = every
        # TODO 1: the anchor, and what moves it.

    def step(self) -> None:
        # TODO 2: update, with this rank's own gradients.
        # TODO 3: every few steps: the mean difference from the anchor.
        # TODO 4: the outer step; every worker continues from the anchor.
        raise NotImplementedError("TODO 2: step()")
