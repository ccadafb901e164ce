"""Messages between the ranks of a pipeline: what is begun, what is waited for, and what may go.

Sends do not wait. A tensor that was sent is kept until its receiver has said, by a later message of
its own, that it has it. Over Gloo a message travels as soon as both ends have begun it, so receives
are begun before they are needed.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardlab import comm
from shardlab.errors import UsageError
from shardlab.strategies.stages import Shape

ACTIVATION, GRADIENT, SHARED, ANSWER = "activation", "gradient", "shared", "answer"
LANES = (ACTIVATION, GRADIENT, SHARED, ANSWER)  # of messages
PARTS = 64  # tensors of one message, at most: each has a tag of its own
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
        self.acknowledged: dict[Key, list[Key]] = {}

    def _from(self, key: Key) -> int:
        """The rank that a message comes from."""
        return self.where[key[1] - 1 if key[0] == ACTIVATION else key[1] + 1]

    def _group(self, lane: str, sender: int, receiver: int) -> comm.Group:
        return self.lanes.get((lane, sender < receiver), self.group)

    def _make_lanes(self) -> None:
        """A group for each direction. Gloo tells messages apart by their tags and needs none; with
        NCCL a send that waits would hold up what comes behind it."""
        ranks = comm.members(self.group)
        for lane in LANES:
            for is_up in (True, False):
                group = dist.new_group(ranks, use_local_synchronization=True)
                self.lanes[lane, is_up] = group

    def _place(self, group: comm.Group, rank: int) -> int:
        return comm.members(group).index(comm.members(self.group)[rank])

    def _tag(self, key: Key, part: int) -> int:
        number = (key[2] * self.stages + key[1]) * len(LANES) + LANES.index(key[0])
        return number * PARTS + part

    def _send(self, key: Key, to: int, tensor: Tensor, part: int, what: str = "") -> comm.Pending:
        group = self._group(key[0], self.rank, to)
        place, label = self._place(group, to), what or _label(key, part)
        tag = self._tag(key, part)
        return comm.send(tensor, group, place, tag=tag, lane=key[0], label=label, async_op=True)

    def _receive(self, key: Key, of: int, tensor: Tensor, part: int, what: str = "") -> Any:
        group = self._group(key[0], of, self.rank)
        place, label = self._place(group, of), what or _label(key, part)
        tag = self._tag(key, part)
        pending = comm.recv(tensor, group, place, tag=tag, lane=key[0], label=label, async_op=True)
        return tensor, pending

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
        of = self._from(key)
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
        # Its sender had received these of ours before: they need not be kept any longer.
        for sent in self.acknowledged.get(key, ()):
            for pending in self.going.pop(sent, ()):
                pending.wait()
        return tensors

    def _finish_sending(self) -> None:
        for pendings in self.going.values():
            for pending in pendings:
                pending.wait()
        self.going.clear()

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

    def _tell(self, value: Any) -> Any:
        """The last stage tells all ranks what the model returned."""
        last, tensors = self.where[-1], list[Tensor]()
        if self.rank == last:
            text = _written(value, tensors)
            shapes = [(tuple(t.shape), t.dtype) for t in tensors]
            data = torch.frombuffer(bytearray(pickle.dumps((text, shapes))), dtype=torch.uint8)
            parts = [torch.tensor([data.numel()]), data, *tensors]
            pending = [
                self._send((ANSWER, part, 0), other, t.to(self.device), 0)
                for other in range(self.ranks)
                if other != last
                for part, t in enumerate(parts)
            ]
            for p in pending:
                p.wait()
            return value

        def get(part: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
            room = torch.empty(tuple(shape), dtype=dtype, device=self.device)
            tensor, pending = self._receive((ANSWER, part, 0), last, room, 0)
            pending.wait()
            found: Tensor = tensor
            return found

        size = int(get(0, (1,), torch.int64))
        text, shapes = pickle.loads(get(1, (size,), torch.uint8).cpu().numpy().tobytes())
        found = [get(part + 2, shape, dtype) for part, (shape, dtype) in enumerate(shapes)]
        return _read(text, found)


def _label(key: Key, part: int) -> str:
    lane, stage, micro = key
    if lane == ANSWER:
        return f"what the model returned ({stage})"
    of = stage - 1 if lane == ACTIVATION else stage + 1
    more = f" ({part})" if part else ""
    return f"{lane} of micro-batch {micro} from stage {of} for stage {stage}{more}"


def _written(value: Any, tensors: list[Tensor]) -> bytes:
    """A structure of any kind as text, its tensors apart."""

    class Pickler(pickle.Pickler):
        def persistent_id(self, part: Any) -> int | None:
            if not isinstance(part, Tensor):
                return None
            tensors.append(part.detach())
            return len(tensors) - 1

    text = io.BytesIO()
    try:
        Pickler(text).dump(value)
    except Exception as error:
        raise UsageError(
            f"pipeline: what the model returned, a {type(value).__name__}, cannot be sent to the "
            f"other stages: {error}"
        ) from None
    return text.getvalue()


def _read(text: bytes, tensors: list[Tensor]) -> Any:
    class Unpickler(pickle.Unpickler):
        def persistent_load(self, number: Any) -> Tensor:
            found: Tensor = tensors[number]
            return found

    return Unpickler(io.BytesIO(text)).load()
