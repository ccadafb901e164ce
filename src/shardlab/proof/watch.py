"""What a step really did: what it sent and when, what it held. Measured, not claimed."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

T = TypeVar("T")

BACKWARD, SETTLE = "shardlab::backward", "shardlab::settle"
LOOKS = 10  # at what is held, at most, until it is the same twice
GRADIENT = "torch::autograd::AccumulateGrad"
# PyTorch's own names for what is launched, ours, and which argument is the tensor. They are in the
# profiler's trace for every backend, whoever launched them, in Python or in C++.
_LAUNCHES: dict[str, tuple[str, Any]] = {
    "c10d::allreduce_": ("all_reduce", 0),
    "c10d::allreduce_coalesced_": ("all_reduce", 0),
    "c10d::broadcast_": ("broadcast", 0),
    "c10d::reduce_": ("reduce", 0),
    "c10d::_allgather_base_": ("all_gather", 0),
    "c10d::allgather_into_tensor_coalesced_": ("all_gather", 0),
    "c10d::allgather_": ("all_gather", 1),
    "c10d::allgather_coalesced_": ("all_gather", 1),
    "c10d::gather_": ("gather", 1),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1),
    "c10d::reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "c10d::reduce_scatter_": ("reduce_scatter", 0),
    "c10d::scatter_": ("scatter", 0),
    "c10d::alltoall_base_": ("all_to_all", 1),
    "c10d::alltoall_": ("all_to_all", 1),
    "c10d::barrier": ("barrier", None),
    "c10d::monitored_barrier_": ("barrier", None),
    "c10d::send": ("send", 0),
    "c10d::recv_": ("recv", 0),
    "c10d::recv_any_source_": ("recv", 0),
}
# Of these the profiler knows one rank's part alone, as they take lists of the others'.
_OF_PARTS = {
    "c10d::allgather_",
    "c10d::allgather_coalesced_",
    "c10d::gather_",
    "c10d::reduce_scatter_",
    "c10d::scatter_",
}


# ------------------------------------------------------------------ what was sent, and when


@dataclass
class Message:
    """A collective as it was launched. Times are of the profiler's clock, in nanoseconds."""

    op: str
    bytes: int
    launched_ns: int
    ranks: int | None = None  # None: the profiler does not know
    axis: str | None = None  # that cuts the model, if one has sent it


class Running(NamedTuple):
    """A collective at work on a thread of Gloo. (NCCL's are kernels, and not looked for.)"""

    op: str
    bytes: int
    begin_ns: int
    end_ns: int


@dataclass
class Sent:
    messages: list[Message] = field(default_factory=list)
    backward_ns: tuple[int, int] | None = None  # the last: its begin and end
    last_gradient_ns: int | None = None  # when its last gradient was made
    running: list[Running] = field(default_factory=list)


def sent_by(work: Callable[[], None], settle: Callable[[], None]) -> Sent:
    """The collectives that ``work`` launched, in order.

    ``settle`` waits for what it left under way, and is not counted: a collective that ends after
    the profiler has crashes the process (torch 2.13).
    """
    with (
        around_backward(lambda: record_function(BACKWARD)),
        profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler,
    ):
        work()
        with record_function(SETTLE):
            settle()
    events = sorted(walk(profiler), key=lambda event: event.start_time_ns)
    limit = next(event.start_time_ns for event in events if event.name == SETTLE)
    sent = Sent()
    for event in events:
        if event.name == BACKWARD:
            sent.backward_ns = (event.start_time_ns, event.end_time_ns)
        elif event.name == GRADIENT:
            sent.last_gradient_ns = event.start_time_ns
        elif event.name.startswith("gloo:"):
            op, size = event.name.removeprefix("gloo:"), _size(event.typed[1].inputs)
            sent.running.append(Running(op, size, event.start_time_ns, event.end_time_ns))
        elif event.name in _LAUNCHES and event.start_time_ns < limit:
            sent.messages.append(_message(event))
    return sent


def _message(event: Any) -> Message:
    op, position = _LAUNCHES[event.name]
    inputs = event.typed[1].inputs
    size = 0 if position is None else _size(inputs[position])
    ranks = None
    if event.name in _OF_PARTS:  # among all ranks, as far as anybody can tell
        size *= dist.get_world_size()
    elif op in ("all_gather", "reduce_scatter") and (part := _size(inputs[1 - position])):
        ranks = round(size / part)
    return Message(op, size, event.start_time_ns, ranks)


def _size(inputs: Any) -> int:
    """Bytes of the tensors among an operator's arguments."""
    tensors = [t for t in tree_leaves(inputs) if hasattr(t, "sizes")]
    return sum(math.prod(t.sizes) * t.dtype.itemsize for t in tensors)


