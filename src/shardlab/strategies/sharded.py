"""What ZeRO's three stages do alike: a flat shard of each unit, and an optimizer over it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardlab import comm
from shardlab.errors import UsageError
from shardlab.strategies import base
from shardlab.strategies.flat import Layout, Piece
from shardlab.strategies.slots import Slot, Slots, whole
from shardlab.strategies.update import Rule, Update
from shardlab.workloads.base import Batch, LossFn

DTYPES = {"fp32": None, "bf16": torch.bfloat16}  # that gradients (ZeRO-3: parameters) travel in


class Unit:
    """Parameters that are sharded and sent together: a bucket (ZeRO-1, 2) or a block (ZeRO-3)."""

    def __init__(
        self,
        label: str,
        params: Mapping[str, nn.Parameter],
        group: comm.Group,
        like: Tensor | None = None,
    ) -> None:
        self.label = label
        self.params = dict(params)
        self.layout = Layout.of(params, group.size())
        first = next(iter(params.values()), like)  # ``like``: for a unit without parameters
        assert first is not None
        if any(p.dtype != first.dtype for p in params.values()):
            raise UsageError(f"{label} mixes parameters of several dtypes: it cannot be sharded")
        self.like: dict[str, Any] = {"dtype": first.dtype, "device": first.device}
        self.shard: Tensor  # (shard,) this rank's parameters, the ones that are updated
        self.full: Tensor | None = None  # (padded,) all ranks' parameters, while they are here
        self.full_grad: Tensor | None = None  # (padded,) this rank's gradient of all of them
        self.missing: set[str] = set()  # whose gradient is not in it yet
        self.grad: Tensor | None = None  # (shard,) this rank's part of the summed gradient

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The given tensors, end to end: (padded,)."""
        flat = torch.zeros(self.layout.padded, **self.like)
        for name, tensor in tensors.items():
            self.layout.view(flat, name).copy_(tensor)
        return flat

    def free(self) -> None:
        """Shrink the storage of the whole parameters to nothing."""
        assert self.full is not None
        self.full.untyped_storage().resize_(0)

    def split(self, flat: Tensor) -> dict[str, Tensor]:
        """The parameters' places in a full buffer (padded,), by name."""
        return {name: self.layout.view(flat, name) for name in self.params}


