"""What one rank does in a step, noted while its own code runs without peers: see ``plan.graph``.

``Solo`` (simulate.py) tells a ``Log`` of every collective and gets the handle that the strategy, or
PyTorch, waits on; the ``Tracker`` tells it of every operator. Calls are numbered from 0 in every
step. So a ``Wait`` that stands before the ``Start`` of its number waits for that call of the step
before: a strategy may end a step with a gather under way and wait for it in the next forward.

Over Gloo the rank's thread waits. Over NCCL it is the stream of the computation that waits, while
the thread goes on: FSDP sends from streams of its own, so streams and their events are followed,
and what such a stream does stands where the computation is that it waited for last.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from shardlab import comm
from shardlab.ledger import Entry, members
from shardlab.phases import BACKWARD, FORWARD, OPTIMIZER
from shardlab.plan.graph import Event, Group, Mark, Start, Wait, Work
from shardlab.pulse import PULSE

PHASES = {FORWARD: "forward", BACKWARD: "backward", OPTIMIZER: "update"}
_aten = torch.ops.aten
# They make no more than a new view of memory, or room for what comes; a value for the host.
_FREE = {
    _aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided,
    _aten.detach, _aten._unsafe_view, _aten.lift_fresh, _aten.set_, _aten.resize_,
    _aten._local_scalar_dense, _aten.is_same_size,
}  # fmt: skip
# They read as much of their first tensor as they return.
_LOOKUPS = {_aten.embedding, _aten.index, _aten.index_select, _aten.gather, _aten.slice_backward}
# PyTorch's counter knows these only by their names on a GPU.
_FLOPS = {
    **flop_registry,
    _aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[
        _aten._scaled_dot_product_flash_attention
    ],
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        _aten._scaled_dot_product_flash_attention_backward
    ],
}


def _recurrent(times: int) -> Callable[..., int]:
    """FLOPs of a whole recurrent layer: each of its matrices meets every token once, and in
    backward twice. PyTorch's counter has no formula for it."""

    def count(tokens: Tensor, *args: Any, **_: Any) -> int:
        weights = args[0] if isinstance(args[0], list | tuple) else args[:4]
        matrices: int = sum(w.numel() for w in weights if w.dim() == 2)
        return 2 * times * (tokens.numel() // max(1, tokens.shape[-1])) * matrices

    return count


_FLOPS |= {
    _aten.mkldnn_rnn_layer: _recurrent(1), _aten.mkldnn_rnn_layer_backward: _recurrent(2),
    _aten._cudnn_rnn: _recurrent(1), _aten._cudnn_rnn_backward: _recurrent(2),
}  # fmt: skip
# DTensor's collectives: without content they are operators, and reach no process group. With the
# place of the whole tensor: the first argument, or the result.
FUNCTIONAL = "_c10d_functional"
_FUNCTIONAL = {
    "all_reduce": ("all_reduce", 0), "all_gather_into_tensor": ("all_gather", 1),
    "reduce_scatter_tensor": ("reduce_scatter", 0), "all_to_all_single": ("all_to_all", 0),
}  # fmt: skip
_LETTERS = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}


def tensors_of(values: Any) -> list[Tensor]:
    """All of them; of a distributed tensor, this rank's part."""
    return [getattr(t, "_local_tensor", t) for t in tree_leaves(values) if isinstance(t, Tensor)]


def total_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


@functools.cache
def short(dtype: torch.dtype) -> str:
    """``f32`` for torch.float32."""
    name = str(dtype).removeprefix("torch.")
    word = name.rstrip("0123456789")
    return _LETTERS[word] + name.removeprefix(word) if word in _LETTERS else name


def shape_of(tensor: Tensor) -> str:
    return f"{short(tensor.dtype)}[{','.join(map(str, tensor.shape))}]"


# ------------------------------------------------------------------ handles


@dataclass
class Call:
    """A collective that somebody may wait for."""

    number: int
    step: int
    is_waited_for: bool = False


class Handle(dist.Work):
    """What a collective returns: done already, but it notes who waits for it."""

    def __init__(self, log: Log, call: Call, result: list[Tensor]) -> None:
        super().__init__()
        self._log, self._call, self._result = log, call, result

    def wait(self, _timeout: Any = None) -> bool:
        self._log.waited(self._call)
        return True

    synchronize = wait  # type: ignore[assignment]

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def result(self) -> list[Tensor]:
        return self._result

    def get_future(self) -> Any:
        if torch._C._current_graph_task_id() != -1:
            # DDP's reducer asks for it in backward, and waits in C++, unseen, when that ends.
            waited = functools.partial(self._log.waited, self._call)
            torch.autograd.Variable._execution_engine.queue_callback(waited)
        future: Any = _Future()
        future.log, future.call = self._log, self._call
        future.set_result(self._result)
        return future


