"""Messages between the ranks of a pipeline.

Sends do not wait. A sent tensor is kept until its receiver sends something that it made afterwards.
Over Gloo a message travels as soon as both ends have begun it, so receives begin before their
tensors are needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from shardlab import comm
from shardlab.ledger import members
from shardlab.strategies.pipeline.stages import Shape

ACTIVATION, GRADIENT, SHARED = "activation", "gradient", "shared"
LANES = (ACTIVATION, GRADIENT, SHARED)  # of messages
PARTS = 64  # tags of one message: one for each tensor, and two for the shapes
Key = tuple[str, int, int]  # lane, the stage that works on it, micro-batch


class Messages:
    """One rank's messages. ``where``: the rank of each stage."""

    def __init__(self, group: comm.Group, where: Sequence[int], device: torch.device) -> None:
        self.group, self.where, self.device = group, where, device
        self.rank, self.ranks, self.stages = group.rank(), group.size(), len(where)
        self.lanes: dict[tuple[str, bool], comm.Group] = {}
        if group.name() != "gloo":
            self._make_lanes()
        self._clear_messages()

    def _clear_messages(self) -> None:
        self.here: dict[Key, list[Tensor]] = {}  # handed over between two stages of this rank
        self.coming: dict[Key, list[tuple[Tensor, comm.Pending]]] = {}
        self.going: dict[Key, list[comm.Pending]] = {}
        # When a message is worked on: the place of that action in its rank's list.
        self.turns: dict[Key, int] = {}

    def _make_lanes(self) -> None:
        """A group for each direction. Gloo tells messages apart by their tags and needs none; with
        NCCL a send that waits would hold up what comes behind it."""
        ranks = members(self.group)
        for lane in LANES:
            for is_up in (True, False):
                group = dist.new_group(ranks, use_local_synchronization=True)
                self.lanes[lane, is_up] = group

    def _sender(self, key: Key) -> int:
        """The stage that makes a message."""
        return key[1] - 1 if key[0] == ACTIVATION else key[1] + 1

    def _channel(self, key: Key, part: int, is_up: bool, what: str = "") -> dict[str, Any]:
        """What both ends of a message say of it. ``is_up``: to a rank with a higher number."""
        lane, stage, micro = key
        number = (micro * self.stages + stage) * len(LANES) + LANES.index(lane)
        of = f"{lane} of micro-batch {micro} from stage {self._sender(key)} for stage {stage}"
        return {
            "group": self.lanes.get((lane, is_up), self.group),
            "tag": number * PARTS + part,
            "lane": lane,
            "label": what or (f"{of} ({part})" if part else of),
        }

    def _send(self, key: Key, to: int, tensor: Tensor, part: int, what: str = "") -> comm.Pending:
        channel = self._channel(key, part, self.rank < to, what)
        return comm.send(tensor, to=to, **channel, async_op=True)

    def _receive(
        self, key: Key, of: int, tensor: Tensor, part: int, what: str = ""
    ) -> tuple[Tensor, comm.Pending]:
        channel = self._channel(key, part, of < self.rank, what)
        return tensor, comm.recv(tensor, source=of, **channel, async_op=True)

    # ------------------------------------------------------------ activations and gradients

    def _give(self, key: Key, tensors: Sequence[Tensor]) -> None:
        to = self.where[key[1]]
        if to == self.rank:
            self.here[key] = [t.detach() for t in tensors]
            return
        self.going.setdefault(key, []).extend(
            self._send(key, to, t, part) for part, t in enumerate(tensors)
        )

    def _begin(self, key: Key, shapes: Sequence[Shape]) -> None:
        """Begin to receive a message. Over Gloo nothing travels before that."""
        of = self.where[self._sender(key)]
        if of == self.rank or key in self.coming:
            return
        self.coming[key] = [
            self._receive(key, of, torch.empty(shape, dtype=dtype, device=self.device), part)
            for part, (shape, dtype, _) in enumerate(shapes)
        ]

    def _take(self, key: Key, shapes: Sequence[Shape]) -> list[Tensor]:
        """Wait for a message."""
        if key in self.here:
            return self.here.pop(key)
        self._begin(key, shapes)
        tensors = []
        for tensor, pending in self.coming.pop(key):
            pending.wait()
            tensors.append(tensor)
        self._release(key)
        return tensors

    def _release(self, key: Key) -> None:
        """What the sender of this message had worked on before it need not be kept any longer."""
        stage = self._sender(key)
        made = self.turns.get((key[0], stage, key[2]), 0)
        for sent in list(self.going):
            if self.where[sent[1]] == self.where[stage] and self.turns.get(sent, 0) < made:
                for pending in self.going.pop(sent):
                    pending.wait()

    def _finish_sending(self) -> None:
        for pendings in self.going.values():
            for pending in pendings:
                pending.wait()
        self.going.clear()

    # ------------------------------------------------------------ shapes, shared gradients, results

    def _send_shapes(self, key: Key, shapes: list[list[Shape]]) -> None:
        """Tell the stage that works on an activation how it and all before it are shaped."""
        if (to := self.where[key[1]]) != self.rank:
            channel = self._channel(key, PARTS - 2, self.rank < to, self._shapes_label(key))
            self.going[key] = comm.send_object(shapes, to=to, device=self.device, **channel)

    def _receive_shapes(self, key: Key) -> list[list[Shape]]:
        of = self.where[self._sender(key)]
        channel = self._channel(key, PARTS - 2, of < self.rank, self._shapes_label(key))
        shapes: list[list[Shape]] = comm.recv_object(source=of, device=self.device, **channel)
        return shapes

    def _shapes_label(self, key: Key) -> str:
        return f"shapes of micro-batch {key[2]} from stage {self._sender(key)}"

    def _summed(self, places: Sequence[int], mine: Tensor, number: int, what: str) -> Tensor:
        """The sum over some ranks, in their order, so that all get the same bits. They have no
        group of their own: PyTorch's names of groups need as many on every rank."""
        key, label = (SHARED, 0, number), f"{what} of several stages"
        rooms = {place: torch.empty_like(mine) for place in places if place != self.rank}
        pending = [self._receive(key, of, room, 0, label)[1] for of, room in rooms.items()]
        pending += [self._send(key, to, mine, 0, label) for to in rooms]
        for p in pending:
            p.wait()
        first, *rest = (rooms.get(place, mine) for place in places)
        total = first.clone()
        for part in rest:
            total += part
        return total

    def _share(self, value: Any) -> Any:
        """Every rank gets what the model returned on the last stage."""
        last = self.where[-1]
        mine = tree_map_only(Tensor, Tensor.cpu, value) if self.rank == last else None
        everywhere = comm.broadcast_object(mine, self.group, last)
        return tree_map_only(Tensor, lambda t: t.to(self.device), everywhere)
