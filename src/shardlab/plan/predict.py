"""A step's time and memory on a machine: this one, as it was measured, or one that is not here.

On this machine a rank's own work is measured: its real code runs alone, without peers
(``emulate``), and its collectives have the prices that two ranks were seen to pay (``calibrate``).
For another device the same code runs on tensors without content (``simulate``), its operators have
the prices of a roofline (``devices``), and its collectives those of NCCL (``nccl``). Of
model-parallel ranks, one rank of each pipeline stage is simulated, and all are played back
together; ranks that share a stage act alike.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from shardlab.axes import Axes, axes_of
from shardlab.config import Config
from shardlab.errors import UsageError
from shardlab.launch import environment
from shardlab.measure import throughput
from shardlab.measure.estimate import WEIGHED, Simulator, ask_all
from shardlab.plan import calibrate, devices, gloo, nccl
from shardlab.plan.buckets import MEASURES
from shardlab.plan.extrapolate import at_micro, at_world, fewest_micro
from shardlab.plan.graph import Cost, Event, Group, Start, Step, Wait, Work
from shardlab.plan.replay import Lanes, Played, Span, replay

THIS = "this"
EMULATE = "shardlab.plan.emulate:emulate"
NAIVE_MFU = 0.4  # of the peak: what is often assumed of large models on GPUs
BESIDE = 1.05  # times that a GPU's work takes longer while NCCL uses some of it
# Fitted to steps of two ranks of a machine with two cores, on one machine and over 1 Gbit/s.
TOGETHER = 1.08  # times that a rank's work takes longer than without its peers
MEETING_S = 0.2e-3  # what a collective that is waited for takes longer in a step than by itself
# Three ranks on two cores: one runs alone and two share, until the scheduler moves one of them. The
# part of that loss which was seen.
UNEVEN = 0.25
# Of a 90% interval, as factors of the step: on this machine, by its share of communication; and by
# a datasheet, of a family whose runs were published and of any other. For model-parallel ranks
# docs/plan_published.md says how far published runs were off.
HERE_OWN, HERE_WAIT = 0.16, 0.20
FITTED, UNFITTED = (0.7, 1.55), (0.5, 2.0)
CUT = (0.7, 1.57)
# Operators of these libraries compute nothing that their FLOPs and bytes do not tell.
PYTORCHS = {"aten", "prim", "prims", "profiler", "c10d", "_c10d_functional", "fsdp", "streams"}
MOST_BESIDE = 4  # ranks that are emulated at the same time: more would need their memory too
CROWDED = 2  # ranks on a core, up to which predictions were compared with measurements
CUT_AND_CROWDED = 2.0  # times that the interval is wider where ranks share a model and cores too
SMALL_WORLDS = 8, 16  # simulated; larger ones follow from these two
SMALL_COPIES = 2, 4  # the same, of models that several ranks hold together
LIMIT_S = 300.0
SAMPLE_BYTES = 4 * 2**20  # of the message that bucket_ddp_async measures

Link = tuple[float, float, float]


@dataclass(frozen=True)
class WhatIf:
    """What would be different. Another bucket size or checkpointing is in the config."""

    bandwidth: float = 1.0  # times the link's rate
    slow_rank: float = 1.0  # one rank takes that many times as long
    overlap: bool = True  # False: every collective is waited for at once


AS_IT_IS = WhatIf()


@dataclass(frozen=True)
class Prediction:
    """A step of a rank. ``work_s``, ``wait_s`` and ``bubble_s`` add up to ``step_s``; in a pipeline
    these and ``flops`` are means over the stages, and the memory is that of the fullest."""

    step_s: float
    low_s: float  # of a 90% interval
    high_s: float
    work_s: float
    wait_s: float  # exposed communication
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
    # A rank's operators without FLOPs read and write them, on average over the stages.
    pointwise_bytes: float = 0.0
    bubble_s: float = 0.0  # the rank stood still because other stages were not there yet


@dataclass(frozen=True)
class MeasuredMachine:
    """This machine, or several like it: what one of its ranks has."""

    gloo: gloo.Gloo
    cores: float  # of each rank
    rate: float | None = None  # bytes per second of its own link; None: the ranks share a machine
    latency_s: float = 0.0

    def play(self, steps: Sequence[Step], change: WhatIf = AS_IT_IS) -> Played:
        rate = None if self.rate is None else self.rate * change.bandwidth

        def cost(start: Start, is_queued: bool) -> Cost:
            kind, link = gloo.kind_of(start), (rate, self.latency_s)
            return self.gloo.cost(kind, start.bytes, start.group, is_queued, *link)

        lanes = Lanes(self.cores, gloo.CHANNELS, meeting_s=MEETING_S, late=_late(steps[0]))
        longer = 1.0
        if steps[0].world > 1:
            sharing = max(1.0, 1 / self.cores)  # ranks on a core
            longer = TOGETHER * (1 + UNEVEN * (math.ceil(sharing) / sharing - 1))
        return _play(steps, lambda work: (work.seconds or 0.0) * longer, cost, lanes, change)

    def link(self, ranks: int) -> Link:
        """What an all-reduce among these ranks takes, as ``bucket_ddp_async`` would measure it: a
        ``strategies.bucket_size.Link`` in numbers, for this process need not import torch."""
        link = self.rate, self.latency_s
        small, large = (
            self.gloo.cost("all_reduce", size, Group(ranks), False, *link)
            for size in (1024, SAMPLE_BYTES)
        )
        least = small.latency_s + max(small.host_s, small.wire_s)
        whole = large.latency_s + max(large.host_s, large.wire_s)
        taken = 0.0 if self.cores >= 2 else min(1.0, large.host_s / whole)
        return least, max(0.0, whole - least) / SAMPLE_BYTES, taken


@dataclass(frozen=True)
class DatasheetMachine:
    """A machine that is known from its datasheet."""

    machine: devices.Machine
    dtype: str

    def play(self, steps: Sequence[Step], change: WhatIf = AS_IT_IS) -> Played:
        between = self.machine.between
        between = dataclasses.replace(between, bytes_per_s=between.bytes_per_s * change.bandwidth)
        machine = dataclasses.replace(self.machine, between=between)

        def cost(start: Start, _: bool) -> Cost:
            if not start.is_message:
                return nccl.cost(start.op, start.bytes, start.group, machine)
            nodes = {rank // machine.per_node for rank in start.among}
            ends = Group(2, machine.per_node if len(nodes) > 1 else 1)
            return nccl.cost("send", start.bytes, ends, machine)

        prices: dict[int, float] = {}  # many micro-batches share one event

        def work(event: Work) -> float:
            found = prices.get(id(event))
            if found is None:
                found = prices[id(event)] = devices.price(event, machine.device, self.dtype)
            return found

        return _play(steps, work, cost, Lanes(slowdown=BESIDE), change)


def _play(
    steps: Sequence[Step],
    work: Callable[[Work], float],
    cost: Callable[[Start, bool], Cost],
    lanes: Lanes,
    change: WhatIf,
) -> Played:
    if not change.overlap:
        steps = [dataclasses.replace(s, events=tuple(_waited_at_once(s))) for s in steps]
    if change.slow_rank != 1:
        # Everybody waits for the slowest: a rank that takes longer is the one that is played back;
        # in a pipeline it is on the stage that has most to do.
        most = max(steps, key=lambda step: sum(map(work, step.works())))
        slow = [_slower(event, work, change.slow_rank) for event in most.events]
        steps = [dataclasses.replace(s, events=slow) if s is most else s for s in steps]
    return replay(steps, work, cost, lanes)


def _slower(event: Event, work: Callable[[Work], float], factor: float) -> Event:
    if not isinstance(event, Work):
        return event
    seconds = work(event) if event.seconds is None else event.seconds
    return dataclasses.replace(event, seconds=seconds * factor)


def _waited_at_once(step: Step) -> Iterator[Event]:
    """Messages between stages are left as they are: a schedule is made for them."""
    messages = {start.call for start in step.starts() if start.is_message}
    for event in step.events:
        if not isinstance(event, Wait) or event.call in messages:
            yield event
        if isinstance(event, Start) and not event.is_message:
            yield Wait(event.call)


def on_this_machine(
    machine: MeasuredMachine | DatasheetMachine, steps: Sequence[Step], change: WhatIf = AS_IT_IS
) -> Prediction:
    """From a step whose work was measured here, of one rank of each stage. Its memory is not looked
    at."""
    played = machine.play(steps, change)
    share = (played.wait_s + played.bubble_s) / max(played.step_s, 1e-12)
    spread = max(_spread(step.totals_s) for step in steps)
    off = math.hypot(HERE_OWN, HERE_WAIT * share, spread)
    step = steps[0]
    return Prediction(
        **_times(played, 1 - off, 1 + off),
        naive_s=max(sum(work.seconds or 0.0 for work in step.works()) for step in steps),
        flops=step.flops,
        samples=step.samples,
        tokens=step.tokens,
        memory_bytes=step.peak_bytes,
        memory_limit=None,
        is_measured=True,
        peak_flops_per_s=None,
        notes=step.notes,
    )


def side_by_side(
    simulators: Sequence[Simulator],
    config: Config,
    seconds: float = 1.5,
    link: Link | None = None,
) -> list[Step]:
    """The own work of one rank of each stage, emulated by all of them at once: ranks that share a
    machine also share its caches and its memory."""
    axes = _axes(config)
    ranks = [0] if axes is None else list(axes.representatives)
    roles = ranks if len(ranks) > 1 else []
    asked = (simulators, EMULATE, LIMIT_S, config, seconds, link)
    return [mean_of(ask_all(*asked, rank, roles)) for rank in ranks]


def mean_of(steps: Sequence[Step]) -> Step:
    """The first of several emulations of one step, as long as they took on average."""
    first = steps[0]
    factor = statistics.fmean(own_work_s(step) for step in steps) / max(own_work_s(first), 1e-12)
    events = [
        dataclasses.replace(e, seconds=(e.seconds or 0.0) * factor) if isinstance(e, Work) else e
        for e in first.events
    ]
    totals = tuple(total for step in steps for total in step.totals_s)
    return dataclasses.replace(first, events=events, totals_s=totals)


def own_work_s(step: Step) -> float:
    """The median over the steps that were timed."""
    return statistics.median(step.totals_s)


class Predictor:
    """Answers one question after another. It owns the process that simulates and emulates."""

    def __init__(self) -> None:
        self._simulator = Simulator()
        self._beside: list[Simulator] = []  # of other ranks that share the cores
        self._gloo: gloo.Gloo | None = None
        self._known: dict[str, Sequence[Step]] = {}  # by what was asked

    def __enter__(self) -> Predictor:
        return self

    def __exit__(self, *_: object) -> None:
        for simulator in (self._simulator, *self._beside):
            simulator.__exit__()

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
        if device != THIS:
            return self._there(config, device, link, change)
        name = None if config.launch.device == "cpu" else gpu_here()
        if name is not None:
            return self._gpu_here(config, name, link, change)
        return self._here(config, link, change)

    # -------------------------------------------------------------- this machine

    def _here(self, config: Config, link: str | None, change: WhatIf) -> Prediction:
        ranks, axes = config.launch.world or 1, _axes(config)
        cores = float(environment.usable_cores())
        crowd = ranks / cores if link is None else 0.0
        if crowd > 1 and axes is not None and axes.pipeline > 1:
            raise UsageError(
                f"a stage that waits leaves its core to another, which no plan of {ranks} ranks on "
                f"{cores:g} cores knows: give each its own machine, as in --link 1gbit, or let "
                "`shardlab compare` measure it"
            )
        flops, pointwise, peak_bytes = _sizes(self._simulated(config, "auto"))
        if self._gloo is None:
            self._gloo = calibrate.this_machine()
        if link is None:
            here = MeasuredMachine(self._gloo, cores / ranks)
            sharing = ranks
        else:
            joined = devices.link(link)
            here = MeasuredMachine(self._gloo, cores, joined.bytes_per_s, joined.latency_s)
            sharing = 1
        rate = None if here.rate is None else here.rate * change.bandwidth
        seen = dataclasses.replace(here, rate=rate).link(ranks) if ranks > 1 else None
        free = throughput.free_bytes()
        have_room = sharing if free is None else free // max(1, peak_bytes)
        steps = self._emulated(config, max(1, min(sharing, have_room)), seen)
        found = on_this_machine(here, steps, change)
        wider = crowd / CROWDED
        note = f"{ranks} ranks on {cores:g} cores are more than were ever measured"
        if crowd > 1 and axes is not None and axes.model_ranks > 1:
            wider = max(CUT_AND_CROWDED, wider)
            note = "ranks that share both cores and a model were seldom measured"
        if wider > 1:  # the interval grows with what nobody has seen
            width = (found.high_s / found.step_s - 1) * wider
            low = found.step_s / (1 + width)
            high = found.step_s * (1 + width)
            found = dataclasses.replace(found, low_s=low, high_s=high, notes=(*found.notes, note))
        return dataclasses.replace(
            found,
            flops=flops,
            pointwise_bytes=pointwise,
            memory_bytes=peak_bytes,
            memory_limit=None if free is None else free // sharing,
        )

    def _gpu_here(self, config: Config, name: str, link: str | None, change: WhatIf) -> Prediction:
        """The work as this GPU does it; its collectives as links of such GPUs are said to."""
        machine = devices.machine(devices.called(name), link or "")
        steps = self._emulated(config)
        dtype = config.precision.compute
        flops, pointwise, peak_bytes = _sizes(self._simulated(config, "cuda"))
        notes = steps[0].notes
        if (config.launch.world or 1) > 1:
            notes += (f"work measured on {name}; links as {machine.device.name} usually has them",)
        return dataclasses.replace(
            on_this_machine(DatasheetMachine(machine, dtype), steps, change),
            flops=flops,
            pointwise_bytes=pointwise,
            memory_bytes=peak_bytes,
            memory_limit=round(machine.device.memory),
            peak_flops_per_s=machine.device.peak(dtype),
            notes=notes,
        )

    def _emulated(
        self, config: Config, sharing: int = 1, link: Link | None = None
    ) -> Sequence[Step]:
        """``sharing``: ranks that share this machine's cores, and for which it has memory."""
        others = min(sharing, environment.usable_cores(), MOST_BESIDE) - 1
        if config.strategy.name != MEASURES:
            link = None  # nobody would ask

        def ask() -> Sequence[Step]:
            self._beside += [Simulator() for _ in range(others - len(self._beside))]
            return side_by_side([self._simulator, *self._beside[:others]], config, link=link)

        return self._once(f"here {others} {link} {config.to_dict()}", ask)

    # -------------------------------------------------------------- machines that are not here

    def _there(self, config: Config, device: str, link: str | None, change: WhatIf) -> Prediction:
        machine = devices.machine(device, link or "")
        dtype = config.precision.compute
        peak_flops = machine.device.peak(dtype)
        steps = self._simulated(config, "cuda")
        step = steps[0]
        played = DatasheetMachine(machine, dtype).play(steps, change)
        is_fitted, axes = machine.device.family in devices.FITTED, _axes(config)
        low, high = UNFITTED if not is_fitted else FITTED if axes is None else CUT
        flops, pointwise, peak_bytes = _sizes(steps)
        notes = [*step.notes]
        names = {w.name for step in steps for w in step.works()}
        if own := sorted(name for name in names if name.split(".")[0] not in PYTORCHS):
            notes.append(f"no price of {', '.join(own)}: only what they read and write is counted")
        if not is_fitted:
            notes.append(f"no published run of a {device} is known here: its interval is wide")
        if config.training.compile != "none":
            notes.append("compiled code is priced as eager code, which takes longer")
        return Prediction(
            **_times(played, low, high),
            naive_s=flops / (NAIVE_MFU * peak_flops),
            flops=flops,
            pointwise_bytes=pointwise,
            samples=step.samples,
            tokens=step.tokens,
            memory_bytes=peak_bytes,
            memory_limit=round(machine.device.memory),
            is_measured=False,
            peak_flops_per_s=peak_flops,
            notes=tuple(notes),
        )

    def _simulated(self, config: Config, device: str) -> Sequence[Step]:
        """The step with all its operators and its peak of memory: of one rank, or of one of each
        stage of a pipeline."""
        world, axes = config.launch.world or 1, _axes(config)
        micro = config.accumulate
        fewer = fewest_micro(config.strategy.name, axes, micro)
        if fewer < micro and axes is not None:
            steps = self._simulated(_with_micro(config, fewer), device)
            return [at_micro(step, stage, axes, micro) for stage, step in enumerate(steps)]

        def ask() -> Sequence[Step]:
            asked = config.with_overrides(WEIGHED)
            limit = LIMIT_S * (1 if axes is None else axes.pipeline)
            found = self._simulator.run(asked, device, limit_s=limit, events=True)
            steps: Sequence[Step] = found["steps"]
            notes = []
            if lines := ", ".join(found["assumed"]):
                notes.append(
                    f"the model asks tensors for their values at {lines}: the answer was guessed"
                )
            if names := ", ".join(found["uncounted"]):
                notes.append(
                    f"memory is a lower bound: what {names} takes for itself is not known here"
                )
            return [dataclasses.replace(step, notes=(*step.notes, *notes)) for step in steps]

        worlds = SMALL_WORLDS
        if axes is not None:
            worlds = SMALL_COPIES[0] * axes.model_ranks, SMALL_COPIES[1] * axes.model_ranks
        if world > worlds[1]:
            pair = [self._simulated(_in_world(config, ranks), device) for ranks in worlds]
            grown = [at_world(small, large, world) for small, large in zip(*pair, strict=True)]
            known = [step for step in grown if step is not None]
            if len(known) == len(grown):  # else it does other things among more ranks
                return known
        return self._once(f"{device} {config.to_dict()}", ask)

    def _once(self, key: str, ask: Callable[[], Sequence[Step]]) -> Sequence[Step]:
        if key not in self._known:
            self._known[key] = ask()
        return self._known[key]


