"""What ZeRO's three stages share: a flat shard of each unit, and an optimizer over it."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from shardlab import comm
from shardlab.optim import traits
from shardlab.strategies import base, shards, steps
from shardlab.strategies.flat import Unit
from shardlab.strategies.shards import Shard
from shardlab.workloads.base import Batch


class Sent(NamedTuple):
    """A unit's gradients on their way."""

    unit: Unit
    full: Tensor  # (padded,) what this rank sends: not to be touched before the wait
    shard: Tensor  # (shard,) what comes back: this rank's part of the sum
    pending: comm.Pending


class Sharded(base.Strategy):
    """Owns the shards. The optimizer sees *pieces*: the part of one parameter in this rank's shard.

    So a parameter that no rank used can be skipped, as in one process, and optimizer state has
    names. Pieces are views: nothing is copied."""

    KEEPS_PARTS = True
    IN_FLIGHT = 1  # units whose gradients may be on their way at one time: each holds a buffer

    def __init__(self, setup: base.Setup) -> None:
        super().__init__(setup, builds_optimizer=False)
        self.unused: list[str] = []  # what got one on no rank
        self.in_flight: deque[Sent] = deque()
        steps.broadcast_model(self.model, self.group)

    def own_units(self, setup: base.Setup, units: list[Unit]) -> None:
        """Build the optimizer over this rank's pieces of the units' shards."""
        if all(unit.layout.is_cut for unit in units):
            traits.check(setup.make_optimizer, traits.FLAT, type(self).__name__.lower())
        self.units = units
        for unit in units:
            unit.cut_shard()
        self.pieces = {  # that this rank updates: none, if there are fewer elements than ranks
            s.name: s.key for unit in units for s in unit.held(()) if s.key is not None
        }
        self.own(setup, self.pieces)

    @property
    def rank(self) -> int:
        """Which shard is this rank's."""
        return self.group.rank()

    def step(self) -> None:
        """Update this rank's shards from its part of the gradient, and free that."""
        for unit in self.units:
            for s in unit.held(self.unused):
                if s.key is not None and s.grad is not None:
                    s.key.grad = s.grad.view_as(s.key)
        self.update([p.grad for p in self.pieces.values() if p.grad is not None], self.group)
        for unit in self.units:
            unit.grad = unit.full_grad = None
        steps.drop_gradients(self.pieces)
        steps.drop_gradients(self.params)

    # ------------------------------------------------------------ gradients, freed as they go

    def send_buffers(self, unit: Unit) -> tuple[Tensor, Tensor]:
        """What is sent, (padded,), and room for the result, (shard,), once fewer than IN_FLIGHT
        are on their way. The unit gives the buffer away: a late gradient begins a new one."""
        while len(self.in_flight) >= self.IN_FLIGHT:
            self.receive()
        full, unit.full_grad = unit.filled(), None
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

    # ------------------------------------------------------------ what it holds

    def shards(self) -> list[Shard]:
        """Parameters that are whole between steps (ZeRO-1, 2) are given whole, so that loading them
        needs no gather, and the pieces that are updated besides. Those that are freed (ZeRO-3) are
        given in pieces alone."""
        freed = [unit for unit in self.units if not unit.is_whole]
        away = {name for unit in freed for name, p in unit.params.items() if p.numel()}
        found = [s for s in shards.of_model(self.model) if s.name not in away]
        for unit in self.units:
            found += unit.held(self.unused)
        return found

    @torch.no_grad()
    def infer(self, function: base.Infer[base.T], batch: Batch) -> base.T:
        self.settle()
        result = function(self.model, batch)
        self.settle()
        return result
