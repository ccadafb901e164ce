"""DiLoCo in fragments, each on its way while the workers compute."""

from __future__ import annotations

import torch
from torch import Tensor

from shardlab import comm
from shardlab.strategies import base, steps
from shardlab.strategies.local.diloco import DiLoCo
from shardlab.strategies.local.rounds import checked, cut, due


class StreamingDiLoCo(DiLoCo):
    """DiLoCo that exchanges one fragment of the model at a time, while the next steps compute.

    Schedule, for n ranks and Ψ bytes of parameters that train, in f fragments:

        at construction     broadcast parameters and buffers from rank 0; they are the anchor
        each step           forward and backward of this rank's micro-batches; meanwhile
                            all_reduce the loss with its number of targets  16 bytes
        step                update, from this rank's own gradients          nothing
        f steps of a round  all_reduce a fragment's anchor less parameters, asynchronously  Ψ/f
        delay steps later   wait for it; move its anchor, mix it with the parameters
        each every-th step  broadcast buffers from rank 0 (if the model has any)

    Cost: Ψ / every in a step on average, as ``diloco``. But no step sends more than one fragment or
    some, and it has ``delay`` steps of computing to travel (arXiv 2501.18512). Without a delay it
    is waited for at once. Memory: 2Ψ for anchor and outer momentum, and the fragments under way.
    When a fragment has arrived, a worker keeps ``mix`` of its own parameters, which it has updated
    meanwhile: half by default, and nothing without a delay.
    """

    def __init__(
        self,
        setup: base.Setup,
        *,
        every: int = 10,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        fragments: int = 2,
        delay: int = 1,
        mix: float | None = None,
    ) -> None:
        kept = (0.5 if delay else 0.0) if mix is None else mix
        super().__init__(setup, every=every, outer_lr=outer_lr, outer_momentum=outer_momentum)
        self.rounds = checked(base.Rounds(every, outer_lr, outer_momentum, fragments, delay, kept))
        self.fragments = cut(self.rounds, self.params)
        self.number = {name: i for i, names in enumerate(self.fragments) for name in names}
        self.seen = self.seen.repeat(fragments, 1)  # since each fragment was sent: (fragments, 2)
        self.sent: dict[str, Tensor] = {}  # outer gradients that have not moved their anchor yet
        self.under_way: dict[str, comm.Pending] = {}

    @torch.no_grad()
    def exchange_what_is_due(self) -> None:
        for number, names in enumerate(self.fragments):
            age = (self.since - due(self.rounds, number)) % self.rounds.every
            if age == 0:
                self._send(number, names)
            is_sent = all(name in self.sent or name in self.under_way for name in names)
            if age == self.rounds.delay and is_sent:
                self._merge(names)
        if self.since == 0:
            steps.broadcast_buffers(self.model, self.group)

    def _send(self, number: int, names: list[str]) -> None:
        share = self.share(self.seen[number])
        self.seen[number] = 0.0
        for name in names:
            self.sent[name] = (self.anchor[name] - self.params[name]) * share
            label = f"difference of param {name}"
            self.under_way[name] = comm.all_reduce(
                self.sent[name], self.group, label=label, async_op=True
            )

    def _merge(self, names: list[str]) -> None:
        for name in names:
            if name in self.under_way:  # not so after a resume: what had arrived was saved
                self.under_way.pop(name).wait()
            self._move(name, self.sent.pop(name))
            self.params[name].lerp_(self.anchor[name], 1 - self.rounds.mix)

    def settle(self) -> None:
        for pending in self.under_way.values():
            pending.wait()
        self.under_way.clear()

    def seen_of(self, name: str) -> Tensor:
        return self.seen[self.number[name]]

    def in_step(self) -> bool:
        """Fragments differ at any time, but for a single one without a delay."""
        return self.since == 0 and self.rounds.fragments == 1 and self.rounds.delay == 0

    def extra_state(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        shared, own = super().extra_state()
        return shared | {f"sent/{name}": t for name, t in self.sent.items()}, own

    def load_extra_state(self, shared: dict[str, Tensor], own: dict[str, Tensor] | None) -> None:
        super().load_extra_state(shared, own)
        self.sent = {
            name: torch.empty_like(p).copy_(shared[f"sent/{name}"])
            for name, p in self.anchor.items()
            if f"sent/{name}" in shared
        }
