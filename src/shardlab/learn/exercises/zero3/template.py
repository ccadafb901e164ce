"""Exercise: ZeRO-3. Parameters too are kept only for one's own n-th, and gathered for use.

The contract. Every rank has the same model, an nn.Sequential of blocks, and its own data:

    zero = Zero3(model, make_optimizer)                            # once
    for microbatches in steps:
        for x, y in microbatches:
            (mse_loss(zero.forward(x), y) / len(microbatches)).backward()
        zero.step()
    zero.full_params()                                             # {"0.weight": whole tensor, …}

- Between steps a rank holds one n-th of each block's parameters, of their gradients and of the
  optimizer's state, and nothing else of that size.
- forward(x) runs the blocks in order. Before a block: gather its parameters. After it: free them.
- In backward, before a block: gather its parameters again. After it: reduce-scatter its gradients
  to the shares (the mean; micro-batches add up), free its parameters and its gradients.
- Never alive together: more than two blocks' full parameters, nor more than two blocks' full
  gradients (and a message's buffer).
- make_optimizer(tensors) gives an optimizer over these tensors: call it once, in __init__, with
  this rank's shares. It may be SGD or AdamW; both work element by element. step() updates the
  shares: nothing is sent.
- full_params() gives copies of all parameters, whole, by the names of model.named_parameters();
  all ranks call it.
- Sent per rank and micro-batch: at most 3Ψ(n-1)/n bytes. (Ψ: bytes of parameters.)
- n does not divide the blocks' sizes; one block has no parameters. All parameters train, no
  parameter is shared by two blocks, and forward is always followed by backward.

Freeing: autograd keeps what it saved for backward alive, and that includes views of the
parameters. p.data = torch.empty(0) therefore frees nothing. What frees is to let all of a block's
parameters be views of one flat tensor, and to shrink its storage:

    flat.untyped_storage().resize_(0)          # free
    flat.untyped_storage().resize_(nbytes)     # there again, with garbage in it: gather into it

Also allowed: to compute the block again in backward (a torch.autograd.Function), which saves
nothing of the parameters in forward.

Check with:  shardlab learn check zero3
"""

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer


class Zero3:
    def __init__(
        self, model: nn.Sequential, make_optimizer: Callable[[list[Tensor]], Optimizer]
    ) -> None:
        self.model = model
        # TODO 1: for each block: its parameters in one flat tensor; keep this rank's share; free.
        # TODO 2: the optimizer over the shares.
        # TODO 3: a hook on each parameter: when a block's last gradient is there, reduce-scatter.

    def forward(self, x: Tensor) -> Tensor:
        # TODO 4: block by block: gather, run, free; and see to it that backward gathers again
        #         before it comes to the block: output.register_hook(f) calls f just then.
        raise NotImplementedError("TODO 4: forward()")

    def step(self) -> None:
        # TODO 5: update the shares, forget their gradients.
        raise NotImplementedError("TODO 5: step()")

    def full_params(self) -> dict[str, Tensor]:
        # TODO 6: gather everything, copy, free.
        raise NotImplementedError("TODO 6: full_params()")
