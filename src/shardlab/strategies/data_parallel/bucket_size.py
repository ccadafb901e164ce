"""``bucket_mb=auto``: the bucket size that suits the link which these ranks have.

With few large buckets, the last one is sent when no backward is left to hide it. With many small
ones there are more messages, each with its latency. And where the threads that send share the cores
that compute, a message that is hidden still costs backward its time, so hiding gains nothing.
All three are measured in the first step: when each gradient came, what messages take, and how much
of that time a core was busy.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardlab import comm
from shardlab.errors import UsageError
from shardlab.strategies.buckets import buckets_of, default_mb

AUTO = "auto"
LEAST_MB = 8.0  # less is sent in so short a time that nothing is measured
SAMPLE_BYTES = 4 * 2**20  # of the message whose time is measured
ROUNDS = 5
SHARES = (1, 2 / 3, 1 / 2, 1 / 3, 1 / 4, 1 / 6, 1 / 8)  # of the default size, which are tried
SMALLEST_MB = 1.0
WORTHWHILE = 1.02  # by which a smaller size must be faster: more messages also cost caches

Stamp = float | torch.cuda.Event


@dataclass(frozen=True)
class Link:
    """What an all-reduce takes: latency, seconds per byte, and the part of that time in which
    backward loses a core to it, from 0 to 1."""

    latency_s: float
    s_per_byte: float
    taken: float


class BucketSize:
    """The size that was asked for, or that is found in the first step and kept from then on."""

    def __init__(
        self,
        asked: float | str,
        first_mb: float,
        params: Mapping[str, nn.Parameter],
        group: comm.Group,
        ranks_here: int,
        measures: bool,
    ) -> None:
        """``ranks_here``: how many ranks share this machine's cores; 0: all of them. ``measures``:
        False leaves ``auto`` at its default, where buckets are not sent by a plain all-reduce."""
        if (isinstance(asked, str) and asked != AUTO) or isinstance(asked, bool):
            raise UsageError(f"bucket_mb is a number of MB or auto, got {asked!r}")
        self.mb = None if isinstance(asked, str) else asked  # None: it is not known yet
        buckets_of({}, (), self.mb, first_mb)  # refuse a wrong size now, not after the first step
        self.is_auto = self.mb is None
        self.first_mb, self.params, self.group = first_mb, params, group
        self.ranks_here, self.measures = ranks_here, measures
        self.stamps: dict[str, Stamp] = {}  # when gradients came, in the first step
        self.hooks = [
            p.register_post_accumulate_grad_hook(partial(self._arrived, name))
            for name, p in params.items()
            if self.is_auto
        ]

    @property
    def chosen(self) -> dict[str, float]:
        return {"bucket_mb": self.mb} if self.is_auto and self.mb is not None else {}

    def _arrived(self, name: str, parameter: nn.Parameter) -> None:
        """The last time counts."""
        self.stamps[name] = stamp(parameter.device)

    def agreed(self, order: Sequence[str]) -> tuple[float, float]:
        """The sizes of buckets and of the first, in MB, the same on every rank. A collective."""
        params = self.params
        if self.mb is None:
            self.mb = default_mb(params)
            size = sum(p.numel() * p.element_size() for p in params.values())
            if self.measures and self.group.size() > 1 and size >= LEAST_MB * 2**20:
                ready, link = self._measured(order)
                self.mb = best(params, order, ready, link, self.first_mb)
        for hook in self.hooks:
            hook.remove()
        self.stamps.clear()
        return self.mb, self.first_mb

    def _measured(self, order: Sequence[str]) -> tuple[list[float], Link]:
        """When the gradients came, in seconds, and the link, as the slowest rank saw them: every
        rank then computes with the same numbers. A gradient that did not come counts as the last.
        """
        came = dict(zip(self.stamps, seconds(list(self.stamps.values())), strict=True))
        end = max(came.values(), default=0.0)
        link = measure(self.group, next(iter(self.params.values())).device, self.ranks_here)
        numbers = [link.latency_s, link.s_per_byte, link.taken]
        numbers += [came.get(name, end) for name in order]
        agreed = torch.tensor(numbers, dtype=torch.float64)
        group = comm.host_group(self.group)
        comm.all_reduce(agreed, group, op="max", label="link and gradient times")
        latency, per_byte, taken, *ready = agreed.tolist()
        return ready, Link(latency, per_byte, taken)

    def state(self) -> dict[str, Tensor]:
        """For a checkpoint: a resumed run has the same buckets."""
        return {name: torch.tensor(mb, dtype=torch.float64) for name, mb in self.chosen.items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take what ``state()`` gave."""
        if self.is_auto and "bucket_mb" in state:
            self.mb = float(state["bucket_mb"])


