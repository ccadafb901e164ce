"""ZeRO between steps: its state as whole tensors by name or as this rank's parts, and inference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from shardlab import comm
from shardlab.optim import factory
from shardlab.strategies import base, steps
from shardlab.strategies.flat import Piece, Unit
from shardlab.strategies.slots import Slot, Slots, whole
from shardlab.workloads.base import Batch


class ShardedState(base.Strategy):
    """The half of ``Sharded`` that tells and takes what it holds."""

    KEEPS_PARTS = True

    peers: comm.Group  # the ranks that have one shard each
    units: list[Unit]
    pieces: dict[tuple[str, Piece], nn.Parameter]
    unused: list[str]

    @property
    def rank(self) -> int:
        """Which shard is this rank's."""
        return self.peers.rank()

    def await_gradient(self, unit: Unit) -> None:
        """Before the unit's shard is updated: wait until its gradient is there."""

    def trained_pieces(self) -> Iterator[tuple[Unit, Piece, nn.Parameter]]:
        for unit in self.units:
            for piece in unit.layout.pieces(self.rank):
                parameter = self.pieces[unit.label, piece]
                if parameter.requires_grad:
                    yield unit, piece, parameter

    def updated_names(self) -> list[str]:
        return [
            piece.name
            for unit, piece, _ in self.trained_pieces()
            if unit.grad is not None and piece.name not in self.unused
        ]

    def gather(self, unit: Unit, shard: Tensor, label: str) -> dict[str, Tensor]:
        """Every rank's part of the unit, put together and split by parameter."""
        full = torch.empty(unit.layout.padded, dtype=shard.dtype, device=shard.device)
        sizes = unit.layout.uneven
        comm.all_gather(full, shard, self.peers, sizes=sizes, label=f"{label} {unit.label}")
        return unit.split(full)

    def full_params(self) -> dict[str, Tensor]:
        self.settle()
        steps.broadcast_buffers(self.model, self.group)
        sharded: dict[str, Tensor] = {}
        for unit in self.units:
            if not unit.is_whole:  # ZeRO-3's are not, between steps
                sharded |= self.gather(unit, unit.shard, "full")
        tensors = (*self.model.named_parameters(), *self.model.named_buffers())
        return {name: sharded.get(name, t.detach()).clone() for name, t in tensors}

    def full_grads(self) -> dict[str, Tensor | None]:
        gathered: dict[str, Tensor] = {}
        for unit in self.units:
            self.await_gradient(unit)
            if unit.grad is not None:  # else the whole unit is frozen
                gathered |= self.gather(unit, unit.grad / self.update.scale, "full gradient")
        return {n: None if n in self.unused else gathered[n].clone() for n in self.params}

    def slots(self) -> Slots:
        """Parameters that are whole between steps (ZeRO-1, 2) are given whole, so that loading them
        needs no gather. Those that are freed (ZeRO-3) are given in pieces.
        """
        self.settle()
        shapes = {unit.label: unit.layout.shapes for unit in self.units}
        pieces = {
            (label, piece): Slot(piece.name, shapes[label][piece.name], piece.start, p.detach())
            for (label, piece), p in self.pieces.items()
        }
        freed = {unit.label for unit in self.units if not unit.is_whole}
        away = {name for unit in self.units if unit.label in freed for name in unit.params}
        tensors = (*self.model.named_parameters(), *self.model.named_buffers())
        model = whole((name, t) for name, t in tensors if name not in away)
        model += [slot for key, slot in pieces.items() if key[0] in freed]
        trained = {p: pieces[key] for key, p in self.pieces.items() if p.requires_grad}
        return Slots(model, trained, self.optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Whole tensors by name, so that any strategy at any world size can load them."""
        optimizer: dict[str, dict[str, Any]] = {}
        kinds = {
            key: value.dtype if isinstance(value, Tensor) else torch.float64
            for state in self.optimizer.state.values()
            for key, value in state.items()
            if value is not None
        }
        for key, dtype in self._agreed(kinds):
            for unit in self.units:
                for name, value in self._gather_state(unit, key, dtype).items():
                    optimizer.setdefault(name, {})[key] = value
        model, update = self.full_params(), self.update.state_dict()
        return {"model": model, "optimizer": optimizer, "update": update}

    def _agreed(self, kinds: dict[str, torch.dtype]) -> list[tuple[str, torch.dtype]]:
        """The optimizer's state keys and their dtypes; a rank without pieces does not know them."""
        everyone: list[dict[str, torch.dtype]] = [{}] * self.group.size()
        torch.distributed.all_gather_object(everyone, kinds, group=self.group)
        return sorted({k: v for kinds in everyone for k, v in kinds.items()}.items())

    def _gather_state(self, unit: Unit, key: str, dtype: torch.dtype) -> dict[str, Any]:
        """One state tensor of each parameter of the unit; a number per parameter stays one."""
        shard = torch.zeros_like(unit.shard, dtype=dtype)
        present, numbers = torch.zeros(2, len(unit.params), dtype=torch.float64)
        index = {name: i for i, name in enumerate(unit.params)}
        for owner, piece, parameter in self.trained_pieces():
            value = self.optimizer.state.get(parameter, {}).get(key)
            if owner is unit and value is not None:
                is_number = not isinstance(value, Tensor) or value.dim() == 0
                present[index[piece.name]] = 2 if is_number else 1
                if is_number:
                    numbers[index[piece.name]] = float(value)
                else:
                    shard[piece.offset : piece.offset + piece.length] = value.reshape(-1)
        both = torch.cat([present, numbers]).to(self.device)
        comm.all_reduce(both, self.group, op="max", label=f"state {key}")
        kinds, values = both.cpu().view(2, -1)
        full = self.gather(unit, shard, f"state {key}")
        return {
            name: full[name].clone() if kinds[i] == 1 else values[i].to(dtype)
            for name, i in index.items()
            if kinds[i] > 0
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.settle()
        for name, tensor in self.model.named_buffers():
            tensor.copy_(state["model"][name])
        for name, p in self.model.named_parameters():
            if not any(name in unit.params for unit in self.units):
                p.copy_(state["model"][name])
        for unit in self.units:
            full = unit.flatten({name: state["model"][name] for name in unit.params})
            unit.shard.copy_(unit.layout.of_rank(full, self.rank))
        self.optimizer.state.clear()
        for _, piece, parameter in self.trained_pieces():
            if piece.name in state["optimizer"]:
                self.optimizer.state[parameter] = {
                    key: _cut(key, value, piece, parameter, len(self.params[piece.name].shape))
                    for key, value in state["optimizer"][piece.name].items()
                }
        self.update.load_state_dict(state["update"])
        self.spread()

    def spread(self) -> None:
        """Shards were written from outside: send them to the ranks that keep them whole."""
        for unit in self.units:
            if unit.is_whole:
                assert unit.full is not None
                label = f"params {unit.label}"
                sizes = unit.layout.uneven
                comm.all_gather(unit.full, unit.shard, self.peers, sizes=sizes, label=label)

    def exchange_averages(self) -> None:
        self.settle()
        factory.exchange_averages(self.optimizer)
        self.spread()

    @torch.no_grad()
    def infer(self, function: base.Infer[base.T], batch: Batch) -> base.T:
        self.settle()
        result = function(self.model, batch)
        self.settle()
        return result


def _cut(key: str, value: Any, piece: Piece, parameter: Tensor, dimensions: int) -> Any:
    """The piece's part of a parameter's state. A number, such as Adam's step, has no parts."""
    if not isinstance(value, Tensor):
        return value
    if value.dim() == 0 and (key == "step" or dimensions > 0):
        return value.clone()
    part = value.reshape(-1)[piece.start : piece.start + piece.length]
    return part.clone().view(parameter.shape)
