"""One rank of many, run on this machine with real tensors and no peers: what is its own work?

The strategy's own code computes as it would among its peers. A collective returns at once, and the
clock stands still inside it: what is measured is the rank's own work between two of its events.
What a collective would have brought is filled in with numbers of this rank's own, so that nothing
is computed with what happened to lie in memory.

Like a simulation it changes PyTorch for the whole process: ask ``Simulator.ask`` for it.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from shardlab import comm, pulse, world
from shardlab.config import Config
from shardlab.errors import UsageError
from shardlab.ledger import LEDGER
from shardlab.measure import simulate
from shardlab.measure.events import PHASES, Handle, Log
from shardlab.plan.graph import Event, Step, Work
from shardlab.strategies.data_parallel import bucket_size
from shardlab.training import builders, loop
from shardlab.workloads.base import Batch

WARMUP, LEAST, MOST = 3, 5, 1000  # steps: before the timed ones, and of these
AHEAD = 3  # steps that the host may be ahead of a GPU

Stamp = tuple[float, Any]  # the host's clock; and on a GPU an event
Stretch = tuple[str, Stamp, Stamp]  # a phase, from one moment to another
_record = torch.cuda.Event.record


class Clock(Log):
    """Notes the rank's work in stretches: from one start, wait or phase to the next."""

    def __init__(self, kind: str, device: torch.device, roles: Sequence[int] = ()) -> None:
        super().__init__(kind, roles)
        self.stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self.timed: list[list[Stretch | Event]] = []  # of each step
        self._began = self.stamp()

    def stamp(self) -> Stamp:
        if self.stream is None:
            return time.perf_counter(), None
        event = torch.cuda.Event(enable_timing=True)
        _record(event, self.stream)
        return time.perf_counter(), event

    def stop(self) -> None:
        if self.is_on:
            stretch: Any = PHASES.get(pulse.PULSE.phase, ""), self._began, self.stamp()
            self._events.append((len(self._events), stretch))

    def go_on(self) -> None:
        if self.is_on:
            self._began = self.stamp()

    @contextmanager
    def standing(self) -> Iterator[None]:
        """The clock stands still inside."""
        self.stop()
        yield
        self.go_on()

    def begin_step(self) -> None:
        super().begin_step()
        self.is_on = True
        self.go_on()

    def end_step(self) -> Stamp:
        self.stop()
        self.is_on = False
        self.timed.append(self.events())  # type: ignore[arg-type]
        return self._events[-1][1][2]  # type: ignore[index,no-any-return]

    def started(
        self,
        group: Any,
        op: str,
        whole: Sequence[Tensor],
        result: list[Tensor],
        peer: int | None = None,
    ) -> Handle:
        with self.standing():
            handle = super().started(group, op, whole, result, peer)
            with torch.no_grad():
                fill(op, whole, result, group.size())
        return handle

    def waited(self, call: Any) -> None:
        with self.standing():
            super().waited(call)

    def mark(self, name: str, stage: int = 0, micro: int = 0) -> None:
        with self.standing():
            super().mark(name, stage, micro)

    def now(self) -> float:
        with self.standing():
            return super().now()

    @contextmanager
    def following(self) -> Iterator[Log]:
        """Phases are noted as well, and what our all_gather gathers is filled in."""
        enter, all_gather = pulse.Pulse.enter, comm.all_gather

        def enters(self_: pulse.Pulse, phase: str) -> None:
            with self.standing():
                enter(self_, phase)

        def gathers(output: Tensor, shard: Tensor, *args: Any, **more: Any) -> Any:
            with self.standing(), torch.no_grad():
                if shard.untyped_storage().data_ptr() != output.untyped_storage().data_ptr():
                    tile(output, shard)
            return all_gather(output, shard, *args, **more)

        with (
            super().following(),
            mock.patch.object(pulse.Pulse, "enter", enters),
            mock.patch.object(comm, "all_gather", gathers),
        ):
            yield self


def tile(output: Tensor, own: Tensor) -> None:
    """Our own part, in every rank's place."""
    flat, size = output.view(-1), own.numel()
    if size and flat.numel() % size == 0:
        flat.view(-1, size).copy_(own.reshape(1, -1).clone())
    elif flat.is_floating_point():  # shares differ in size
        flat.fill_(0.01)
    else:
        flat.zero_()


def fill(op: str, whole: Sequence[Tensor], tensors: Sequence[Tensor], ranks: int) -> None:
    """What the others would have sent, for collectives that write into new memory."""
    if op == "all_gather":
        parts = tensors[len(whole) :]
        for i, output in enumerate(whole):
            tile(output, parts[i if len(parts) == len(whole) else 0])
    elif op in ("reduce_scatter", "all_to_all"):
        for output, source in zip(tensors[: len(tensors) - len(whole)], whole, strict=False):
            size = output.numel() // (ranks if op == "all_to_all" else 1)
            tile(output, source.reshape(-1)[:size])
    elif op == "recv":
        for output in tensors:  # the stages of PyTorch's pipeline vote with integers: 1 is yes
            output.fill_(0.01 if output.is_floating_point() else 1)


# ------------------------------------------------------------------ a run


