"""One trace file to one ``Trace``: events, steps, and whose they are."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from shardlab.errors import UsageError
from shardlab.trace.decode import Columns, Mode, ReadAgain
from shardlab.trace.model import ANNOTATION, CPU_OP, RUNTIME, Events, Step, Trace
from shardlab.trace.stream import EventText

_STEP = re.compile(r"ProfilerStep\s*#\s*(\d{1,15})")
_RANK_IN_NAME = re.compile(r"(?:rank|worker|node)[-_ ]?(\d{1,9})", re.IGNORECASE)
PAUSE = 0.5  # of a step: a longer gap between two markers is the profiler's pause, not the step's


def parse(path: Path) -> Trace:
    """Read a trace. One without step markers is one step, from its first event to its last.

    Operators on the host are most of a GPU trace and not needed there; if it turns out that the
    GPU did nothing, or that Gloo sent its tensors, the file is read again with them.
    """
    text, columns = _read(path)
    on_gpu = columns.on_gpu
    if columns.needs_operators and not columns.mode.operators:
        text, columns = _read(path, replace(columns.mode, operators=True))
    events, comm_args = columns.events()
    names = tuple(columns.names)
    metadata = _metadata(text)
    steps, marker = _steps(events, names, on_gpu)
    marked = bool(steps)
    if not marked and len(events):
        steps = (Step(0, int(events.start_ns.min()), int(events.end_ns.max())),)
        marker = _first_on_host(events)
    rank, world = _identity(metadata, path)
    return Trace(
        path=path,
        rank=-1 if rank is None else rank,
        world=world,
        device="gpu" if on_gpu else "cpu",
        events=events,
        names=names,
        threads=tuple(columns.threads),
        main_thread=-1 if marker is None else int(events.tid[marker]),
        pid=None if marker is None else columns.pids.get(names[events.name[marker]]),
        steps=steps,
        marked=marked,
        comm_args=comm_args,
        memory=columns.memory(),
        metadata=metadata,
        base_ns=_integer(metadata.get("baseTimeNanoseconds")) or 0,
        rounded=columns.float_times,
    )


def _read(path: Path, mode: Mode | None = None) -> tuple[EventText, Columns]:
    text = EventText(path)
    columns = Columns(mode or Mode(operators=not _names_a_gpu(text.head)))
    try:
        text.decode(columns.decode)
        columns.flush()
    except ReadAgain as again:
        return _read(path, again.mode)
    return text, columns


def _names_a_gpu(head: bytes) -> bool:
    found = re.search(rb'"deviceProperties"\s*:\s*\[\s*(.)', head)
    return found is not None and found[1] == b"{"


# ------------------------------------------------------------------ what is around the events


def _metadata(text: EventText) -> dict[str, Any]:
    """The file's top-level keys."""
    found: dict[str, Any] = {}
    head = text.head.strip().removeprefix(b"\xef\xbb\xbf").rstrip(b", \t\r\n")
    tail = text.tail.strip().lstrip(b", \t\r\n")
    for part in (head + b"}" if head else b"{}", b"{" + tail if tail else b"{}"):
        try:
            found |= msgspec.json.decode(part.decode("utf-8", "replace"), type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError):
            raise UsageError(
                f"{text.path} is cut or damaged: what is around its events is not valid JSON"
            ) from None
    return found


def _identity(metadata: Mapping[str, Any], path: Path) -> tuple[int | None, int | None]:
    """Rank and world: as stamped by us or by PyTorch, else from the name of file or folder."""
    for key, size in (("shardlab", "world"), ("distributedInfo", "world_size")):
        stamp = metadata.get(key)
        if isinstance(stamp, Mapping) and (rank := _count(stamp.get("rank"))) is not None:
            return rank, _count(stamp.get(size))
    for name in (path.name, path.parent.name):
        if found := _RANK_IN_NAME.search(name):
            return int(found[1]), None
    return None, None


def _count(value: Any) -> int | None:
    """A number of ranks; None if it is not a number or is more than there can be."""
    number = _integer(value)
    return number if number is not None and 0 <= number < 10**9 else None


def _integer(value: Any) -> int | None:
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if abs(number) < 1 << 62 else None


# ------------------------------------------------------------------ steps


def _steps(
    events: Events, names: Sequence[str], on_gpu: bool
) -> tuple[tuple[Step, ...], int | None]:
    """The optimizer steps, and the row of the first one's marker.

    Markers on the GPU's side are not used: they begin late and end late.
    """
    numbers = {i: int(found[1]) for i, name in enumerate(names) if (found := _STEP.match(name))}
    if not numbers:
        return (), None
    rows = events.in_order((events.kind == ANNOTATION) & np.isin(events.name, list(numbers)))
    steps: list[Step] = []
    for i, row in enumerate(rows):
        start, end = int(events.start_ns[row]), int(events.end_ns[row])
        if steps and start < steps[-1].end_ns:  # a second thread or process marks the same step
            if end > steps[-1].end_ns and numbers[int(events.name[row])] != steps[-1].number:
                steps[-1] = Step(steps[-1].number, steps[-1].start_ns, start)
            else:
                continue
        follows = int(events.start_ns[rows[i + 1]]) if i + 1 < len(rows) else None
        if follows is not None and end < follows <= end + PAUSE * (end - start):
            end = follows
        elif on_gpu and (follows is None or follows > end):
            end = max(end, _gpu_end(events, start, end))
            end = end if follows is None else min(end, follows)
        steps.append(Step(numbers[int(events.name[row])], start, end))
    return tuple(steps), int(rows[0]) if len(rows) else None


def _first_on_host(events: Events) -> int | None:
    """Its thread is taken for the main one where no step is marked: a loop begins there."""
    rows = events.in_order(np.isin(events.kind, (ANNOTATION, RUNTIME, CPU_OP)))
    return int(rows[0]) if len(rows) else None


def _gpu_end(events: Events, start: int, end: int) -> int:
    """When the last GPU event that was launched between ``start`` and ``end`` ended."""
    launches = (events.kind == RUNTIME) & (events.start_ns >= start) & (events.start_ns < end)
    launched = np.unique(events.correlation[launches])
    gpu = events.on_gpu & (events.correlation >= 0)
    gpu &= np.isin(events.correlation, launched[launched >= 0])
    return int(events.end_ns[gpu].max()) if gpu.any() else end
