"""Profiler traces made by hand, whose right answers are plain to see; and the real ones."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from shardlab import trace as traces
from shardlab.trace.model import PARTS, Breakdown

# Real traces that we recorded, with HTA's results: tests/trace/recorded/README.md. More, of others,
# lie beside the repository on some machines only.
TESTS = Path(__file__).resolve().parents[1]
RECORDED = TESTS / "trace" / "recorded"
REAL = TESTS.parents[1] / "shared" / "traces"
FOLDERS = [
    folder
    for source in (RECORDED, *([REAL] if REAL.is_dir() else []))
    for folder in sorted(source.iterdir())
    if folder.is_dir()
]
every_real = pytest.mark.parametrize("folder", FOLDERS, ids=[folder.name for folder in FOLDERS])

MAIN, ENGINE, GLOO = 100, 101, 200  # threads
Event = dict[str, Any]


def event(cat: str, name: str, ts: float, dur: float, tid: int = MAIN, **args: Any) -> Event:
    return {"ph": "X", "cat": cat, "name": name, "pid": 7, "tid": tid, "ts": ts, "dur": dur,
            "args": args}  # fmt: skip


def step(number: int, ts: float, dur: float) -> Event:
    return event("user_annotation", f"ProfilerStep#{number}", ts, dur)


def kernel(
    name: str, ts: float, dur: float, *, launched: float | None, id: int, stream: int = 7,
    device: int = 0, cat: str = "kernel", thread: int = MAIN, **args: Any,
) -> list[Event]:  # fmt: skip
    """A kernel and, if ``launched``, the call on the host that launched it."""
    found = [
        {**event(cat, name, ts, dur, stream, stream=stream, device=device, correlation=id, **args),
         "pid": device}
    ]  # fmt: skip
    if launched is not None:
        found.append(event("cuda_runtime", "cudaLaunchKernel", launched, 1, thread, correlation=id))
    return found


def operator(name: str, ts: float, dur: float, tid: int = MAIN, **args: Any) -> Event:
    return event("cpu_op", name, ts, dur, tid, **args)


def span(name: str, ts: float, dur: float, tid: int = MAIN, **args: Any) -> Event:
    return event("user_annotation", name, ts, dur, tid, **args)


def allocation(ts: float, total: int, size: int, device: int = -1) -> Event:
    """Memory that was taken, or given back if ``size`` is negative; on the CPU, or on a GPU."""
    args = {"Total Allocated": total, "Total Reserved": 0, "Bytes": size, "Addr": 5,
            "Device Id": device, "Device Type": int(device >= 0)}  # fmt: skip
    return {"ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]", "pid": 7, "tid": 1,
            "ts": ts, "args": args}  # fmt: skip


def document(
    events: Sequence[Event], rank: int | None = 0, world: int = 2, **metadata: Any
) -> dict[str, Any]:
    """As the profiler writes it."""
    about: dict[str, Any] = {"schemaVersion": 1, **metadata}
    if rank is not None:
        about["distributedInfo"] = {"backend": "gloo", "rank": rank, "world_size": world}
    python = {"name": "python"}
    marks = [
        {"ph": "M", "name": "process_name", "pid": 7, "tid": 0, "ts": 0, "args": python},
        {"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": 1},
        event("Trace", "PyTorch Profiler (0)", 0, 1),
    ]
    return {**about, "traceEvents": [*events, *marks], "traceName": "made by hand"}


def write(path: Path, content: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def read(path: Path) -> Any:
    return json.loads(gzip.decompress(path.read_bytes()))


def events_of(path: Path) -> list[Event]:
    """A file's events with a duration, in order, on the machine's clock (µs), each with its end."""
    found = read(path)
    shift = found.get("baseTimeNanoseconds", 0) % 10**15 / 1000  # so that floats hold nanoseconds
    events = [e for e in found["traceEvents"] if e.get("ph") == "X"]
    moved = [e | {"ts": e["ts"] + shift, "end": e["ts"] + e["dur"] + shift} for e in events]
    return sorted(moved, key=lambda e: e["ts"])


def load(
    folder: Path, *ranks: Sequence[Event] | None, hosts: str | None = None,
    groups: Sequence[Any] = (), **metadata: Any,
) -> traces.TraceSet:  # fmt: skip
    """Traces of these ranks, written and read; None: of this rank there is none. The ranks are on
    one host, if no letter of ``hosts`` names each one's. ``groups``: each rank's list of groups."""
    for rank, events in enumerate(ranks):
        if events is None:
            continue
        about = {"host_name": hosts[rank] if hosts else "h"} if hosts != "" else {}
        content = document(events, rank, len(ranks), **about, **metadata)
        if groups:
            named = [{"pg_name": str(i), "ranks": own} for i, own in enumerate(groups[rank])]
            content["distributedInfo"]["pg_config"] = named
        write(folder / f"rank{rank}.json", content)
    return traces.load(folder)


def parts(row: Breakdown) -> dict[str, float]:
    """What a step consists of."""
    found = {name.removesuffix("_us"): getattr(row, name) for name in PARTS}
    return {name: us for name, us in found.items() if us}


def a_run(
    folder: Path, *, more: Sequence[float] = (0, 0, 0), late: float | Sequence[float] = 2000,
    ranks: int = 2, operators: int = 20, kernel: str = "aten::addmm", label: str = "bucket 0",
) -> traces.TraceSet:  # fmt: skip
    """A run of known numbers: of as many steps as ``more`` has, each of 10 ms and that much more.

    For 6 ms (and ``more``) operators run. A first all-reduce lies behind the last 1.5 ms of them.
    To a second, rank 1 comes 2 ms late (``late``); it takes 1 ms. Then nothing runs for 1 ms.
    """
    lates = late if isinstance(late, Sequence) else [late] * len(more)
    for rank in range(ranks):
        events, at = [], 0.0
        for i, (extra, wait) in enumerate(zip(more, lates, strict=True)):
            work, slept = 6000 + extra, wait * (rank == 1)
            calls = ((at + work - 1500, at + work), (at + work + slept, at + work + wait + 1000))
            events += [step(i, at, work + wait + 2000), span("forward", at, work + slept)]
            for n in range(operators):
                events.append(operator(kernel, at + n * work / operators, work / operators))
            for n, (begin, end) in enumerate(calls, start=2 * i):
                events += [
                    span(f"shardlab::all_reduce #{n} {label}", begin, 2, ENGINE),
                    operator("c10d::allreduce_", begin, 1, ENGINE),
                    span("gloo:all_reduce", begin, end - begin, GLOO),
                ]
            events += [allocation(at, 1 << 20, 1), allocation(at + 2000, 7 << 20, 6 << 20)]
            at += work + wait + 2000
        stamp = {"rank": rank, "world": ranks, "run": "a run", "strategy": "simple_ddp"}
        content = document(events, rank, ranks, shardlab=stamp | {"host": "h"})
        write(folder / f"rank{rank}.json", content)
    return traces.load(folder, jobs=1)
