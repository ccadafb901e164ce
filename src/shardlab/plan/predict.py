"""A step's time and memory on a machine: this one, as it was measured, or one that is not here.

On this machine a rank's own work is measured: its real code runs alone, without peers
(``emulate``), and its collectives have the prices that two ranks were seen to pay (``calibrate``).
For another device the same code runs on tensors without content (``simulate``), its operators have
the prices of a roofline (``devices``), and its collectives those of NCCL (``nccl``).
"""

from __future__ import annotations

import bisect
import dataclasses
import math
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from shardlab.axes import axes_of
from shardlab.config import Config
from shardlab.errors import UsageError
from shardlab.measure import throughput
from shardlab.measure.estimate import WEIGHED, Simulator
from shardlab.plan import calibrate, devices, gloo, nccl
from shardlab.plan.graph import Cost, Event, Start, Step, Wait, Work
from shardlab.plan.replay import Lanes, Played, Span, replay

THIS = "this"
EMULATE = "shardlab.plan.emulate:emulate"
NAIVE_MFU = 0.4  # of the peak: what is often assumed of large models on GPUs
BESIDE = 1.05  # times that a GPU's work takes longer while NCCL uses some of it
# Ranks that compute side by side share caches and memory, and none is on time to the millisecond.
# Both were set by hand, after looking at steps of two ranks.
TOGETHER = 1.05  # times that a rank's work takes longer than alone
LATE_S = 0.4e-3  # at each collective that two ranks wait for; more ranks are later
# Of a 90% interval, as factors of the step: on this machine, by its share of communication; and by
# a datasheet, of a family whose runs were published and of any other.
HERE_OWN, HERE_WAIT = 0.16, 0.20
FITTED, UNFITTED = (0.7, 1.55), (0.5, 2.0)
# Operators of these libraries compute nothing that their FLOPs and bytes do not tell.
PYTORCHS = {"aten", "prim", "prims", "profiler", "c10d", "_c10d_functional", "fsdp", "streams"}
CROWDED = 2  # ranks on a core, up to which predictions were compared with measurements
SMALL_WORLDS = 8, 16  # simulated; larger ones follow from these two
LIMIT_S = 300.0


@dataclass(frozen=True)
class WhatIf:
    """What would be different. Another bucket size or checkpointing is in the config."""

    bandwidth: float = 1.0  # times the link's rate
    slow_rank: float = 1.0  # one rank takes that many times as long
    overlap: bool = True  # False: every collective is waited for at once


AS_IT_IS = WhatIf()


@dataclass(frozen=True)
class Prediction:
    """A step of a rank. ``work_s`` and ``wait_s`` add up to ``step_s``."""

    step_s: float
    low_s: float  # of a 90% interval
    high_s: float
    work_s: float
    wait_s: float  # communication that nothing hides
    comm_s: float  # all communication
    naive_s: float | None  # no communication, constant MFU
    flops: float  # of a rank's step
    samples: int  # of the global batch
    tokens: int
    memory_bytes: int
    memory_limit: int | None
    is_measured: bool  # work and collectives were measured on this machine
    spans: tuple[Span, ...]
    peak_flops_per_s: float | None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Here:
    """This machine, or several like it: what one of its ranks has."""

    gloo: gloo.Gloo
    cores: float  # of each rank
    rate: float | None = None  # bytes per second of its own link; None: the ranks share a machine
    latency_s: float = 0.0

    def play(self, step: Step, change: WhatIf = AS_IT_IS) -> Played:
        rate = None if self.rate is None else self.rate * change.bandwidth

        def cost(start: Start, is_queued: bool) -> Cost:
            kind, link = gloo.kind_of(start), (rate, self.latency_s)
            return self.gloo.cost(kind, start.bytes, start.group, is_queued, *link)

        ranks = step.world
        together = TOGETHER if ranks > 1 else 1.0
        lanes = Lanes(self.cores, gloo.CHANNELS, late_s=LATE_S * ranks / 2)
        return _play(step, lambda work: (work.seconds or 0.0) * together, cost, lanes, change)


@dataclass(frozen=True)
class There:
    """A machine that is known from its datasheet."""

    machine: devices.Machine
    dtype: str

    def play(self, step: Step, change: WhatIf = AS_IT_IS) -> Played:
        between = self.machine.between
        between = dataclasses.replace(between, bytes_per_s=between.bytes_per_s * change.bandwidth)
        machine = dataclasses.replace(self.machine, between=between)
        return _play(
            step,
            lambda work: devices.price(work, machine.device, self.dtype),
            lambda start, _: nccl.cost(start.op, start.bytes, start.group, machine),
            Lanes(slowdown=BESIDE),
            change,
        )


