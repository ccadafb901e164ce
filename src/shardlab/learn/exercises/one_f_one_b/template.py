"""Exercise: a pipeline with the schedule 1F1B.

The contract. The layers are cut into ``ranks`` stages, rank r has stage r. Every rank has every
micro-batch (x, y): the first stage uses x, the last y. The grader does on every rank:

    actions = schedule(rank, ranks, len(batches))
    train_step(stage, actions, batches, loss_fn, total, link)     # once or several times per update

- schedule(rank, ranks, micro) gives this rank's actions in order: ("F", i) is the forward of
  micro-batch i, ("B", i) its backward. Each comes once, and no rank waits for ever. With equal
  stages the step takes no longer than micro + ranks - 1 forwards and backwards. Rank r keeps at
  most ranks - r activations at a time: a forward keeps one until its backward is done.
- train_step carries out the actions in their order. It *adds* to each p.grad of the stage the
  gradient of the sum of the losses of its micro-batches, divided by ``total``: the number of
  targets of the whole update, over all calls. loss_fn(output, y) gives the sum over the targets of
  a micro-batch. Micro-batches differ in size.
- link.is_first, link.is_last: which stage this is.
  link.send_forward(output) and link.recv_forward() send activations to the next stage and receive
  those of the one before; link.send_backward(gradient) and link.recv_backward() go the other way.
  Sending does not wait, receiving does. What is received is a new tensor without a graph.

You need: x.requires_grad_(), so that what was received gets a gradient; output.backward(gradient).

Check with:  shardlab learn check one_f_one_b
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn


def schedule(rank: int, ranks: int, micro: int) -> list[tuple[str, int]]:
    # TODO 1: some forwards ahead, then one forward and one backward in turn, then the rest.
    raise NotImplementedError("TODO 1: schedule()")


def train_step(
    stage: nn.Module,
    actions: Sequence[tuple[str, int]],
    batches: Sequence[tuple[Tensor, Tensor]],
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    total: int,
    link: Any,
) -> None:
    # TODO 2: carry out the actions.
    raise NotImplementedError("TODO 2: train_step()")
