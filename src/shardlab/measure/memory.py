"""Peak memory: what the allocator held at its fullest, not what is left afterwards."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
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
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = work()
    kineto = profiler.profiler.kineto_results
    return result, _peak(sorted(_allocations(kineto.experimental_event_tree())))


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
            held[address] = size
            total += size
            peak = max(peak, total)
        else:
            total -= held.pop(address, 0)  # what was there before is not ours
    return peak
