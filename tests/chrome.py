"""Profiler traces made by hand, whose right answers are plain to see; and the real ones."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

# Real traces that we recorded, with HTA's results: tests/trace/recorded/README.md. More, of others,
# lie beside the repository on some machines only.
RECORDED = Path(__file__).resolve().parent / "trace" / "recorded"
REAL = Path(__file__).resolve().parents[2] / "shared" / "traces"
FOLDERS = [
    folder
    for source in (RECORDED, REAL)
    if source.is_dir()
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


def document(
    events: Sequence[Event], rank: int | None = 0, world: int = 2, **metadata: Any
) -> dict[str, Any]:
    """As the profiler writes it."""
    about: dict[str, Any] = {"schemaVersion": 1, **metadata}
    if rank is not None:
        about["distributedInfo"] = {"backend": "gloo", "rank": rank, "world_size": world}
    marks = [
        {
            "ph": "M",
            "name": "process_name",
            "pid": 7,
            "tid": 0,
            "ts": 0,
            "args": {"name": "python"},
        },
        {"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": 1},
        event("Trace", "PyTorch Profiler (0)", 0, 1),
    ]
    return {**about, "traceEvents": [*events, *marks], "traceName": "made by hand"}


def write(path: Path, content: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path