def _play(
    step: Step,
    work: Callable[[Work], float],
    cost: Callable[[Start, bool], Cost],
    lanes: Lanes,
    change: WhatIf,
) -> Played:
    events = step.events if change.overlap else tuple(_waited_at_once(step))
    # Everybody waits for the slowest: a rank that takes longer is the one that is played back.
    return replay(
        dataclasses.replace(step, events=events),
        lambda event: work(event) * change.slow_rank,
        cost,
        lanes,
    )


def _waited_at_once(step: Step) -> Iterator[Event]:
    for event in step.events:
        if not isinstance(event, Wait):
            yield event
        if isinstance(event, Start):
            yield Wait(event.call)


def on_this_machine(machine: Here | There, step: Step, change: WhatIf = AS_IT_IS) -> Prediction:
    """From a step whose work was measured here. Its memory is not looked at."""
    played = machine.play(step, change)
    share = played.wait_s / max(played.step_s, 1e-12)
    off = math.hypot(HERE_OWN, HERE_WAIT * share, _spread(step.totals_s))
    return Prediction(
        **_times(played, 1 - off, 1 + off),
        naive_s=sum(work.seconds or 0.0 for work in step.works()),
        flops=step.flops,
        samples=step.samples,
        tokens=step.tokens,
        memory_bytes=step.peak_bytes,
        memory_limit=None,
        is_measured=True,
        peak_flops_per_s=None,
        notes=step.notes,
    )