class Sharded:
    """Owns the shards. The optimizer sees *pieces*: the part of one parameter in this rank's shard.

    Pieces, not whole shards, so that a parameter that nobody used can be skipped, as one
    process would, and so that optimizer state has names. They are views: nothing is copied.
    """

    IN_FLIGHT = 1  # units whose gradients may be on their way at one time: each holds a buffer

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: base.MakeOptimizer,
        loss_fn: LossFn,
        mesh: DeviceMesh,
        rule: Rule,
    ) -> None:
        self.model = model
        self.make_optimizer = make_optimizer
        self.loss_fn = loss_fn
        self.group = mesh.get_group("dp")
        self.rank, self.ranks = self.group.rank(), self.group.size()
        self.rule = rule
        self.params = base.trainable(model)
        self.device = next(iter(self.params.values())).device
        self.used: set[str] = set()  # what got a gradient on this rank, in this step
        self.unused: list[str] = []  # what got one on no rank
        self.comm_dtype: torch.dtype | None = None  # of gradients on their way; none: their own
        self.in_flight: deque[tuple[Unit, Tensor, comm.Pending]] = deque()
        base.broadcast_model(model, self.group)

    def own(self, units: list[Unit]) -> None:
        """Build the optimizer over this rank's pieces of the units' shards."""
        self.units = units
        self.pieces: dict[tuple[str, Piece], nn.Parameter] = {}
        for unit in units:
            for piece in unit.layout.pieces(self.rank):
                part = unit.shard[piece.offset : piece.offset + piece.length]
                is_trained = unit.params[piece.name].requires_grad
                self.pieces[unit.label, piece] = nn.Parameter(part, requires_grad=is_trained)
        mine = [p for p in self.pieces.values() if p.requires_grad]
        # A rank may have none (fewer elements than ranks); optimizers want at least one.
        nothing = nn.Parameter(torch.zeros(0, device=self.device))
        self.optimizer = self.make_optimizer(mine or [nothing])
        self.update = Update(self.optimizer, self.rule)

    def await_gradient(self, unit: Unit) -> None:
        """Before the unit's shard is updated: wait until its gradient is there."""

    def settle(self) -> None:
        """Between steps: wait for what is under way, free what is not kept."""

    @torch.no_grad()
    def infer(self, function: base.Infer[base.T], batch: Batch) -> base.T:
        """``function(model, batch)`` without gradients. Every rank calls it, with rows or none."""
        self.settle()
        result = function(self.model, batch)
        self.settle()
        return result

    def trained_pieces(self) -> Iterator[tuple[Unit, Piece, nn.Parameter]]:
        for unit in self.units:
            for piece in unit.layout.pieces(self.rank):
                parameter = self.pieces[unit.label, piece]
                if parameter.requires_grad:
                    yield unit, piece, parameter

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
                gradients[unit.label][parameter] = part

        def apply() -> None:
            for unit in self.units:
                self.await_gradient(unit)
                for parameter, part in gradients[unit.label].items():
                    parameter.grad = part
                self.optimizer.step()  # it passes over parameters that have no gradient
                self.optimizer.zero_grad(set_to_none=True)
                then(unit)

        whole = [part for parts in gradients.values() for part in parts.values()]
        self.update(whole, self.group, apply)

    # ------------------------------------------------------------ gradients, freed as they go

    def move_gradient(self, unit: Unit, name: str, parameter: nn.Parameter) -> None:
        """From backward's own tensor, which is freed, into the unit's buffer."""
        self.used.add(name)
        assert parameter.grad is not None
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
            unit.full_grad = torch.empty(unit.layout.padded, dtype=dtype, device=self.device)
            unit.missing = set(unit.params)
        return unit.full_grad

    def filled(self, unit: Unit) -> Tensor:
        """The unit's gradients, ready to be sent; zero where this rank has none: (padded,)."""
        full = self.buffer(unit)
        for name in unit.missing:
            unit.layout.view(full, name).zero_()
        full[unit.layout.size :].zero_()
        return full

    def scatter(self, unit: Unit) -> None:
        """Reduce-scatter the unit's gradients, asynchronously; at most IN_FLIGHT at a time."""
        while len(self.in_flight) >= self.IN_FLIGHT:
            self.receive()
        full = self.filled(unit)
        shard = torch.empty(unit.layout.shard, dtype=full.dtype, device=full.device)
        label = f"grad {unit.label}"
        pending = comm.reduce_scatter(shard, full, self.group, label=label, async_op=True)
        self.in_flight.append((unit, shard, pending))

    def receive(self) -> None:
        """The oldest unit under way: add it to this rank's shard, and free its buffer."""
        unit, shard, pending = self.in_flight.popleft()
        pending.wait()
        unit.full_grad = None
        if unit.grad is None:
            unit.grad = shard.to(unit.like["dtype"])
        else:
            unit.grad += shard

    def receive_all(self) -> None:
        while self.in_flight:
            self.receive()

    # ------------------------------------------------------------ whole tensors

    def gather(self, unit: Unit, shard: Tensor, label: str) -> dict[str, Tensor]:
        """Every rank's part of the unit, put together and split by parameter."""
        full = torch.empty(unit.layout.padded, dtype=shard.dtype, device=shard.device)
        comm.all_gather(full, shard, self.group, label=f"{label} {unit.label}")
        return unit.split(full)

    def full_params(self) -> dict[str, Tensor]:
        base.broadcast_buffers(self.model, self.group)
        sharded: dict[str, Tensor] = {}
        for unit in self.units:
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
        """Parameters that are whole between steps (ZeRO-1, 2) are told whole: who loads them needs
        no gather. Those that are freed (ZeRO-3) are told by their pieces.
        """
        self.settle()
        shapes = {unit.label: unit.layout.shapes for unit in self.units}
        pieces = {
            (label, piece): Slot(piece.name, shapes[label][piece.name], piece.start, p.detach())
            for (label, piece), p in self.pieces.items()
        }
        freed = {
            u.label for u in self.units if u.full is None or not u.full.untyped_storage().size()
        }
        away = {name for unit in self.units if unit.label in freed for name in unit.params}
        tensors = (*self.model.named_parameters(), *self.model.named_buffers())
        model = whole((name, t) for name, t in tensors if name not in away)
        model += [slot for key, slot in pieces.items() if key[0] in freed]
        trained = {p: pieces[key] for key, p in self.pieces.items() if p.requires_grad}
        return Slots(model, trained, self.optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Whole tensors by name, so that any strategy at any world size can load them."""
        optimizer: dict[str, dict[str, Any]] = {}
        names = sorted({k for state in self.optimizer.state.values() for k in state})
        for unit in self.units:
            for key in self._agreed(names):
                for name, value in self._gather_state(unit, key).items():
                    optimizer.setdefault(name, {})[key] = value
        model, update = self.full_params(), self.update.state_dict()
        return {"model": model, "optimizer": optimizer, "update": update}

    def _agreed(self, names: list[str]) -> list[str]:
        """The optimizer's state keys; a rank without pieces does not know them."""
        everyone: list[list[str]] = [[]] * self.ranks
        torch.distributed.all_gather_object(everyone, names, group=self.group)
        return sorted({name for names in everyone for name in names})

    def _gather_state(self, unit: Unit, key: str) -> dict[str, Tensor]:
        """One state tensor of each parameter of the unit; a number per parameter stays one."""
        shard = torch.zeros(unit.layout.shard, **unit.like)
        present, numbers = torch.zeros(len(unit.params)), torch.zeros(len(unit.params))
        index = {name: i for i, name in enumerate(unit.params)}
        for owner, piece, parameter in self.trained_pieces():
            value = self.optimizer.state.get(parameter, {}).get(key)
            if owner is unit and value is not None:
                is_number = value.dim() == 0
                present[index[piece.name]] = 2 if is_number else 1
                if is_number:
                    numbers[index[piece.name]] = float(value)
                else:
                    shard[piece.offset : piece.offset + piece.length] = value
        both = torch.cat([present, numbers]).to(self.device)
        comm.all_reduce(both, self.group, op="max", label=f"state {key}")
        kinds, values = both.cpu().view(2, -1)
        full = self.gather(unit, shard, f"state {key}")
        return {
            name: full[name].clone() if kinds[i] == 1 else values[i].clone()
            for name, i in index.items()
            if kinds[i] > 0
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
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
                    key: _cut(key, value, piece)
                    for key, value in state["optimizer"][piece.name].items()
                }
        self.update.load_state_dict(state["update"])


def _cut(key: str, value: Tensor, piece: Piece) -> Tensor:
    """The piece's part of a parameter's state. A number, such as Adam's step, has no parts."""
    if value.dim() == 0 and (key == "step" or piece.length > 1):
        return value.clone()
    return value.reshape(-1)[piece.start : piece.start + piece.length].clone()
