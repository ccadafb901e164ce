"""Peak memory: what tensors held at the fullest moment, and what for; not what is left."""

from __future__ import annotations

import gc
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardlab.measure.fields import CAUSES
from shardlab.proof import watch

if TYPE_CHECKING:
    from shardlab.config import Config
    from shardlab.strategies.base import Strategy
    from shardlab.workloads.base import Batch, Workload
    from shardlab.world import World

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Allocation:
    """A piece of memory and its life. Times are of the wall clock, in nanoseconds."""

    address: int
    size: int
    begin: int
    end: int | None = None  # None: still there


def peak_bytes(device: torch.device, work: Callable[[], T]) -> tuple[T, int]:
    """The result of ``work`` and the most bytes that its tensors held at one time."""
    result, allocations = trace(device, work)
    return result, sum(a.size for a in at_peak(allocations))


def trace(device: torch.device, work: Callable[[], T]) -> tuple[T, list[Allocation]]:
    """The result of ``work`` and every allocation it made.

    It counts what ``work`` allocates, so let it build what is to be weighed. On a CPU the profiler
    notes each allocation, on a GPU PyTorch's own allocator does. Both slow the work: do not time
    it. What Gloo and NCCL allocate for themselves is not in it.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.memory._record_memory_history(context=None, stacks="python", max_entries=10**6)
        try:
            result = work()
            torch.cuda.synchronize(device)
            events = torch.cuda.memory._snapshot(device)["device_traces"][device.index or 0]
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)
        signs = {"alloc": 1, "free_completed": -1}
        return result, lives(
            (e["time_us"] * 1000, e["addr"], e["size"] * signs[e["action"]])
            for e in events
            if e["action"] in signs
        )
    with _lingering_waits():
        return on_cpu(work)


def on_cpu(work: Callable[[], T]) -> tuple[T, list[Allocation]]:
    """The result of ``work`` and every allocation of this thread's on the CPU."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = work()
    is_allocation = torch._C._profiler._EventType.Allocation
    return result, lives(
        sorted(
            (event.start_time_ns, event.typed[1].ptr, event.typed[1].alloc_size)
            for event in watch.walk(profiler)
            if event.typed[0] == is_allocation and event.typed[1].device.type == "cpu"
        )
    )


@contextmanager
def _lingering_waits() -> Iterator[None]:
    """Give Gloo's thread time to let go of a collective's tensors before we do.

    The profiler sees what this thread releases. Were Gloo's the last to hold a buffer, its
    release would go unseen, and the buffer would count as held until its address is used again.
    """

    def lingering(wait: Callable[..., Any]) -> Callable[..., Any]:
        def linger(*args: Any, **kwargs: Any) -> Any:
            result = wait(*args, **kwargs)
            time.sleep(0.003)
            return result

        return linger

    with (
        mock.patch.object(dist.Work, "wait", lingering(dist.Work.wait)),
        mock.patch.object(funcol, "wait_tensor", lingering(funcol.wait_tensor)),  # of a DTensor
        mock.patch.object(dist, "_broadcast_coalesced", _broadcast_coalesced),
    ):
        yield


def _broadcast_coalesced(
    group: dist.ProcessGroup, tensors: Sequence[Tensor], size: int, source: int = 0
) -> None:
    """Like DDP's, which waits in C++, where we cannot linger: as many bytes in as large a copy."""
    for dtype in dict.fromkeys(t.dtype for t in tensors):
        waiting = [t for t in tensors if t.dtype == dtype]
        while waiting:
            part: list[Tensor] = []
            held = 0
            while waiting and (not part or held < size):
                part.append(waiting.pop(0))
                held += part[-1].numel() * part[-1].element_size()
            flat = torch.cat([t.detach().reshape(-1) for t in part])
            dist.broadcast(flat, group=group, group_src=source, async_op=True).wait()
            pieces = flat.split([t.numel() for t in part])
            for tensor, piece in zip(part, pieces, strict=True):
                tensor.detach().copy_(piece.view(tensor.shape))


def lives(events: Iterable[tuple[int, int, int]]) -> list[Allocation]:
    """Allocations from (time, address, bytes), in order; bytes below 1 are a release.

    The profiler's own running total is no use: it forgets releases between two profiles.
    """
    held: dict[int, Allocation] = {}
    done: list[Allocation] = []
    for now, address, size in events:
        # An address that is given out again was released unseen. What is released and not in
        # ``held`` was there before us.
        if address in held:
            done.append(replace(held.pop(address), end=now))
        if size > 0:
            held[address] = Allocation(address, size, now)
    return [*done, *held.values()]


def at_peak(
    allocations: Sequence[Allocation], since: int | None = None, until: int | None = None
) -> list[Allocation]:
    """Those that were there when there was most, between two moments if they are given."""
    changes = [(a.begin, a.size) for a in allocations]
    changes += [(a.end, -a.size) for a in allocations if a.end is not None]
    if since is not None:
        changes.append((since, 0))  # what was there at its beginning counts
    total = most = when = 0
    for now, size in sorted(changes):
        total += size
        inside = (since is None or now >= since) and (until is None or now < until)
        if inside and total > most:
            most, when = total, now
    return held_at(allocations, when)


