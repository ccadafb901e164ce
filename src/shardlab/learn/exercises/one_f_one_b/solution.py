"""1F1B. In the package: strategies/pipeline/schedules.py has this schedule and others, pure as
here."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn


def schedule(rank: int, ranks: int, micro: int) -> list[tuple[str, int]]:
    ahead = min(ranks - rank - 1, micro)  # as many as there are stages behind this one
    actions = [("F", i) for i in range(ahead)]
    for i in range(micro - ahead):
        actions += [("F", ahead + i), ("B", i)]
    return actions + [("B", i) for i in range(micro - ahead, micro)]


def train_step(
    stage: nn.Module,
    actions: Sequence[tuple[str, int]],
    batches: Sequence[tuple[Tensor, Tensor]],
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    total: int,
    link: Any,
) -> None:
    under_way: dict[int, tuple[Tensor, Tensor]] = {}
    for kind, micro in actions:
        if kind == "F":
            x, y = batches[micro]
            if not link.is_first:
                x = link.recv_forward().requires_grad_()
            output = stage(x)
            if link.is_last:
                output = loss_fn(output, y) / total
            else:
                link.send_forward(output)
            under_way[micro] = x, output
        else:
            x, output = under_way.pop(micro)
            output.backward(None if link.is_last else link.recv_backward())
            if not link.is_first:
                link.send_backward(x.grad)
