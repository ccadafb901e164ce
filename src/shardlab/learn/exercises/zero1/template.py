"""Exercise: ZeRO-1. Every rank keeps the optimizer's state of one n-th of the parameters.

The contract. Every rank has the same parameters and its own data. The grader does:

    zero = Zero1(model.parameters(), make_optimizer, max_norm)     # once
    for x, y in batches:
        mse_loss(model(x), y).backward()                           # p.grad: this rank's own
        zero.step()

- step() does what one process would do with the mean of all ranks' gradients: clip it to max_norm
  if that is not None, as torch.nn.utils.clip_grad_norm_ does (the norm is that of the whole mean
  gradient), and update. After it, all ranks have the same new parameters, in the same tensors
  (write into p.data; the model must see them), and every p.grad is None.
- make_optimizer(tensors) gives an optimizer over these tensors: call it once, in __init__, with
  this rank's share of the parameters. It may be SGD or AdamW; both work element by element, so a
  share may be any piece of the parameters, laid end to end or not.
- No rank may hold more of the optimizer's state than Ψ/n parameters' worth, give or take one
  parameter and the padding. n does not divide the number of elements.
- Sent per rank and step: at most 3Ψ(n-1)/n bytes. (2Ψ(n-1)/n is possible. Ψ: bytes of parameters.)

You need: torch.cat, chunk, split, torch.nn.functional.pad; dist.reduce_scatter(mine, list_of_parts)
or dist.all_reduce; dist.all_gather(list_of_parts, mine).

Check with:  shardlab learn check zero1
"""

from collections.abc import Callable, Iterable

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer


class Zero1:
    def __init__(
        self,
        params: Iterable[nn.Parameter],
        make_optimizer: Callable[[list[Tensor]], Optimizer],
        max_norm: float | None = None,
    ) -> None:
        self.params = list(params)
        # TODO 1: which elements are this rank's share? Copy them, and build the optimizer on them.

    def step(self) -> None:
        # TODO 2: the mean gradient of this rank's share.
        # TODO 3: if max_norm is set: the norm of the whole mean gradient, from all ranks' shares.
        # TODO 4: update the share; gather everybody's; write them into the parameters.
        raise NotImplementedError("TODO 2: step()")
