"""The traces of one run, and the questions that can be asked of them. Answers are plain tables."""

from __future__ import annotations

import functools
import operator
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import zip_longest
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from shardlab import text as fmt
from shardlab.errors import UsageError, unknown
from shardlab.trace import (
    activity,
    breakdown,
    clocks,
    collectives,
    find,
    hta,
    kernels,
    lateness,
    memory,
    model,
    parse,
    stream,
)  # fmt: skip
from shardlab.trace.intervals import NOTHING, Intervals
from shardlab.trace.model import Trace, row

SCHEMA = 1
ONE_SIDED = 0.03  # of all time: fewer unmatched collectives do not matter
SMALL = 24 << 20  # bytes of files: less is read sooner than a process is started


def load(
    paths: str | Path | Sequence[str | Path],
    select: str = "latest",
    jobs: int | None = None,
) -> TraceSet:
    """The traces of one run: a run folder, a folder of traces, or files.

    ``select``: ``latest`` takes each rank's last window (of the newest run, if there are
    several), ``all`` every window. ``jobs``: processes that read files; None: as many as there
    are cores. A trace without step markers is one window, and one step.
    """
    found = load_runs(paths, select, jobs)
    if len(found) > 1:
        raise UsageError(
            f"{len(found)} runs there; load one of them, or all with shardlab.trace.load_runs"
        )
    return found[0]


@functools.lru_cache(maxsize=64)
def load_once(folder: Path) -> TraceSet:
    """As ``load``, but each folder is read once: numbers and timelines are made of it."""
    return load(folder, jobs=1)


def load_runs(
    paths: str | Path | Sequence[str | Path],
    select: str = "latest",
    jobs: int | None = None,
) -> list[TraceSet]:
    """As ``load``, for every run that is found."""
    if isinstance(paths, str | Path):
        paths = [paths]
    if jobs is not None and jobs < 1:
        raise UsageError(f"--jobs {jobs}: at least one process must read")
    return [_load_run(files, select, jobs) for files in find.runs(paths, select)]


def _load_run(files: Sequence[Path], select: str, jobs: int | None) -> TraceSet:
    traces, warnings = [], []
    for path, trace in zip(files, _parse_all(files, jobs), strict=True):
        if isinstance(trace, stream.NotATrace):
            if len(files) == 1:
                raise trace
            warnings.append(f"{path.name} is not a trace: left out")
        else:
            traces.append(trace)
    if not traces:
        raise UsageError(f"no traces: {files[0]} and the other files there are not traces")
    for trace in traces:
        if not trace.steps:
            raise UsageError(f"{trace.path} has no steps: it has no events of any use")
    traces, more = find.numbered(traces)
    traces = _on_one_clock(traces)
    by_rank = find.one_run(traces)
    windows = max(len(windows) for windows in by_rank.values())
    if select == "latest":
        by_rank = {rank: windows[-1:] for rank, windows in by_rank.items()}
    chosen = [trace for rank in sorted(by_rank) for trace in by_rank[rank]]
    if select == "latest" and windows > 1:
        more.append(f"{windows} windows were recorded; this is the last (--select all: every one)")
    if unmarked := [trace for trace in chosen if not trace.marked]:
        some = "the" if len(unmarked) == len(chosen) else f"{len(unmarked)} of {len(chosen)}"
        more.append(
            f"no step markers (ProfilerStep#) in {some} traces: the whole of such a trace is taken "
            "as one window, and counts as one step"
        )
    return TraceSet(tuple(chosen), tuple(warnings + more))


def _on_one_clock(traces: Sequence[Trace]) -> list[Trace]:
    """Our own traces, as far as the clocks of their nodes were measured."""
    folders = {t.path: t.path.parents[2] for t in traces if t.shardlab and len(t.path.parents) > 2}
    nodes = {folder: clocks.load(folder) for folder in set(folders.values())}
    return [clocks.corrected(t, nodes[folders[t.path]]) if t.path in folders else t for t in traces]


def _parse_all(files: Sequence[Path], jobs: int | None) -> list[Any]:
    """Each file's Trace, or why it is not one. In processes, if the files are large."""
    size = sum(path.stat().st_size * (10 if path.suffix == ".gz" else 1) for path in files)
    workers = min(jobs or os.cpu_count() or 1, len(files))
    if workers == 1 or (jobs is None and size < SMALL):
        return [_parse_one(path) for path in files]
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        return list(pool.map(_parse_one, files))


def _parse_one(path: Path) -> Trace | stream.NotATrace:
    try:
        return parse.parse(path)
    except stream.NotATrace as error:
        return error


