"""What ZeRO's three stages do alike: a flat shard of each unit, and an optimizer over it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shardlab import comm
from shardlab.optim import factory
from shardlab.strategies import base, refusals, steps
from shardlab.strategies.flat import Piece, Unit, new_flat
from shardlab.strategies.sharded_state import ShardedState

DTYPES = {"fp32": None, "bf16": torch.bfloat16}  # that gradients (ZeRO-3: parameters) travel in


class Sent(NamedTuple):
    """A unit's gradients on their way."""

    unit: Unit
    full: Tensor  # (padded,) what this rank sends: not to be touched before the wait
    shard: Tensor  # (shard,) what comes back: this rank's part of the sum
    pending: comm.Pending


class Sharded(ShardedState):
    """Owns the shards. The optimizer sees *pieces*: the part of one parameter in this rank's shard.

    So a parameter that nobody used can be skipped, as one process would, and optimizer state has
    names. Pieces are views: nothing is copied."""

    IN_FLIGHT = 1  # units whose gradients may be on their way at one time: each holds a buffer

    def __init__(self, setup: base.Setup) -> None:
        super().__init__(setup, builds_optimizer=False)
        refusals.refuse_sparse_gradients(self.params)
        self.peers = self.group  # the ranks that have one shard each
        self.used: set[str] = set()  # what got a gradient on this rank, in this step
        self.unused: list[str] = []  # what got one on no rank
        self.comm_dtype: torch.dtype | None = None  # of gradients that travel; None: their own
        self.in_flight: deque[Sent] = deque()
        steps.broadcast_model(self.model, self.group)

    def own_units(self, setup: base.Setup, units: list[Unit]) -> None:
        """Build the optimizer over this rank's pieces of the units' shards."""
        if all(unit.layout.is_cut for unit in units):
            factory.check(setup.make_optimizer, factory.FLAT, type(self).__name__.lower())
        self.units = units
        self.pieces: dict[tuple[str, Piece], nn.Parameter] = {}
        for unit in units:
            for piece in unit.layout.pieces(self.rank):
                whole = unit.params[piece.name]
                part = unit.shard[piece.offset : piece.offset + piece.length]
                part = part if unit.layout.is_cut else part.view(whole.shape)
                self.pieces[unit.label, piece] = nn.Parameter(part, whole.requires_grad)
        mine = {piece.name: p for (_, piece), p in self.pieces.items() if p.requires_grad}
        self.own(setup, mine)  # of none, if there are fewer elements than ranks

    def update_shards(self, then: Callable[[Unit], None] = lambda _: None) -> None:
        """Update this rank's shards from its part of the gradient, unit by unit.

        In the order in which gradients come: the last ones travel while the first are updated (but
        not if the norm of them all is needed), and what ``then`` sends while the next unit is.
        """
        if self.update.needs_norm:
            for unit in self.units:
                self.await_gradient(unit)
        gradients: dict[str, dict[nn.Parameter, Tensor]] = {unit.label: {} for unit in self.units}
        for unit, piece, parameter in self.trained_pieces():
            if unit.grad is not None and piece.name not in self.unused:
                part = unit.grad[piece.offset : piece.offset + piece.length]
                gradients[unit.label][parameter] = part.view_as(parameter)

        def apply() -> None:
            by_parts = factory.steps_by_parts(self.optimizer)
            for units in [[unit] for unit in self.units] if by_parts else [self.units]:
                parts = {p: part for unit in units for p, part in gradients[unit.label].items()}
                for unit in units:
                    self.await_gradient(unit)
                for parameter, part in parts.items():
                    parameter.grad = part
                self.optimizer.step()  # it passes over parameters that have no gradient
                for parameter in parts:
                    parameter.grad = None
                for unit in units:
                    then(unit)

        whole = [part for parts in gradients.values() for part in parts.values()]
        self.update(whole, self.peers, apply)

    # ------------------------------------------------------------ gradients, freed as they go

    def move_gradient(self, unit: Unit, name: str, parameter: nn.Parameter) -> None:
        """Move a gradient from backward's own tensor, which is freed, into the unit's buffer. If it
        comes again before that is sent, add it: re-entrant checkpointing gives it in parts."""
        self.used.add(name)
        if parameter.grad is None:  # it came twice, and was moved with the first
            return
        if unit.full_grad is not None and name not in unit.missing:
            unit.layout.view(unit.full_grad, name).add_(parameter.grad)
        else:
            self.place(unit, name).copy_(parameter.grad)
        parameter.grad = None

    def place(self, unit: Unit, name: str) -> Tensor:
        """Where a gradient goes, to be written over: of the parameter's shape."""
        full = self.buffer(unit)
        unit.missing.discard(name)
        return unit.layout.view(full, name)

    def buffer(self, unit: Unit) -> Tensor:
        """Room for the unit's gradients, made when the first of them comes: (padded,).

        Not zeroed: that would cost a page fault for each 4 KiB, 2% of a step on a CPU.
        """
        if unit.full_grad is None:
            dtype = self.comm_dtype or unit.like["dtype"]
            unit.full_grad = new_flat(unit.layout.padded, dtype, self.device)
            unit.missing = set(unit.params)
        return unit.full_grad

    def filled(self, unit: Unit) -> Tensor:
        """The unit's gradients, ready to be sent; zero where this rank has none: (padded,)."""
        full = self.buffer(unit)
        for name in unit.missing:
            unit.layout.view(full, name).zero_()
        full[unit.layout.size :].zero_()
        return full

    def taken(self, unit: Unit) -> tuple[Tensor, Tensor]:
        """What is sent, (padded,), and room for the result, (shard,), once fewer than IN_FLIGHT
        are on their way. The unit gives the buffer away: a late gradient begins a new one."""
        while len(self.in_flight) >= self.IN_FLIGHT:
            self.receive()
        full, unit.full_grad = self.filled(unit), None
        return full, torch.empty(unit.shard.numel(), dtype=full.dtype, device=full.device)

    def receive(self) -> None:
        """Wait for the oldest unit on its way, add it to this rank's shard, free its buffer."""
        sent = self.in_flight.popleft()
        sent.pending.wait()
        if sent.unit.grad is None:
            sent.unit.grad = sent.shard.to(sent.unit.like["dtype"])
        else:
            sent.unit.grad += sent.shard

    def receive_all(self) -> None:
        while self.in_flight:
            self.receive()
