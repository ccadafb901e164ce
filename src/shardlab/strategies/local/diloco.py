"""Workers that train apart; an outer optimizer moves what they have in common."""

from __future__ import annotations

import torch
from torch import Tensor

from shardlab import comm
from shardlab.strategies import base, steps
from shardlab.strategies.local.workers import Workers


class DiLoCo(Workers):
    """Each rank takes ``every`` steps of its own; an outer optimizer moves what all start from.

    Schedule, for n ranks and Ψ bytes of parameters that train:

        at construction     broadcast parameters and buffers from rank 0; they are the anchor
        each step           forward and backward of this rank's micro-batches; meanwhile
                            all_reduce the loss with its number of targets  16 bytes
        step                update, from this rank's own gradients          nothing
        each every-th step  all_reduce anchor less parameters, times its share  Ψ
                            move the anchor, continue from it               nothing
                            broadcast buffers from rank 0 (if the model has any)

    Cost: Ψ / every in a step on average, all of it exposed, and 2Ψ of memory for the anchor and the
    outer momentum. The inner optimizer is the user's (AdamW in the paper, arXiv 2311.08105), and
    keeps its state over exchanges. The outer one is SGD with Nesterov momentum; the average of the
    differences is its gradient. A worker's share is that of the targets that it has seen since the
    last exchange. With ``outer_lr=1`` and ``outer_momentum=0`` this is ``local_sgd``.
    """

    def __init__(
        self,
        setup: base.Setup,
        *,
        every: int = 10,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
    ) -> None:
        super().__init__(setup, base.Rounds(every, outer_lr, outer_momentum))
        self.anchor = {name: p.detach().clone() for name, p in self.params.items()}
        self.momentum = {name: torch.zeros_like(p) for name, p in self.anchor.items()}

    @torch.no_grad()
    def exchange(self) -> None:
        share, under_way = self.share(self.seen), {}
        for name, p in self.params.items():
            p.copy_((self.anchor[name] - p) * share)  # the parameter's memory is free until the end
            label = f"difference of param {name}"
            under_way[name] = comm.all_reduce(p.data, self.group, label=label, async_op=True)
        for name, pending in under_way.items():
            pending.wait()
            self._move(name, self.params[name])
        steps.broadcast_buffers(self.model, self.group)

    def _move(self, name: str, outer_gradient: Tensor) -> None:
        """The outer step of one parameter, which holds its outer gradient and then the anchor."""
        anchor, momentum = self.anchor[name], self.momentum[name]
        momentum.mul_(self.rounds.outer_momentum).add_(outer_gradient)
        nesterov = outer_gradient + self.rounds.outer_momentum * momentum
        anchor.sub_(nesterov, alpha=self.rounds.outer_lr)
        outer_gradient.copy_(anchor)

    def extra_state(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        shared, own = super().extra_state()
        shared |= {f"anchor/{name}": tensor for name, tensor in self.anchor.items()}
        shared |= {f"momentum/{name}": tensor for name, tensor in self.momentum.items()}
        return shared, own

    def load_extra_state(self, shared: dict[str, Tensor], own: dict[str, Tensor] | None) -> None:
        for name, p in self.params.items():  # from another strategy: what it has is the anchor
            self.anchor[name].copy_(shared.get(f"anchor/{name}", p.detach()))
            self.momentum[name].copy_(shared.get(f"momentum/{name}", torch.zeros_like(p)))
        super().load_extra_state(shared, own)  # last: a worker's own parameters
