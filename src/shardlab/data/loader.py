"""Makes batches on the device from sample numbers, ahead of the step that needs them.

A background thread prepares the next steps' micro-batches while the loop computes; how long the
loop still waits for one is the step's ``data_ms``. The sampler decides order and content, at any
depth: a data set is a function of sample numbers. (A data set that draws from torch's global random
state would share it with the model from another thread: use data.prefetch 0 for it.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from shardlab.batch import Batch, Dataset, NeverEmpty
from shardlab.data import sampler
from shardlab.errors import UsageError

T = TypeVar("T")


@runtime_checkable
class AugmentedDataset(Dataset, Protocol):
    """A data set whose samples look different in each epoch (by a random crop, for example)."""

    def batch_in(self, ids: Sequence[int], epochs: Sequence[int]) -> Batch: ...


@dataclass(frozen=True)
class Order:
    """What is read when: the sampler's arguments, less the step."""

    length: int
    global_batch: int
    accumulate: int
    seed: int
    shuffle: bool
    mode: str

    def __post_init__(self) -> None:
        if self.length == 0:
            raise UsageError("the data set has no samples")

    def share(self, step: int, ranks: int, rank: int) -> list[sampler.Draw]:
        """The micro-batches of one rank in a step, as numbers."""
        whole = sampler.draw(
            step, self.global_batch, self.length, self.seed, self.shuffle, self.mode
        )
        parts = [sampler.rank_share(values, ranks, rank, self.accumulate) for values in whole]
        return [sampler.Draw(ids, epochs) for ids, epochs in zip(*parts, strict=True)]


@dataclass(frozen=True)
class Step:
    """A step's micro-batches, and what to wait for before they are read."""

    microbatches: list[Batch]
    copied: Any = None  # a CUDA event after the copies to the device; None: there were none


def load(
    dataset: Dataset,
    order: Order,
    steps: int,
    *,
    ranks: int,
    rank: int,
    device: torch.device,
    dtype: torch.dtype | None = None,
    depth: int = 0,
    first: int = 0,
) -> Generator[Step, None, None]:
    """A rank's steps from ``first`` on, ``depth`` of them prepared ahead; floats as ``dtype``.

    Close it (or exhaust it) and its thread has ended. An error in the data set is raised where
    its step would have come, with the traceback of the thread.
    """

    def prepare(step: int) -> Step:
        read = order.share(step, ranks, rank)
        return Step([cast(fetch(dataset, part, order, step), dtype) for part in read])

    if depth == 0:
        for step in map(prepare, range(first, steps)):
            yield replace(step, microbatches=[b.to(device) for b in step.microbatches])
    elif device.type == "cuda":
        stream = torch.cuda.Stream(device)
        for step in ahead(lambda i: _copy(prepare(i), device, stream), steps, depth, first):
            yield _arrived(step, device)
    else:
        yield from ahead(prepare, steps, depth, first)


def fetch(dataset: Dataset, part: sampler.Draw, order: Order, step: int) -> Batch:
    if isinstance(dataset, NeverEmpty):
        if not len(part.ids):
            # One of the step's own: what it uses of the model gets a gradient in one process too.
            return dataset.stand_in(int(order.share(step, 1, 0)[0].ids[0]))
        dataset = dataset.whole
    if isinstance(dataset, AugmentedDataset):
        return dataset.batch_in(part.ids.tolist(), part.epochs.tolist())
    return dataset.batch(part.ids.tolist())


def ahead(
    make: Callable[[int], T], count: int, depth: int, first: int = 0
) -> Generator[T, None, None]:
    """``make(first)`` … ``make(count - 1)`` in order, up to ``depth`` made ahead by one thread.

    An executor, because it cannot be left waiting: a thread that has nothing to do ends with
    the process, also when this generator was dropped by a crash.
    """
    pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="shardlab-data")
    try:
        begun = range(first, min(first + depth, count))
        under_way: deque[Future[T]] = deque(pool.submit(make, i) for i in begun)
        for i in range(first, count):
            value = under_way.popleft().result()
            if i + depth < count:
                under_way.append(pool.submit(make, i + depth))
            yield value
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


# ------------------------------------------------------------------ tensors


def cast(batch: Batch, dtype: torch.dtype | None) -> Batch:
    """Its floating-point tensors in the model's precision; token ids and labels stay."""
    if dtype is None:
        return batch
    return batch.map(lambda t: t.to(dtype) if t.is_floating_point() else t)


def _copy(step: Step, device: torch.device, stream: torch.cuda.Stream) -> Step:
    """Called in the thread: copy to page-locked memory, then to the GPU on a stream of its own.

    From pageable memory the copy would go through a buffer and stall the host; on the stream
    of the computation it would queue behind it.
    """
    torch.cuda.set_device(device)  # the current device is a thread's own

    def send(tensor: Tensor) -> Tensor:
        if not tensor.is_cuda and tensor.numel():
            # Contiguous, or the copy would first make it so in memory that is not page-locked.
            tensor = tensor.contiguous().pin_memory()
        return tensor.to(device, non_blocking=True)

    with torch.cuda.stream(stream):
        microbatches = [batch.map(send) for batch in step.microbatches]
        copied = torch.cuda.Event()
        copied.record(stream)
    return replace(step, microbatches=microbatches, copied=copied)


def _arrived(step: Step, device: torch.device) -> Step:
    """Called in the loop: the computation's stream waits for the copies; the host does not."""
    current = torch.cuda.current_stream(device)
    current.wait_event(step.copied)

    def keep(tensor: Tensor) -> Tensor:
        # Else its memory could be given to the next copy while this step still reads it.
        tensor.record_stream(current)
        return tensor

    for batch in step.microbatches:
        batch.map(keep)
    return step
