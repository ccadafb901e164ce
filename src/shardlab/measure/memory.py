"""Peak memory: what the allocator held at its fullest, not what is left afterwards."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

T = TypeVar("T")


def peak_bytes(device: torch.device, work: Callable[[], T]) -> tuple[T, int]:
    """The result of ``work`` and the most bytes that its tensors held at one time.

    Counts what ``work`` allocates, so let it build what is to be weighed. On a GPU PyTorch's
    allocator keeps the peak; on a CPU it keeps none, so the profiler notes each allocation.
    That slows the work: do not time it. What Gloo allocates for itself is not in either.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        result = work()
        torch.cuda.synchronize(device)
        return result, torch.cuda.max_memory_allocated(device) - before
    with (
        _lingering_waits(),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler,
    ):
        result = work()
    kineto = profiler.profiler.kineto_results
    return result, _peak(sorted(_allocations(kineto.experimental_event_tree())))


@contextmanager
def _lingering_waits() -> Iterator[None]:
    """Give Gloo's thread time to let go of a collective's tensors before we do.

    The profiler sees what this thread releases. Were Gloo's the last to hold a buffer, its
    release would go unseen, and the buffer would count as held until its address is used again.
    """
    wait = dist.Work.wait

    def linger(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = wait(self, *args, **kwargs)
        time.sleep(0.003)
        return result

    dist.Work.wait = linger  # type: ignore[method-assign]
    try:
        yield
    finally:
        dist.Work.wait = wait  # type: ignore[method-assign]


def _allocations(events: list[Any]) -> Iterator[tuple[int, int, int]]:
    """(time, address, bytes) of each allocation, negative bytes for a release."""
    for event in events:
        tag, details = event.typed
        if tag == torch._C._profiler._EventType.Allocation and details.device.type == "cpu":
            yield event.start_time_ns, details.ptr, details.alloc_size
        yield from _allocations(event.children)


def _peak(allocations: list[tuple[int, int, int]]) -> int:
    """The profiler's own running total is no use: it forgets releases between two profiles."""
    held: dict[int, int] = {}
    total = peak = 0
    for _time, address, size in allocations:
        if size > 0:
            total -= held.pop(address, 0)  # released unseen, or it could not be given out again
            held[address] = size
            total += size
            peak = max(peak, total)
        else:
            total -= held.pop(address, 0)  # what was there before is not ours
    return peak