class Predictor:
    """Answers one question after another. It owns the process that simulates and emulates."""

    def __init__(self, on_progress: Callable[[str], None] = lambda _: None) -> None:
        self._on_progress = on_progress
        self._simulator = Simulator()
        self._gloo: gloo.Gloo | None = None
        self._known: dict[str, tuple[Step, int]] = {}  # with the peak of memory, by what was asked

    def __enter__(self) -> Predictor:
        return self

    def __exit__(self, *_: object) -> None:
        self._simulator.__exit__()

    def predict(
        self,
        config: Config,
        device: str = THIS,
        link: str | None = None,
        change: WhatIf = AS_IT_IS,
    ) -> Prediction:
        """A step of ``config.launch.world`` ranks.

        On "this" device, without a link, all of them share this machine; with one, each is on a
        machine like this one. A link joins nodes as full as such devices come.
        """
        strategy, world = config.strategy, config.launch.world or 1
        if axes_of(strategy.name, strategy.options, world)[0] is not None:
            raise UsageError(
                "a plan has no prices for ranks that cut one model between them (tensor, context, "
                "pipeline); `shardlab compare` measures them"
            )
        if device != THIS:
            return self._there(config, device, link, change)
        name = None if config.launch.device == "cpu" else gpu_here()
        if name is not None:
            return self._gpu_here(config, name, link, change)
        return self._here(config, link, change)

    # -------------------------------------------------------------- this machine

    def _here(self, config: Config, link: str | None, change: WhatIf) -> Prediction:
        step = self._emulated(config)
        simulated, peak = self._simulated(config, "auto")
        if self._gloo is None:
            self._gloo = calibrate.this_machine(self._on_progress)
        ranks = config.launch.world or 1
        cores = float(len(os.sched_getaffinity(0)))
        if link is None:
            here = Here(self._gloo, cores / ranks)
            sharing = ranks
        else:
            joined = devices.link(link)
            here = Here(self._gloo, cores, joined.bytes_per_s, joined.latency_s)
            sharing = 1
        free = throughput.free_bytes()
        found = on_this_machine(here, step, change)
        if (crowd := ranks / cores) > CROWDED and link is None:
            # Nobody has seen so many; the interval grows with them.
            width = (found.high_s / found.step_s - 1) * crowd / CROWDED
            low = found.step_s / (1 + width)
            high = found.step_s * (1 + width)
            note = f"{ranks} ranks on {cores:g} cores are more than were ever measured"
            found = dataclasses.replace(found, low_s=low, high_s=high, notes=(*found.notes, note))
        return dataclasses.replace(
            found,
            flops=simulated.flops,
            memory_bytes=peak,
            memory_limit=None if free is None else free // sharing,
        )

    def _gpu_here(self, config: Config, name: str, link: str | None, change: WhatIf) -> Prediction:
        """The work as this GPU does it; its collectives as links of such GPUs are said to."""
        machine = devices.machine(devices.called(name), link or "")
        step = self._emulated(config)
        dtype = config.precision.compute
        simulated, peak = self._simulated(config, "cuda")
        notes = step.notes
        if (config.launch.world or 1) > 1:
            notes += (f"work measured on {name}; links as {machine.device.name} usually has them",)
        return dataclasses.replace(
            on_this_machine(There(machine, dtype), step, change),
            flops=simulated.flops,
            memory_bytes=peak,
            memory_limit=round(machine.device.memory),
            peak_flops_per_s=machine.device.peak(dtype),
            notes=notes,
        )

    def _emulated(self, config: Config) -> Step:
        def ask() -> tuple[Step, int]:
            self._on_progress(f"{config.strategy.label}: one rank's own work")
            step: Step = self._simulator.ask(EMULATE, LIMIT_S, config)
            return step, 0

        return self._once(f"here {config.to_dict()}", ask)[0]

    # -------------------------------------------------------------- machines that are not here

    def _there(self, config: Config, device: str, link: str | None, change: WhatIf) -> Prediction:
        machine = devices.machine(device, link or "")
        dtype = config.precision.compute
        peak_flops = machine.device.peak(dtype)
        step, peak = self._simulated(config, "cuda")
        played = There(machine, dtype).play(step, change)
        is_fitted = machine.device.family in devices.FITTED
        low, high = FITTED if is_fitted else UNFITTED
        notes = [*step.notes]
        if own := sorted({w.name for w in step.works() if w.name.split(".")[0] not in PYTORCHS}):
            notes.append(f"no price of {', '.join(own)}: only what they read and write is counted")
        if not is_fitted:
            notes.append(f"no published run of a {device} is known here: its interval is wide")
        if config.training.compile != "none":
            notes.append("compiled code is priced as eager code, which takes longer")
        return Prediction(
            **_times(played, low, high),
            naive_s=step.flops / (NAIVE_MFU * peak_flops),
            flops=step.flops,
            samples=step.samples,
            tokens=step.tokens,
            memory_bytes=peak,
            memory_limit=round(machine.device.memory),
            is_measured=False,
            peak_flops_per_s=peak_flops,
            notes=tuple(notes),
        )

    def _simulated(self, config: Config, device: str) -> tuple[Step, int]:
        """The step with all its operators, and the peak of memory."""
        world = config.launch.world or 1

        def ask() -> tuple[Step, int]:
            self._on_progress(f"{config.strategy.label}: a rank among {world:,}, simulated")
            asked = config.with_overrides(WEIGHED)
            found = self._simulator.run(asked, device, events=True)
            peak = found["weights"]["step"]["total"]
            return dataclasses.replace(found["step"], peak_bytes=peak), peak

        if world <= max(SMALL_WORLDS):
            return self._once(f"{device} {config.to_dict()}", ask)
        small, large = (self._simulated(_in_world(config, ranks), device) for ranks in SMALL_WORLDS)
        step = at_world(small[0], large[0], world)
        if step is None:  # it does other things among more ranks
            return self._once(f"{device} {config.to_dict()}", ask)
        return step, step.peak_bytes

    def _once(self, key: str, ask: Callable[[], tuple[Step, int]]) -> tuple[Step, int]:
        if key not in self._known:
            self._known[key] = ask()
        return self._known[key]