def stamp(device: torch.device) -> Stamp:
    """This moment: of the host's clock or, on a GPU, of the work that was given to it."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds(stamps: Sequence[Stamp]) -> list[float]:
    """From the first stamp to each."""
    if not stamps:
        return []
    first = stamps[0]
    if isinstance(first, float):
        return [end - first for end in stamps if isinstance(end, float)]
    torch.cuda.synchronize()
    return [first.elapsed_time(end) / 1e3 for end in stamps if not isinstance(end, float)]


def measure(group: comm.Group, device: torch.device, ranks_here: int) -> Link:
    """What all-reduces of two sizes take, and how busy they keep this process. A collective."""

    def timed(message: Tensor) -> tuple[list[float], float]:
        clock, busy = [], []
        for _ in range(ROUNDS):
            began = time.perf_counter(), time.process_time()
            comm.all_reduce(message, group, label="link")
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            clock.append(time.perf_counter() - began[0])
            busy.append(time.process_time() - began[1])
        return sorted(clock), statistics.median(busy)

    small, _ = timed(torch.zeros(256, device=device))
    large, busy = timed(torch.zeros(SAMPLE_BYTES // 4, device=device))
    latency, whole = small[0], statistics.median(large)  # a small message is easily held up
    ranks_here = ranks_here or dist.get_world_size()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    is_spare = device.type == "cuda" or (cores or 1) >= 2 * ranks_here * torch.get_num_threads()
    taken = 0.0 if is_spare else min(1.0, busy / whole)
    return Link(latency, max(0.0, whole - latency) / SAMPLE_BYTES, taken)


# ------------------------------------------------------------------ pure


def best(
    params: Mapping[str, nn.Parameter],
    order: Sequence[str],
    ready: Sequence[float],
    link: Link,
    first_mb: float,
) -> float:
    """The largest of the tried sizes than which no smaller one is worthwhile, in MB."""
    default = default_mb(params)
    sizes = [default, *(mb for share in SHARES[1:] if (mb := default * share) >= SMALLEST_MB)]
    ends = {mb: finish(buckets_of(params, order, mb, first_mb), order, ready, link) for mb in sizes}
    chosen = default
    for mb, end in ends.items():  # from large to small
        if end * WORTHWHILE < ends[chosen]:
            chosen = mb
    return chosen


def finish(
    buckets: Sequence[Mapping[str, Tensor]],
    order: Sequence[str],
    ready: Sequence[float],
    link: Link,
) -> float:
    """When the last bucket has been sent, in seconds after the first gradient came.

    ``ready``: when each gradient comes, in ``order``, if nothing is sent meanwhile.
    """
    came = dict(zip(order, ready, strict=True))
    backward, slowed, free = max(ready), 0.0, 0.0  # what sending has cost it; when the link is free
    for bucket in buckets:
        begin = max(free, max(came[name] for name in bucket) + slowed)
        size = sum(p.numel() * p.element_size() for p in bucket.values())
        free = begin + link.latency_s + size * link.s_per_byte
        slowed += link.taken * max(0.0, min(free, backward + slowed) - begin)
    return max(free, backward + slowed)
