"""What a step really did: what it sent and when, what it held. Nobody's word is taken for it."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

T = TypeVar("T")

BACKWARD = "shardlab::backward"
# PyTorch's own names for what is launched, ours, and which argument is the whole tensor. They
# are in the profiler's trace for every backend, whoever launched them, in Python or in C++.
_LAUNCHES = {
    "c10d::allreduce_": ("all_reduce", 0),
    "c10d::broadcast_": ("broadcast", 0),
    "c10d::_allgather_base_": ("all_gather", 0),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1),
    "c10d::alltoall_base_": ("all_to_all", 1),
    "c10d::barrier": ("barrier", -1),
}


# ------------------------------------------------------------------ what was sent, and when


@dataclass
class Message:
    """A collective as it was launched. Times are of the profiler's clock, in nanoseconds."""

    op: str
    bytes: int
    launched_ns: int
    ranks: int | None = None  # none: the profiler cannot tell


@dataclass
class Sent:
    messages: list[Message] = field(default_factory=list)
    backward_ns: tuple[int, int] | None = None  # the last: its begin and end
    running: list[tuple[int, int, int]] = field(default_factory=list)  # (begin, end, bytes): Gloo's


def sent_by(work: Callable[[], T]) -> tuple[T, Sent]:
    """The result of ``work`` and the collectives that it launched, in order."""
    with (
        backward_marked(),
        profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler,
    ):
        result = work()
    sent = Sent()
    events = sorted(walk(profiler), key=lambda event: event.start_time_ns)
    for event in events:
        if event.name == BACKWARD:
            sent.backward_ns = (event.start_time_ns, event.end_time_ns)
        elif event.name.startswith("gloo:"):
            size = _size(event.typed[1].inputs)
            sent.running.append((event.start_time_ns, event.end_time_ns, size))
        elif event.name in _LAUNCHES:
            sent.messages.append(_message(event))
    return result, sent


def _message(event: Any) -> Message:
    op, position = _LAUNCHES[event.name]
    inputs = event.typed[1].inputs
    if position < 0:
        return Message(op, 0, event.start_time_ns)
    size = _size([inputs[position]])
    ranks = None
    if op in ("all_gather", "reduce_scatter"):
        part = _size([inputs[1 - position]])
        ranks = round(size / part) if part else None
    return Message(op, size, event.start_time_ns, ranks)


def _size(inputs: list[Any]) -> int:
    """Bytes of the tensors among an operator's arguments."""
    total = 0
    for value in inputs:
        for tensor in value if isinstance(value, list) else [value]:
            if hasattr(tensor, "sizes"):
                total += math.prod(tensor.sizes) * tensor.dtype.itemsize
    return total


def walk(profiler: Any) -> Iterator[Any]:
    """Every event of a profile, of all threads."""
    waiting = list(profiler.profiler.kineto_results.experimental_event_tree())
    while waiting:
        event = waiting.pop()
        yield event
        waiting += event.children


@contextmanager
def backward_marked() -> Iterator[None]:
    """Each backward is a span in the profile."""
    original = torch.autograd.backward

    def marked(*args: Any, **options: Any) -> None:
        with record_function(BACKWARD):
            original(*args, **options)

    torch.autograd.backward = marked
    try:
        yield
    finally:
        torch.autograd.backward = original


# ------------------------------------------------------------------ what is held


@dataclass
class Held:
    """Bytes of the tensors that are alive, by what they are for."""

    params: int
    optimizer: int
    rest: int  # gradients; between steps, what should not be there


class Alive:
    """Weighs the tensors that come while it is open. Buffers of the model do not count."""

    def __enter__(self) -> Alive:
        gc.collect()
        gc.freeze()  # what is here already is hidden from what follows
        return self

    def __exit__(self, *_: object) -> None:
        gc.unfreeze()

    def weigh(self, model: nn.Module) -> Held:
        gc.collect()
        # By the type: to ask an object itself may run its code.
        things = gc.get_objects()
        tensors = [t for t in things if issubclass(type(t), Tensor)]
        optimizers = [t for t in things if issubclass(type(t), torch.optim.Optimizer)]
        params = [t for t in tensors if isinstance(t, nn.Parameter)]
        # A gradient that only C++ holds becomes an object when asked for.
        tensors += [p.grad for p in params if p.grad is not None]
        states = [v for o in optimizers for entry in o.state.values() for v in entry.values()]
        state = [value for value in states if isinstance(value, Tensor)]
        seen = set(_storages(model.buffers()))
        held = {}
        for name, group in (("optimizer", state), ("params", params), ("rest", tensors)):
            found = _storages(group)
            held[name] = sum(size for where, size in found.items() if where not in seen)
            seen |= found.keys()
        return Held(**held)


def _storages(tensors: Any) -> dict[int, int]:
    """Address and bytes of each storage once. Of a distributed tensor, this rank's part."""
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
    held: int  # bytes allocated since the first phase and not released
    peak: int  # the most that were held beyond those at the beginning
    forward_peak: int | None  # the same before the first backward; none: not known


class Memory:
    """Follows every allocation over several phases, those of C++ too.

    Nothing may be released between phases. On a CPU the profiler notes each allocation, which
    slows the work: do not time it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.held: dict[int, int] = {}  # bytes by address
        if device.type == "cuda":
            self.before = torch.cuda.memory_allocated(device)

    def phase(self, work: Callable[[], T]) -> tuple[T, Phase]:
        if self.device.type == "cuda":
            return self._phase_on_gpu(work)
        with (
            backward_marked(),
            profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler,
        ):
            result = work()
            gc.collect()
        kind = torch._C._profiler._EventType.Allocation
        total = first = sum(self.held.values())
        peak, forward_peak = total, None
        for event in sorted(walk(profiler), key=lambda event: event.start_time_ns):
            if event.name == BACKWARD and forward_peak is None:
                forward_peak = peak - first
            tag, details = event.typed
            if tag != kind or details.device.type != "cpu":
                continue
            if details.alloc_size > 0:
                total += details.alloc_size - self.held.pop(details.ptr, 0)
                self.held[details.ptr] = details.alloc_size
                peak = max(peak, total)
            else:
                total -= self.held.pop(details.ptr, 0)
        return result, Phase(total, peak - first, forward_peak)

    def _phase_on_gpu(self, work: Callable[[], T]) -> tuple[T, Phase]:
        torch.cuda.synchronize(self.device)
        first = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        result = work()
        gc.collect()
        torch.cuda.synchronize(self.device)
        peak = torch.cuda.max_memory_allocated(self.device) - first
        return result, Phase(torch.cuda.memory_allocated(self.device) - self.before, peak, None)
