"""Exercise: local SGD. Each rank trains by itself, and every few steps all average.

The contract. Every rank has the same model at the beginning and its own data. The grader does:

    local = LocalSGD(model, optimizer, every)        # once
    for x, y in batches:
        mse_loss(model(x), y).backward()             # p.grad: this rank's own
        local.step(len(x))

- step(samples) updates the parameters with this rank's own gradients, by the optimizer, and leaves
  every p.grad None. ``samples`` is the size of this rank's batch; ranks and steps differ.
- After every ``every``-th step all ranks hold the same parameters, in the same tensors: the mean of
  theirs, in which a rank weighs as much as the samples that it has taken since the last mean.
- The optimizer's state stays this rank's own. Parameters that do not train are left alone.
- Nothing is sent in the other steps (a number or two is fine), and at most 2Ψ(n-1)/n bytes for a
  mean.

You need: dist.all_reduce, which sums in place.

Check with:  shardlab learn check local_sgd
"""

import torch
import torch.distributed as dist
from torch import nn


class LocalSGD:
    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, every: int) -> None:
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = optimizer
        self.every = every

    def step(self, samples: int) -> None:
        # TODO 1: update, with this rank's own gradients.
        # TODO 2: every few steps: this rank's share of the samples since the last mean.
        # TODO 3: the mean of all ranks' parameters, by these shares.
        raise NotImplementedError("TODO 1: step()")