def walk(profiler: Any) -> Iterator[Any]:
    """Every event of a profile, of all threads."""
    waiting = list(profiler.profiler.kineto_results.experimental_event_tree())
    while waiting:
        event = waiting.pop()
        yield event
        waiting += event.children


@contextmanager
def around_backward(span: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Each backward runs inside a new ``span()``."""
    original = torch.autograd.backward

    def spanned(*args: Any, **options: Any) -> None:
        with span():
            original(*args, **options)

    with mock.patch.object(torch.autograd, "backward", spanned):
        yield


# ------------------------------------------------------------------ what is held


@dataclass
class Held:
    """Bytes of the tensors that are alive, by what they are for."""

    params: int
    optimizer: int
    rest: int  # gradients; between steps, what should not be there


def hide() -> None:
    """Hide all objects that are here from looks at what is alive, and from the garbage collector.

    They stay hidden. PyTorch's modules alone have 300,000 objects, and to pass over them takes a
    sixth of a second each time. What nobody needs any more is freed all the same, but for rings.
    """
    gc.collect()
    gc.freeze()


class Alive:
    """Weighs the tensors that come after it was made. Buffers of the model do not count."""

    def __init__(self) -> None:
        hide()

    def weigh(self, model: nn.Module) -> Held:
        """What is held, once Gloo's threads have let go of what they have done."""
        held = self._weigh(model)
        for _ in range(LOOKS):
            time.sleep(0.01)
            before, held = held, self._weigh(model)
            if held == before:
                break
        return held

    def _weigh(self, model: nn.Module) -> Held:
        gc.collect()
        seen = set(_storages(model.buffers()))
        held = {}
        for name, group in living_tensors().items():
            found = _storages(group)
            held[name] = sum(size for where, size in found.items() if where not in seen)
            seen |= found.keys()
        return Held(**held)


def living_tensors() -> dict[str, list[Tensor]]:
    """Every tensor that Python knows of: optimizer state, parameters, and all (the rest)."""
    # By the type: to ask an object itself may run its code.
    things = gc.get_objects()
    tensors = [t for t in things if issubclass(type(t), Tensor)]
    optimizers = [t for t in things if issubclass(type(t), torch.optim.Optimizer)]
    params: list[Tensor] = [t for t in tensors if isinstance(t, nn.Parameter)]
    # A gradient that only C++ holds becomes an object when asked for.
    tensors += [p.grad for p in params if p.grad is not None]
    states = [v for o in optimizers for entry in o.state.values() for v in entry.values()]
    state = [value for value in states if isinstance(value, Tensor)]
    return {"optimizer": state, "params": params, "rest": tensors}


def _storages(tensors: Any) -> dict[int, int]:
    """Address and bytes of each storage once; for a distributed tensor, of this rank's part."""
    found = {}
    for tensor in tensors:
        local = getattr(tensor, "_local_tensor", tensor)
        try:
            storage = local.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
        except (NotImplementedError, RuntimeError):  # a fake tensor, or none with a storage
            continue
    found.pop(0, None)
    return found


@dataclass
class Phase:
    held: int  # bytes of what was made since the first phase and is still there, at the end
    peak: int  # the most there was beyond what there was at the beginning
    forward_peak: int | None  # the same before the first backward


class Memory(TorchDispatchMode):
    """Follows the storage of every tensor that is made, in C++ too, until it is gone.

    The profiler would miss releases on Gloo's own threads. To look slows the work: do not time it.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive: dict[int, StorageWeakRef] = {}
        self.total = self.peak = 0  # of the last count; the total is an upper bound in between

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._note(getattr(leaf, "_local_tensor", leaf))
        return result

    def _note(self, tensor: Tensor) -> None:
        if tensor.is_meta:  # it has a size, and no memory
            return
        storage = tensor.untyped_storage()
        if storage._cdata not in self.alive:
            self.alive[storage._cdata] = StorageWeakRef(storage)
            self.total += storage.nbytes()
        # Something may have been released, or given a new size, since the last count.
        if self.total > self.peak:
            self.peak = max(self.peak, self.count())

    def count(self) -> int:
        self.total = 0
        for key, reference in list(self.alive.items()):
            storage: Any = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None:
                del self.alive[key]
            else:
                self.total += storage.nbytes()
        return self.total

    def phase(self, work: Callable[[], T]) -> tuple[T, Phase]:
        before = self.peak = self.count()
        forward: list[int] = []

        @contextmanager
        def note_peak() -> Iterator[None]:
            forward.append(self.peak - before)
            yield

        with around_backward(note_peak), self:
            result = work()
        gc.collect()
        return result, Phase(self.count(), self.peak - before, forward[0] if forward else None)
