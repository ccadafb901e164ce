"""Exercise: backward hooks. Let gradients travel while backward computes.

The contract. Every rank has the same model (equal parameters) and its own data. The grader does:

    ddp = AsyncDDP(model)                                   # once
    for microbatches in steps:
        for i, (x, y) in enumerate(microbatches):
            ddp.is_last = i == len(microbatches) - 1
            (mse_loss(model(x), y) / len(microbatches)).backward()
        ddp.finish()
        # here it looks at p.grad, then it updates and sets p.grad = None

- After finish(), p.grad of every parameter that trains is the mean of the ranks' gradients.
- Each gradient is all-reduced once per step, in the backward of the last micro-batch, with
  async_op=True, as soon as it is there. Nothing is waited for until finish().
- Some parameters are frozen (p.requires_grad is False): they have no gradient, and send nothing.
  One weight is tied (used by two layers): it is one parameter, with one gradient.
- Every parameter that trains gets a gradient in every micro-batch, on every rank.

You need: p.register_post_accumulate_grad_hook(f), which calls f(p) when p.grad is complete, and
dist.all_reduce(tensor, async_op=True), which returns at once; the sum is there after .wait().

Check with:  shardlab learn check hooks
"""

import torch.distributed as dist
from torch import nn


class AsyncDDP:
    def __init__(self, model: nn.Module) -> None:
        self.is_last = True  # the grader sets it before each forward
        # TODO 1: a hook on each parameter that trains.

    # TODO 2: in the hook, on the last micro-batch: start the all-reduce, keep what it returns.

    def finish(self) -> None:
        # TODO 3: wait for everything that is under way, and make each sum a mean.
        raise NotImplementedError("TODO 3: finish()")
