"""Exercise: a complete small trainer, in one file.

The contract. ``train(...)`` is called on every rank of a run. A launcher such as torchrun has
started the processes and has set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; nothing else is
there. With n ranks:

- It sets up the process group (backend "gloo") from the environment, and ends it before it
  returns, also when an exception passes through.
- It calls torch.manual_seed(seed), then make_model() once. The ranks may get different models all
  the same: rank 0's counts. All ranks begin with its parameters and buffers.
- make_optimizer(parameters) is called once, with all parameters of the model.
- data = (x, y), tensors of as many samples. Epoch e (from 0) has the order
  torch.randperm(samples, generator=torch.Generator().manual_seed(seed + e)).
  A step takes the next ``batch`` samples of it; the last step of an epoch takes what is left.
- Rank r takes places r, r+n, r+2n … of a step's samples: sometimes one less than another rank,
  sometimes none. It computes them in micro-batches of at most ``micro`` samples.
- loss_fn(model, x, y) gives the sum of the losses over the targets that count, and their number
  (an int, and not that of the samples: some targets do not count).
- The gradient of a step is that of the mean over all targets that count, of all ranks and
  micro-batches. It is sent once per step. All ranks clip it to the norm max_norm, then update.
- After each step rank 0, and no other rank, calls log(step, loss): steps are counted on over the
  epochs, from 0; loss is a float, the mean over all targets of the step that count.
- It returns the model.

Check with:  shardlab learn check trainer
"""

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer


def train(
    make_model: Callable[[], nn.Module],
    make_optimizer: Callable[[Iterable[Tensor]], Optimizer],
    loss_fn: Callable[[nn.Module, Tensor, Tensor], tuple[Tensor, int]],
    data: tuple[Tensor, Tensor],
    *,
    epochs: int,
    batch: int,
    micro: int,
    max_norm: float,
    seed: int,
    log: Callable[[int, float], None],
) -> nn.Module:
    # TODO 1: set up the process group; whatever happens, end it.
    # TODO 2: seed, build the model, broadcast it from rank 0, build the optimizer.
    # TODO 3: for each epoch and step: this rank's samples.
    # TODO 4: accumulate gradients; all-reduce them, the loss and the count; divide by the count.
    # TODO 5: clip, update, log.
    raise NotImplementedError("TODO 1: train()")
