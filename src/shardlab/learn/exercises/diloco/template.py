"""Exercise: DiLoCo, and local SGD in it. Workers train separately and exchange every few steps.

The contract. Every rank has the same model at the beginning and its own data. The grader does:

    diloco = DiLoCo(model, optimizer, every, outer_lr, outer_momentum)     # once
    for x, y in batches:
        mse_loss(model(x), y).backward()                                   # p.grad: this rank's own
        diloco.step(len(x))

- step(samples) updates the parameters with this rank's own gradients, by the inner optimizer, and
  leaves every p.grad None. ``samples`` is the size of this rank's batch; ranks and steps differ.
- The anchor is what all ranks held after the last exchange; at the beginning, the parameters.
  After every ``every``-th step the mean over the ranks of (anchor - parameters) is the gradient of
  an outer SGD with Nesterov momentum, as torch.optim.SGD(lr=outer_lr, momentum=outer_momentum,
  nesterov=True) does it. It moves the anchor, and every rank continues from there, in the same
  tensors.
- In this mean a rank weighs as much as the samples that it has taken since the last exchange. With
  outer_lr=1 and outer_momentum=0 all continue from the mean of their parameters: local SGD.
- Both optimizers keep their state, and the inner one's stays this rank's own. Parameters that do
  not train are left alone.
- Nothing is sent in the other steps (a number or two is fine), and at most 2Ψ(n-1)/n bytes in an
  exchange.

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

    def step(self, samples: int) -> None:
        # TODO 2: update, with this rank's own gradients.
        # TODO 3: every few steps: this rank's share of the samples, and by these shares the mean
        # difference from the anchor. (The anchor minus this is local SGD: begin with it.)
        # TODO 4: the outer step; every worker continues from the anchor.
        raise NotImplementedError("TODO 2: step()")
