"""Exercise: ZeRO-2. Gradients too are kept only for one's own n-th.

The contract. Every rank has the same model (equal parameters) and its own data. The grader does:

    zero = Zero2(model, make_optimizer)                            # once
    for microbatches in steps:
        for x, y in microbatches:
            (mse_loss(model(x), y) / len(microbatches)).backward()
        zero.step()

- As soon as a parameter's gradient is complete, in backward, it is reduce-scattered: each rank
  keeps its share of the mean, adds it to what earlier micro-batches gave, and drops the full
  gradient (p.grad = None). After any backward, p.grad is None for all parameters.
- step() updates this rank's share with the optimizer, and gathers the new parameters: all ranks
  have the same, in the same tensors (write into p.data).
- make_optimizer(tensors) gives an optimizer over these tensors: call it once, in __init__, with
  this rank's shares. It may be SGD or AdamW; both work element by element.
- Never alive together: more full gradients than four of the largest parameter's, beside this
  rank's share. The optimizer's state: as in ZeRO-1.
- Sent per rank and step, with k micro-batches: (k+1)Ψ(n-1)/n bytes. (Ψ: bytes of parameters.)
- Sizes that n does not divide occur; so does a frozen parameter. Every parameter that trains gets
  a gradient in every micro-batch, on every rank.

You need: p.register_post_accumulate_grad_hook(f); torch.nn.functional.pad, chunk;
dist.reduce_scatter(mine, list_of_parts); dist.all_gather(list_of_parts, mine).

Check with:  shardlab learn check zero2
"""

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer


class Zero2:
    def __init__(
        self, model: nn.Module, make_optimizer: Callable[[list[Tensor]], Optimizer]
    ) -> None:
        # TODO 1: this rank's share of each parameter that trains; the optimizer over these shares.
        # TODO 2: a hook on each parameter that trains.
        pass

    # TODO 3: in the hook: reduce-scatter p.grad, add the mean to the share's gradient, drop p.grad.

    def step(self) -> None:
        # TODO 4: update the shares, forget their gradients, gather the parameters.
        raise NotImplementedError("TODO 4: step()")