def gpu_here() -> str | None:
    """The name of this machine's GPU, or None."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def _in_world(config: Config, ranks: int) -> Config:
    """The config with other ranks, and as many samples for each."""
    batch = config.training.global_batch // (config.launch.world or 1) * ranks
    return config.with_overrides({"launch.world": ranks, "training.global_batch": batch})


def _times(played: Played, low: float, high: float) -> dict[str, Any]:
    return {
        "step_s": played.step_s,
        "low_s": played.step_s * low,
        "high_s": played.step_s * high,
        "work_s": played.work_s,
        "wait_s": played.wait_s,
        "comm_s": played.comm_s,
        "spans": played.spans,
    }


def _spread(totals: Sequence[float]) -> float:
    """How far single steps are from the median, as a share of it."""
    if len(totals) < 2:
        return 0.0
    middle = statistics.median(totals)
    return statistics.median(abs(t - middle) for t in totals) / middle


# ------------------------------------------------------------------ worlds of any size


def at_world(small: Step, large: Step, world: int) -> Step | None:
    """The step of a rank among ``world``, from the same step among fewer: every size is taken to be
    a + b / ranks, as whole tensors and shards are. None if the two do not do the same things."""
    if len(small.events) != len(large.events):
        return None

    def carried(one: float, other: float) -> float:
        part = (one - other) / (1 / small.world - 1 / large.world)
        return max(0.0, other + part * (1 / world - 1 / large.world))

    events: list[Event] = []
    for one, other in zip(small.events, large.events, strict=True):
        if isinstance(one, Work) and isinstance(other, Work) and one.name == other.name:
            sizes = carried(one.flops, other.flops), carried(one.bytes, other.bytes)
            events.append(dataclasses.replace(other, flops=sizes[0], bytes=sizes[1]))
        elif isinstance(one, Start) and isinstance(other, Start) and one.op == other.op:
            ranks = round(other.group.size * world / large.world)
            if other.group.size == one.group.size:  # a group of its own, as in a node
                ranks = other.group.size
            size = round(carried(one.bytes, other.bytes))
            group = dataclasses.replace(other.group, size=ranks)
            events.append(dataclasses.replace(other, bytes=size, group=group))
        elif isinstance(one, Wait) and one == other:
            events.append(other)
        else:
            return None
    return dataclasses.replace(
        large,
        world=world,
        events=tuple(events),
        samples=round(large.samples / large.world * world),
        tokens=round(large.tokens / large.world * world),
        peak_bytes=round(carried(small.peak_bytes, large.peak_bytes)),
    )


# ------------------------------------------------------------------ batches of any size


def at_batch(measured: Sequence[tuple[int, Step]], batch: int) -> Step:
    """The step at a micro-batch of ``batch`` samples, from measured steps at others.

    A device that is kept busy takes a fixed time and one for each sample: a straight line. At small
    batches it may wait for the host instead, which takes as long for any batch: where the smallest
    lies above the line through the next two, its time is that of the host, and holds until the line
    reaches it.
    """
    known = sorted(measured, key=lambda pair: pair[0])
    if len(known) < 2:
        raise UsageError("a step at another batch needs steps at two batches or more")
    if len({len(step.events) for _, step in known}) > 1:
        raise UsageError("the measured batches do not send and wait alike; measure this one")
    sizes = [size for size, _ in known]
    last = known[-1][1]
    totals = [sum(work.seconds or 0.0 for work in step.works()) for _, step in known]
    total = _between(sizes, totals, batch)
    events = []
    for parallel in zip(*(step.events for _, step in known), strict=True):
        event = parallel[-1]
        if isinstance(event, Work):
            seconds = [work.seconds or 0.0 for work in parallel if isinstance(work, Work)]
            event = dataclasses.replace(event, seconds=_between(sizes, seconds, batch))
        events.append(event)
    added = sum(event.seconds or 0.0 for event in events if isinstance(event, Work))
    stretched = [
        dataclasses.replace(e, seconds=(e.seconds or 0.0) * total / max(added, 1e-12))
        if isinstance(e, Work)
        else e
        for e in events
    ]
    of_batch = batch / sizes[-1]
    return dataclasses.replace(
        last,
        events=tuple(stretched),
        samples=round(last.samples * of_batch),
        tokens=round(last.tokens * of_batch),
        totals_s=tuple(t * total / max(totals[-1], 1e-12) for t in last.totals_s),
    )


def _between(sizes: Sequence[int], seconds: Sequence[float], size: int) -> float:
    """On the line through the two nearest sizes; or the host's time, see ``at_batch``."""
    right = min(max(1, bisect.bisect_left(sizes, size)), len(sizes) - 1)
    line = _line(sizes, seconds, right, size)
    if right == 1 and len(sizes) > 2 and _line(sizes, seconds, 2, sizes[0]) < seconds[0]:
        return max(seconds[0], _line(sizes, seconds, 2, size))
    return max(0.0, line)


def _line(sizes: Sequence[int], seconds: Sequence[float], right: int, size: int) -> float:
    slope = (seconds[right] - seconds[right - 1]) / (sizes[right] - sizes[right - 1])
    return seconds[right] + slope * (size - sizes[right])