class TraceSet:
    """One run's traces, one per rank and window. Each answer is computed once, when asked for."""

    def __init__(
        self, traces: tuple[Trace, ...], warnings: tuple[str, ...] = (), window: str = ""
    ) -> None:
        self.traces = traces
        self.window = window  # which of several windows it is: ``steps 2-4, window 1 of 2``
        self._warnings = warnings

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({trace.rank for trace in self.traces}))

    @property
    def world(self) -> int | None:
        return next((t.world for t in self.traces if t.world is not None), None)

    @property
    def device(self) -> str:
        """``gpu`` or ``cpu``."""
        return self.traces[0].device

    @property
    def marked(self) -> bool:
        """Whether the steps are marked; else everything that was recorded is one."""
        return any(trace.marked for trace in self.traces)

    def windows(self) -> dict[str, TraceSet]:
        """Each window by itself, by a name that can be a folder's: ``steps2-4``, or ``window1``
        where the steps do not tell them apart."""
        count = len(self._windows)
        steps = [
            (min(t.steps[0].number for t in own), max(t.steps[-1].number for t in own))
            for own in self._windows
        ]
        told_apart = self.marked and len(set(steps)) == count
        found = {}
        for i, ((first, last), own) in enumerate(zip(steps, self._windows, strict=True), start=1):
            name = f"steps{first}-{last}" if told_apart else f"window{i}"
            steps_of = f"step {first}, " if first == last else f"steps {first} to {last}, "
            said = f"{steps_of if told_apart else ''}window {i} of {count}" if count > 1 else ""
            found[name] = TraceSet(tuple(own), self._warnings, said)
        return found

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the reader should know: files left out, ranks missing, what cannot be known."""
        notes = [*self._warnings, *(w for m in self._matched for w in m.warnings)]
        if len(self.ranks) == 1 and self.world != 1 and self.collectives():
            notes.append(
                "one rank's trace alone: how long it waited for others cannot be known, and is in "
                "exposed communication"
            )
        elif self.missing:
            who = fmt.names([*map(str, self.missing)])
            has = "rank {} has none" if len(self.missing) == 1 else "ranks {} have none"
            notes.append(f"traces of {len(self.ranks)} of {self.world} ranks: {has.format(who)}")
        if self.one_sided:
            notes.append(f"no what-if, and no rank is called slow: {self.one_sided}")
        if len(self._shared_steps) < self._steps_in_set:
            notes.append("not every rank recorded the same steps: means are of those that all have")
        return tuple(notes)

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks of the world that have no trace here."""
        return tuple(sorted(set(range(self.world or 0)) - set(self.ranks)))

    @functools.cached_property
    def one_sided(self) -> str:
        """Why it is not known how long ranks waited for each other; empty if it is."""
        rows = [c for c in self.collectives() if c.step is not None and c.is_one_sided]
        if not rows:
            return ""
        if self.missing:
            one = f"rank {self.missing[0]} has" if len(self.missing) == 1 else ""
            return f"{one or f'{len(self.missing)} ranks have'} no trace, and may have come last"
        spans = (p.end_ns - p.start_ns for row in rows for p in row.participants)
        wall_us = sum(row.wall_us for row in self._breakdown)
        if sum(spans) < 1000 * ONE_SIDED * wall_us:
            return ""
        return f"it is not known which ranks {fmt.count(len(rows), 'collective')} had"

    def slow_rank(self) -> tuple[int | None, str]:
        """The slow rank, and why it is called slow; None: no rank is, or it is not known."""
        if self.one_sided:
            return None, self.one_sided
        if not (late := self.lateness()):
            if any(row.bubble_us for row in self._breakdown):
                return None, "in a pipeline, waits do not show who is slow"
            return None, "no rank made others wait for long"
        return late[0].rank if late[0].slow else None, f"rank {late[0].rank}: {late[0].reason}"

    # ------------------------------------------------------------------ shared by the answers

    @functools.cached_property
    def _windows(self) -> list[list[Trace]]:
        """The traces that were recorded together: one per rank."""
        return [[t for t in own if t is not None] for own in zip_longest(*self._by_rank)]

    @property
    def _by_rank(self) -> list[list[Trace]]:
        """Each rank's traces, in order of time."""
        return [[t for t in self.traces if t.rank == rank] for rank in self.ranks]

    @functools.cached_property
    def _matched(self) -> list[collectives.Matched]:
        return [collectives.match(window) for window in self._windows]

    @functools.cached_property
    def _activity(self) -> dict[int, list[activity.Device]]:
        return {id(trace): activity.devices(trace) for trace in self.traces}

    def _in_windows(self) -> list[tuple[Trace, Intervals, Intervals, int]]:
        """Every trace, when it waited for others, when it was in a pipeline's bubble, and what its
        clock is ahead by."""
        return [
            (
                trace,
                matched.waited(trace.rank),
                matched.bubbles.get(trace.rank, NOTHING),
                matched.offsets[trace.rank],
            )
            for window, matched in zip(self._windows, self._matched, strict=True)
            for trace in window
        ]

    def shifts(self) -> dict[Path, int]:
        """By file, what turns its own times into the common clock's, in nanoseconds."""
        return {trace.path: -offset for trace, _, _, offset in self._in_windows()}

    # ------------------------------------------------------------------ the answers

    def breakdown(self, per: str = "step") -> tuple[model.Breakdown, ...]:
        """Where the time went, for each rank and step, or (``per="rank"``) over all steps."""
        if per not in ("step", "rank"):
            raise unknown("breakdown per", per, ("step", "rank"))
        return self._breakdown if per == "step" else tuple(breakdown.per_rank(self._breakdown))

    @functools.cached_property
    def _breakdown(self) -> tuple[model.Breakdown, ...]:
        rows = [
            found
            for trace, waits, bubble, _ in self._in_windows()
            for found in breakdown.per_step(trace, self._activity[id(trace)], waits, bubble)
        ]
        return tuple(sorted(rows, key=lambda found: found.rank))

    def mean_step(self) -> dict[str, Any]:
        """The mean step over ranks and steps, in ms."""
        return breakdown.mean_step(self.comparable())

    def comparable(self) -> tuple[model.Breakdown, ...]:
        """Where the time went for each rank, over the steps that all ranks recorded."""
        steps = [row for row in self._breakdown if row.step in self._shared_steps]
        return tuple(breakdown.per_rank(steps))

    @functools.cached_property
    def _shared_steps(self) -> set[int]:
        """All steps, if there is none that all ranks recorded."""
        each = [{s.number for t in own for s in t.steps} for own in self._by_rank]
        return set.intersection(*each) or set.union(*each)

    def collectives(self) -> tuple[model.Collective, ...]:
        """Every collective, matched across ranks, in order of time."""
        return tuple(found for matched in self._matched for found in matched.collectives)

    def collective_summary(self, by: str = "kind") -> tuple[model.CollectiveSummary, ...]:
        """Count, bytes, time and bandwidth, by ``kind`` or by ``label`` (bucket, block)."""
        return collectives.summarize([c for c in self.collectives() if c.step is not None], by)

    def stragglers(self) -> tuple[model.Straggler, ...]:
        """Which rank made others wait, how long, in which phase; the worst first."""
        return collectives.stragglers(
            (matched, {trace.rank: self._exposed(trace) for trace in window})
            for window, matched in zip(self._windows, self._matched, strict=True)
        )

    @functools.cached_property
    def _lateness(self) -> tuple[model.Lateness, ...]:
        return lateness.of(
            lateness.Window(
                matched.collectives,
                {trace.rank: trace for trace in window},
                matched.offsets,
                {trace.rank: self._exposed(trace) for trace in window},
                {trace.rank: self._running(trace) for trace in window},
            )
            for window, matched in zip(self._windows, self._matched, strict=True)
        )

    def lateness(self) -> tuple[model.Lateness, ...]:
        """Of the ranks that came last notably: whether they are slow, and where that arose."""
        return self._lateness

    def _exposed(self, trace: Trace) -> Intervals:
        """When a rank communicated on one of its devices and did not compute there."""
        exposed = (device.comm - device.compute for device in self._activity[id(trace)])
        return functools.reduce(operator.or_, exposed, NOTHING)

    def _running(self, trace: Trace) -> Intervals:
        """When a rank computed or copied on one of its devices."""
        running = (device.compute | device.memory for device in self._activity[id(trace)])
        return functools.reduce(operator.or_, running, NOTHING)

    def clocks(self) -> tuple[clocks.Clock, ...]:
        """How the clock of each node was corrected; empty where all ranks have one, and where they
        were not measured. Of several windows: the last, with the largest error of all."""
        found = {t.clock.node: t.clock for t in self.traces if t.clock}
        errors = {
            n: max(t.clock.error_us for t in self.traces if t.clock and t.clock.node == n)
            for n in found
        }
        return tuple(replace(found[n], error_us=errors[n]) for n in sorted(found))

    def memory(self) -> tuple[model.Memory, ...]:
        """Memory over time, where it was recorded."""
        return tuple(found for trace in self.traces for found in memory.timelines(trace))

    def what_if(self) -> tuple[model.WhatIf, ...]:
        """Changes that were not made. Empty where waits are not known."""
        steps = [row for row in self._breakdown if row.step in self._shared_steps]
        return () if self.one_sided else breakdown.what_if(steps)

    def kernels(self, top: int = 10) -> tuple[model.Kernel, ...]:
        """Each rank's longest kernels; on a CPU its operators, by the time in them alone."""
        return tuple(found for own in self._by_rank for found in kernels.longest(own, top))

    def kernel_types(self) -> tuple[model.KernelType, ...]:
        """HTA's: time in computation, communication, memory and their overlaps, over all ranks."""
        return kernels.types(self.traces, self._steps_in_set)

    def idle(self) -> tuple[model.Idle, ...]:
        """HTA's idle time of each stream: waiting for the host, between kernels, other."""
        return tuple(r for t in self.traces for r in kernels.idle(t, self._steps_in_set))

    def hta(self, compat: bool = False) -> tuple[model.Hta, ...]:
        """HTA's temporal breakdown and overlap: exact, or (``compat``) by HTA's own rules."""
        steps = self._steps_in_set
        return tuple(hta.temporal(own, compat=compat, steps_in_set=steps) for own in self._by_rank)

    @property
    def _steps_in_set(self) -> int:
        return len({step.number for trace in self.traces for step in trace.steps})

    def lanes(self) -> tuple[model.Lane, ...]:
        """Spans for a timeline on one clock: each rank's steps, compute, comm, wait, bubble,
        memory."""
        result = []
        for trace, waits, bubble, offset in self._in_windows():
            start, end = trace.edges[::2] - offset, trace.edges[1::2] - offset
            names = tuple(f"step {step.number}" for step in trace.steps)
            result.append(model.Lane(trace.rank, "steps", start, end, names))
            devices = self._activity[id(trace)]
            for device in devices:
                for name, part in (
                    ("compute", device.compute),
                    ("comm", device.comm),
                    ("wait", (device.comm - device.compute) & waits - bubble),
                    ("bubble", (device.comm - device.compute) & bubble),
                    ("memory", device.memory),
                ):
                    lane = f"{name} {device.name}" if len(devices) > 1 else name
                    start, end = part.start - offset, part.end - offset
                    result.append(model.Lane(trace.rank, lane, start, end, ()))
        return tuple(result)

    def summary(self, hta_compat: bool = False) -> dict[str, Any]:
        """The content of summary.json, schema 1; docs/traces.md describes it."""
        exact = {found.rank: found for found in self.hta(compat=hta_compat)}
        slow, why = self.slow_rank()
        ranks = []
        for total in self.breakdown(per="rank"):
            times = _without(total, "step")
            ranks.append({**times, "hta": _without(exact[total.rank], "rank", "rules", "comm_us")})
        return {
            "schema": SCHEMA,
            "ranks": ranks,
            "collectives": [row(item) for item in self.collectives()],
            "stragglers": [row(item) for item in self.stragglers()],
            "clocks": [row(item) for item in self.clocks()],
            "world": self.world,
            "device": self.device,
            "strategy": self.traces[0].shardlab.get("strategy"),
            "window": self.window or None,
            "marked": self.marked,
            "hta_compat": hta_compat,
            "hta_rules": {str(rank): list(exact[rank].rules) for rank in sorted(exact)},
            "steps": [row(item) for item in self.breakdown()],
            "collective_summary": {
                by: [row(item) for item in self.collective_summary(by)] for by in ("kind", "label")
            },
            "memory": [_without(item, "at_ns", "bytes") for item in self.memory()],
            "lateness": [row(item) for item in self.lateness()],
            "slow_rank": slow,
            "slow_rank_reason": why,
            "missing_ranks": list(self.missing),
            "what_if": None if self.one_sided else [row(item) for item in self.what_if()],
            "what_if_reason": self.one_sided or None,
            "kernels": [row(item) for item in self.kernels()],
            "kernel_types": [row(item) for item in self.kernel_types()],
            "idle": [row(item) for item in self.idle()],
            "warnings": list(self.warnings),
        }


def _without(item: Any, *names: str) -> dict[str, Any]:
    """A row as plain values, but for some."""
    return {name: value for name, value in row(item).items() if name not in names}