def _sizes(steps: Sequence[Step]) -> tuple[float, float, int]:
    """FLOPs of a rank, and the bytes of its other operators, on average over the stages; and the
    bytes that the fullest holds."""
    flops = statistics.fmean(s.flops for s in steps)
    pointwise = statistics.fmean(s.pointwise_bytes for s in steps)
    return flops, pointwise, max(s.peak_bytes for s in steps)


def _axes(config: Config) -> Axes | None:
    return axes_of(config.strategy.name, config.strategy.options, config.launch.world or 1)[0]


def gpu_here() -> str | None:
    """The name of this machine's GPU, or None."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def _in_world(config: Config, ranks: int) -> Config:
    """The config with other ranks, and as many samples for each."""
    batch = config.training.global_batch * ranks // (config.launch.world or 1)
    return config.with_overrides({"launch.world": ranks, "training.global_batch": batch})


def _with_micro(config: Config, micro: int) -> Config:
    """The config with this many micro-batches in a step, each as large as before."""
    batch = config.training.global_batch // config.accumulate * micro
    return config.with_overrides({"training.global_batch": batch}).in_parts(micro)


def _times(played: Played, low: float, high: float) -> dict[str, Any]:
    return {
        "step_s": played.step_s,
        "low_s": played.step_s * low,
        "high_s": played.step_s * high,
        "work_s": played.work_s,
        "wait_s": played.wait_s,
        "bubble_s": played.bubble_s,
        "comm_s": played.comm_s,
        "spans": played.spans,
    }


def _late(step: Step) -> float:
    """How much later than the mean the last rank is, for the root of a second of work.

    The ranks' work differs as one rank's did from one step to the next. (A machine that is slow for
    some seconds slows all of them, so it does not count.) If what delays them comes by chance, its
    standard deviation grows with the root of the time; the last of n ranks is late by the expected
    maximum of n such numbers (Blom's approximation).
    """
    if step.world < 2 or len(step.totals_s) < 2:
        return 0.0
    changes = [abs(then - now) for now, then in pairwise(step.totals_s)]
    deviation = 1.4826 * statistics.median(changes) / math.sqrt(2)
    last = statistics.NormalDist().inv_cdf((step.world - 0.375) / (step.world + 0.25))
    return last * deviation / math.sqrt(max(own_work_s(step), 1e-12))


def _spread(totals: Sequence[float]) -> float:
    """How far single steps are from the median, as a share of it."""
    if len(totals) < 2:
        return 0.0
    middle = statistics.median(totals)
    return statistics.median(abs(t - middle) for t in totals) / middle