def held_at(allocations: Sequence[Allocation], when: int) -> list[Allocation]:
    return [a for a in allocations if a.begin <= when and (a.end is None or a.end > when)]


# ------------------------------------------------------------------ what for


def data_address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@dataclass
class Causes:
    """Notes during a step what memory is for. Addresses are used again, so each note has a time."""

    looks: list[tuple[int, str, set[int]]] = field(default_factory=list)  # (time, cause, addresses)
    forwards: list[tuple[int, int]] = field(default_factory=list)  # begin and end
    # Of the last step: "update", when backward is done, and "between", when the update is.
    moments: dict[str, int] = field(default_factory=dict)
    address: Callable[[Tensor], int] = data_address

    def look(self, *, with_gradients: bool) -> None:
        """Which tensors are parameters and optimizer state now; the rest, if asked, gradients."""
        now = time.time_ns()
        found = {name: self._addresses(group) for name, group in watch.living_tensors().items()}
        self.looks.append((now, "parameters", found["params"]))
        self.looks.append((now, "optimizer", found["optimizer"]))
        if with_gradients:
            self.looks.append((now, "gradients", found["rest"]))

    def note_collective(self, tensors: Iterable[Tensor]) -> None:
        """A collective works on these now: buckets, and blocks put together for use."""
        self.looks.append((time.time_ns(), "buckets", self._addresses(tensors)))

    def _addresses(self, tensors: Iterable[Tensor]) -> set[int]:
        """Addresses of their storages; for a distributed tensor, of this rank's part."""
        found = set()
        for tensor in tensors:
            try:
                found.add(self.address(getattr(tensor, "_local_tensor", tensor)))
            except (NotImplementedError, RuntimeError):  # one without a storage
                continue
        return found - {0}

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around ``gradients()``: forward is what comes before each backward."""
        began = time.time_ns()

        @contextmanager
        def backward() -> Iterator[None]:
            nonlocal began
            self.forwards.append((began, time.time_ns()))
            self.look(with_gradients=False)
            yield
            began = time.time_ns()

        with watch.around_backward(backward), _Collectives(self):
            yield

    def of(self, allocations: Sequence[Allocation]) -> dict[str, int]:
        """Bytes by cause, and in total, of allocations that were there at one time."""
        by_address: dict[int, list[tuple[int, str]]] = {}
        for now, cause, addresses in self.looks:
            for address in addresses:
                by_address.setdefault(address, []).append((now, cause))
        starts = [begin for begin, _ in self.forwards]
        result = dict.fromkeys(CAUSES, 0)
        for a in allocations:
            seen = {
                cause
                for now, cause in by_address.get(a.address, ())
                if a.begin <= now and (a.end is None or now < a.end)
            }
            i = bisect_right(starts, a.begin) - 1
            made_in_forward = i >= 0 and a.begin < self.forwards[i][1]
            named = next((c for c in CAUSES if c in seen), None)
            result[named or ("activations" if made_in_forward else "other")] += a.size
        return {"total": sum(result.values()), **result}


class _Collectives(TorchDispatchMode):
    """Notes which memory collectives work on: buckets, and blocks put together for use."""

    def __init__(self, causes: Causes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.causes = causes

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.causes.note_collective(t for t in tree_leaves(args) if isinstance(t, Tensor))
        return func(*args, **(kwargs or {}))


# ------------------------------------------------------------------ a rank, built and run

Batches = Callable[["Workload", "Config", "World"], Iterable[list["Batch"]]]


def run_steps(
    workload: Workload,
    config: Config,
    world: World,
    causes: Causes,
    batches: Batches,
    on_built: Callable[[Strategy], None] = lambda _: None,
) -> int:
    """Build the config's strategy, run its steps, note what is held. Returns when it was built."""
    from shardlab.training import builders

    watch.hide()  # a look passes over what is here already
    strategy = builders.build_strategy(config, workload, world)
    on_built(strategy)
    built = time.time_ns()
    for microbatches in batches(workload, config, world):
        with causes.step():
            strategy.gradients(microbatches)
        causes.look(with_gradients=True)
        causes.moments["update"] = time.time_ns()
        strategy.step()
        causes.look(with_gradients=False)
        causes.moments["between"] = time.time_ns()
    # A collective that ends after the profiler has crashes the process (torch 2.13).
    strategy.settle()
    return built


def weights(
    allocations: Sequence[Allocation], causes: Causes, built: int
) -> dict[str, dict[str, int]]:
    """Bytes by cause at two peaks, while model and strategy are built and in the steps after, and
    at two moments of a step: before the update, and between two steps."""
    return {
        "building": causes.of(at_peak(allocations, until=built)),
        "step": causes.of(at_peak(allocations, since=built)),
        **{name: causes.of(held_at(allocations, when)) for name, when in causes.moments.items()},
    }