class _Future(torch.futures.Future):  # type: ignore[type-arg]
    """Of a handle. DDP's communication hooks in Python wait on it, or go on when it is done."""

    log: Log
    call: Call

    def wait(self) -> Any:
        self.log.waited(self.call)
        return super().wait()

    def then(self, callback: Callable[[Any], Any]) -> Any:
        """What is sent next has to wait for this; what is only computed need not be noted."""

        def called(future: Any) -> Any:
            self.log.then = self.call
            try:
                return callback(future)
            finally:
                self.log.then = None

        return super().then(called)


# ------------------------------------------------------------------ streams


@dataclass
class Lane:
    """A stream, or a moment of one: what it has waited for."""

    place: float = 0.0  # the events of the computation before this place are done
    calls: dict[int, Call] = field(default_factory=dict)  # by id

    def join(self, other: Lane) -> None:
        self.place = max(self.place, other.place)
        self.calls |= other.calls


class Log:
    """The events of the step that is under way, if ``is_on``; calls are numbered in any case."""

    def __init__(self, kind: str = "gloo", roles: Sequence[int] = ()) -> None:
        """``roles``: the ranks that do not act alike, of which each has a log of its own."""
        self.has_streams = kind == "nccl"
        self.roles = set(roles)
        self.is_on = False
        self.step = 0
        self.then: Call | None = None
        self.starts: list[Start] = []  # of this step
        self._before = 0  # how many the step before had
        self._events: list[tuple[float, Event]] = []  # by their place
        self._lanes: dict[Any, Lane] = {}
        self._entry: tuple[Entry, list[Call]] | None = None
        self._results: dict[int, Call] = {}  # of functional collectives, by their storage
        self._of_computing: Any = None  # the key of the computation's stream

    def begin_step(self) -> None:
        self.step += 1
        self._before = len(self.starts)
        self.starts, self._events = [], []
        for lane in self._lanes.values():
            lane.place = 0.0

    def events(self) -> list[Event]:
        """In the order of the computation."""
        found = [event for _, event in sorted(self._events, key=lambda pair: pair[0])]
        calls = sum(isinstance(event, Start) for event in found)
        return [
            Wait(event.call + calls) if isinstance(event, Wait) and event.call < 0 else event
            for event in found
        ]

    # -------------------------------------------------------------- what is told

    def operator(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        packet, inputs = func.overloadpacket, tensors_of((args, kwargs))
        outputs = tensors_of(result)
        if func.namespace == FUNCTIONAL:
            self._functional(packet.__name__, inputs, outputs, args)
            return
        if func.is_view or packet in _FREE or func.namespace == "prim":  # "which device?"
            return
        count = _FLOPS.get(packet)
        written = tensors_of(
            [
                value
                for argument, value in zip(func._schema.arguments, args, strict=False)
                if argument.alias_info is not None and argument.alias_info.is_write
            ]
        )
        read = total_bytes(inputs[1:] + outputs if packet in _LOOKUPS else inputs)
        size = read + (total_bytes(written) or total_bytes(outputs))
        flops = 0 if count is None else count(*args, **(kwargs or {}), out_val=result)
        shapes = " ".join(map(shape_of, inputs))
        name = str(packet)
        self._note(Work(name, flops, size, shapes, phase=PHASES.get(PULSE.phase, "")))

    def _functional(
        self, name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor], args: Any
    ) -> None:
        if name in _FUNCTIONAL:
            op, place = _FUNCTIONAL[name]
            group = dist.distributed_c10d._resolve_process_group(args[-1])
            size = total_bytes((inputs, outputs)[place])
            call = self._start(group, op, size, "", op, self._among(group, op, None))
            self._results[outputs[0].untyped_storage()._cdata] = call
        elif name == "wait_tensor":
            found = self._results.pop(inputs[0].untyped_storage()._cdata, None)
            if found is not None:
                self.waited(found)

    def started(
        self,
        group: dist.ProcessGroup,
        op: str,
        whole: Sequence[Tensor],
        result: list[Tensor],
        peer: int | None = None,
    ) -> Handle:
        """A process group was given a collective. Those that ours is made of are one. ``peer``: the
        other end of a message, by its place in the group."""
        if self.then is not None:
            self.waited(self.then)
        among = self._among(group, op, peer)
        if self._entry is None:
            call = self._start(group, op, total_bytes(whole), "", op, among)
            return Handle(self, call, result)
        entry, calls = self._entry
        if not calls:
            calls.append(self._start(group, entry.op, entry.bytes, entry.label, op, among))
        return Handle(self, calls[0], result)

    def _among(self, group: dist.ProcessGroup, op: str, peer: int | None) -> tuple[int, ...]:
        ranks = members(group) if self.roles else []
        if peer is not None and ranks:
            ends = dist.get_rank(), ranks[peer]
            ranks = list(ends if op == "send" else ends[::-1])
        found = tuple(rank for rank in ranks if rank in self.roles)
        return found if len(found) > 1 else ()

    def _start(
        self,
        group: dist.ProcessGroup,
        op: str,
        size: int,
        label: str,
        sent: str,
        among: tuple[int, ...],
    ) -> Call:
        call = Call(len(self.starts), self.step)
        self.starts.append(Start(call.number, op, size, _group(group), label, sent, among))
        if self.is_on:
            self._note(self.starts[-1])
        return call

    def mark(self, name: str, stage: int = 0, micro: int = 0) -> None:
        """A pipeline begins an action, or has done all of a step."""
        if self.is_on:
            self._note(Mark(name, stage, micro))

    def waited(self, call: Call) -> None:
        if call.is_waited_for:
            return
        lane = self._lane()
        if lane is not None:
            lane.calls[id(call)] = call
            return
        call.is_waited_for = True
        if self.is_on and self.step - call.step < 2:
            self._note(self._wait(call))

    def _wait(self, call: Call) -> Wait:
        """For a call of the step before, counted from that step's end: its first calls may be other
        ones, such as the shapes that stages tell each other once."""
        return Wait(call.number - (0 if call.step == self.step else self._before))

    def _note(self, event: Event) -> None:
        lane = self._lane()
        self._events.append((len(self._events) if lane is None else lane.place, event))

    # -------------------------------------------------------------- streams

    def _lane(self, key: Any = None) -> Lane | None:
        """That of a stream, or the current one; None for the computation's own."""
        if not self.has_streams:
            return None
        key = _key(_current()) if key is None else key
        return None if key == self._of_computing else self._lanes.setdefault(key, Lane())

    def now(self) -> float:
        """The place that the computation has come to: between two events."""
        return len(self._events) - 0.5

    def moment(self, stream: Any) -> Lane:
        lane = self._lane(_key(stream))
        return Lane(self.now()) if lane is None else Lane(lane.place, dict(lane.calls))

    def waits_for(self, stream: Any, moment: Lane) -> None:
        lane = self._lane(_key(stream))
        if lane is not None:
            lane.join(moment)
            return
        for call in moment.calls.values():
            if not call.is_waited_for:
                call.is_waited_for = True
                if self.is_on and self.step - call.step < 2:
                    self._events.append((len(self._events), self._wait(call)))

    # -------------------------------------------------------------- around a run

    @contextmanager
    def following(self) -> Iterator[Log]:
        """Inside, our collectives are known by their ledger entries, and streams are followed."""
        begin = comm._begin
        self._of_computing = _key(_current())

        def noted(entry: Entry, group: Any, async_op: bool, start: Any, *rest: Any) -> Any:
            def within() -> Any:
                self._entry = entry, []
                try:
                    return start()
                finally:
                    self._entry = None

            return begin(entry, group, async_op, within, *rest)

        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(comm, "_begin", noted))
            for kind, name, method in self._stream_methods():
                stack.enter_context(mock.patch.object(kind, name, method))
            yield self

    def _stream_methods(self) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
        if not self.has_streams:
            return
        device: Any = torch.cuda if torch.cuda.is_available() else torch.cpu
        streams, events = device.Stream, device.Event
        wait_event, wait_stream = streams.wait_event, streams.wait_stream
        record_event, record, wait = streams.record_event, events.record, events.wait

        def waits_for_event(stream: Any, event: Any) -> None:
            wait_event(stream, event)
            self.waits_for(stream, getattr(event, "moment", Lane()))

        def waits_for_stream(stream: Any, other: Any) -> None:
            wait_stream(stream, other)
            self.waits_for(stream, self.moment(other))

        def recorded(stream: Any, *event: Any) -> Any:
            result = record_event(stream, *event) or events()  # a CPU's returns None
            result.moment = self.moment(stream)
            return result

        def records(event: Any, stream: Any = None) -> Any:
            event.moment = self.moment(stream or _current())
            return record(event, stream)

        def waits(event: Any, stream: Any = None) -> None:
            wait(event, stream)
            self.waits_for(stream or _current(), getattr(event, "moment", Lane()))

        yield streams, "wait_event", waits_for_event
        yield streams, "wait_stream", waits_for_stream
        yield streams, "record_event", recorded
        yield events, "record", records
        yield events, "wait", waits


def _current() -> Any:
    """The current stream; where the CPU's operators stand for a GPU's, PyTorch's pretended one."""
    if torch.cuda.is_available():
        return torch.cuda.current_stream()
    return torch.cpu.current_stream()


def _key(stream: Any) -> Any:
    return getattr(stream, "cuda_stream", id(stream))


def _group(group: dist.ProcessGroup) -> Group:
    """With ``context`` in a pipeline they are not equally far apart: the mean distance counts."""
    ranks = members(group)
    return Group(len(ranks), round((ranks[-1] - ranks[0]) / max(1, len(ranks) - 1)) or 1)