def emulate(
    config: Config,
    seconds: float = 1.5,
    link: tuple[float, float, float] | None = None,
    rank: int = 0,
    roles: Sequence[int] = (),
) -> Step:
    """A step of one rank of the config's world, on this machine's device, without its peers.
    ``link`` is what a strategy that measures its link finds: a ``bucket_size.Link`` in numbers.
    ``roles``: the ranks that do not act alike, if there are several.

    ``Work("measured", …)`` has the seconds of each stretch: the median over as many steps as take
    ``seconds``, and at least five. On a GPU they are the device's, and ``host_s`` the host's.
    ``totals_s`` has the sums of all steps.
    """
    device, _ = world.choose(config.launch, 0, 1)
    size = config.launch.world or 1
    backend = simulate.backend_of(config.launch, device.type, here=False)
    steps = {"training.steps": WARMUP + MOST, "training.epochs": None, "training.warmup_steps": 0}
    config = config.with_overrides(steps)
    world.prepare(config.launch, device)
    LEDGER.reset(full_steps=0)
    workload = builders.build_workload(config)
    gc.collect()  # a model and its hooks are a ring: the last one's may still be here
    before = 0
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    with ExitStack() as stack:
        stack.enter_context(simulate.without_peers())
        solo = simulate.solo_world(size, device, backend, rank, on_gpu=device.type == "cuda")
        alone = stack.enter_context(solo)
        stack.enter_context(mock.patch.object(simulate.Solo, "copies", False))
        clock = Clock(backend, device, roles)
        stack.enter_context(mock.patch.object(simulate.Solo, "log", clock))
        stack.enter_context(clock.following())
        stack.enter_context(simulate.marked_actions(clock))

        def first_batches() -> Iterator[Batch]:
            """Of one step: all steps that count are alike."""
            with closing(loop.Batches(workload, config, alone)) as steps:
                yield from next(steps)

        stack.enter_context(simulate.told_shapes(first_batches, nullcontext))
        if link is not None:
            seen = bucket_size.Link(*link)
            stack.enter_context(mock.patch.object(bucket_size, "measure", return_value=seen))
        strategy = builders.build_strategy(config, workload, alone)
        simulate.refuse_rounds(strategy)
        batches = stack.enter_context(closing(loop.Batches(workload, config, alone)))
        ends: list[Stamp] = []
        began = 0.0
        for number, microbatches in enumerate(batches):
            clock.begin_step()
            loss = strategy.gradients(microbatches)
            strategy.step()
            ends.append(clock.end_step())
            if device.type == "cpu":
                float(loss)
            elif number >= AHEAD:
                ends[number - AHEAD][1].synchronize()
            if number == WARMUP - 1:
                began = time.perf_counter()
            if number >= WARMUP + LEAST - 1 and time.perf_counter() - began > seconds:
                break
        strategy.settle()
        peak = 0
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            peak = torch.cuda.max_memory_allocated(device) - before
        events, totals = typical([_measured(step) for step in clock.timed[WARMUP:]])
    return simulate.step_of(config, workload, events, peak, totals_s=totals, rank=rank)


def _measured(step: Sequence[Stretch | Event]) -> list[Event]:
    def work(phase: str, begin: Stamp, end: Stamp) -> Work:
        host = end[0] - begin[0]
        if begin[1] is None:
            return Work("measured", 0, 0, seconds=host, phase=phase)
        device = begin[1].elapsed_time(end[1]) / 1e3
        return Work("measured", 0, 0, seconds=device, phase=phase, host_s=host)

    return [work(*event) if isinstance(event, tuple) else event for event in step]


def typical(steps: Sequence[Sequence[Event]]) -> tuple[list[Event], tuple[float, ...]]:
    """Of each stretch the median over all steps that went alike, and the sum of each step.

    The sum of medians is less than the median of the sums where now and then something takes
    long. So they are stretched to add up to the latter.
    """

    def course(step: Sequence[Event]) -> tuple[Any, ...]:
        return tuple(e.phase if isinstance(e, Work) else e for e in step)

    courses = Counter(map(course, steps))
    chosen, times = courses.most_common(1)[0]
    if times < 2 <= len(steps):
        raise UsageError("no two steps sent and waited alike: there is no step to plan with")
    alike = [step for step in steps if course(step) == chosen]
    totals = tuple(_sum(step) for step in alike)
    medians = [_median(events) for events in zip(*alike, strict=True)]
    longer = statistics.median(totals) / max(_sum(medians), 1e-12)
    events = [_times(longer, e) if isinstance(e, Work) else e for e in medians]
    return events, totals


def _sum(step: Sequence[Event]) -> float:
    return sum(event.seconds or 0.0 for event in step if isinstance(event, Work))


def _times(factor: float, work: Work) -> Work:
    seconds = (work.seconds or 0.0) * factor
    return Work("measured", 0, 0, seconds=seconds, phase=work.phase, host_s=work.host_s)


def _median(events: Sequence[Event]) -> Event:
    first = events[0]
    if not isinstance(first, Work):
        return first
    works = [event for event in events if isinstance(event, Work)]
    seconds = statistics.median(work.seconds or 0.0 for work in works)
    hosts = [work.host_s for work in works if work.host_s is not None]
    host = statistics.median(hosts) if hosts else None
    return Work("measured", 0, 0, seconds=seconds, phase=first.phase, host_s=host)
