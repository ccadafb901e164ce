"""Traces of a few optimizer steps of each rank, by PyTorch's own profiler.

A window is ``wait`` steps untouched, ``warmup`` steps recorded and thrown away, ``active`` steps
recorded and kept; ``repeat`` windows follow one another. The warm-up is recorded because the
first recorded step is slower than the rest, and because its events, counted, say how large the
trace will be before it is made. Outside the windows nothing is recorded and nothing is wrapped.

Inside, each optimizer step i is a span ``ProfilerStep#i`` from the end of the step before it
(so the wait for the batch is in it), with ``forward``, ``backward`` and ``optimizer`` in it and
``shardlab::<collective> #<number in the ledger> <label>`` around each collective of ours.
"""

from __future__ import annotations

import atexit
import gzip
import json
import os
import re
import shutil
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity, record_function
from torch.profiler.profiler import _KinetoProfile

from shardlab.errors import UsageError
from shardlab.files import replacing
from shardlab.guard import nodes
from shardlab.trace.clocks import Clocks

if TYPE_CHECKING:
    from shardlab.config import ProfileConfig
    from shardlab.ledger import Ledger
    from shardlab.world import World

SCHEMA = 1
# What an event of a trace takes in the compressed file: measured, see docs/capture.md.
BYTES_PER_EVENT = 21
SHAPES_FACTOR = 1.4  # with the shapes of its arguments
COMPRESSION = 5  # of 1 to 9: beyond it the time doubles for three percent of the size


def check(profile: ProfileConfig, device: torch.device) -> None:
    """Refuse what the rank's device cannot record."""
    if profile.memory_snapshot and device.type != "cuda":
        raise UsageError(
            "profile.memory_snapshot is made by PyTorch's CUDA allocator, and these ranks are on "
            f"the {device.type}; use profile.memory, which notes every allocation in the trace"
        )


class Capture:
    """The windows of one rank's run. ``boundary(i)`` is called between steps, before step i."""

    def __init__(
        self,
        profile: ProfileConfig,
        world: World,
        ledger: Ledger,
        strategy: Any,
        folder: Path,
        name: str,
    ) -> None:
        check(profile, world.device)
        self.clocks = Clocks(world)
        self.clocks.read("start")
        self.profile = profile
        self.world = world
        self.ledger = ledger
        self.strategy = strategy
        self.folder = folder / "traces" / f"rank{world.rank}"
        self.run, self.name = folder.name, name  # of the run, and of its strategy
        self.files: list[Path] = []
        self.estimated_bytes: int | None = None  # of all windows, compressed
        self._profiler: _KinetoProfile | None = None
        self._step: Any = None  # the span of the step under way
        self._opened: dict[str, Any] = {}

    def summary(self) -> dict[str, Any]:
        """The files of all ranks, their size, and the estimate of it. A collective."""
        self._read_clocks("end")
        own = {str(path): path.stat().st_size for path in self.files}
        files = {path: size for rank in self.world.gather(own) for path, size in rank.items()}
        return {
            "files": list(files),
            "bytes": sum(files.values()),
            "estimated_bytes": sum(self.world.gather(self.estimated_bytes)),
        }

    @property
    def recording(self) -> bool:
        """Whether the step under way is recorded, even if later discarded."""
        return self._profiler is not None

    def boundary(self, step: int) -> None:
        """Between two steps: ``step`` is the number of the next, if there is one."""
        self._end_step()
        before, now = self.profile.part(step - 1), self.profile.part(step)
        if before == "active" and now != "active":
            self._keep(step - 1)
        elif before == "warmup" and now == "active":
            self._count()
        if now != before and now in ("warmup", "active"):
            self._open(step)
        if self._profiler is not None:
            self._step = record_function(f"ProfilerStep#{step}")
            self._step.__enter__()

    def abandon(self, error: BaseException) -> None:
        """After a crash inside a window: leave the profiler as it is, without a trace.

        Stopping it while collectives hang could end the process before it has reported what
        happened, and so does a normal exit of Python while it runs (torch 2.13): a rank of
        torchrun's must leave without one, with the exit code that it would have had.
        """
        if self._profiler is None:
            return

        def leave() -> None:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(2 if isinstance(error, UsageError) else 1)

        atexit.register(leave)

    def discard(self) -> None:
        """At the end of a run that was asked to stop inside a window: all ranks throw it away."""
        self._end_step()
        if self._profiler is not None:
            self._stop().stop_trace()

    def _end_step(self) -> None:
        if self._step is not None:
            self._step.__exit__(None, None, None)
            self._step = None

    def _open(self, step: int) -> None:
        """Start on all ranks at once: one that begins later would look like a straggler."""
        profile, cuda = self.profile, self.world.device.type == "cuda"
        self._profiler = _KinetoProfile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])],
            record_shapes=profile.shapes,
            with_stack=profile.stacks,
            profile_memory=profile.memory,
        )
        self._profiler.prepare_trace()
        if cuda:
            torch.cuda.synchronize(self.world.device)
        if profile.memory_snapshot and profile.part(step) == "active" and not self.files:
            torch.cuda.memory._record_memory_history(max_entries=10**6)
        self.world.gather(None)
        self._profiler.start_trace()
        self._opened = {"step": step, "seq": self.ledger.calls, "clock": _clock()}

    def _stop(self) -> _KinetoProfile:
        """End the recording. A collective that ended after it would crash the process (2.13)."""
        assert self._profiler is not None
        self.strategy.settle()
        if self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)
        profiler, self._profiler = self._profiler, None
        return profiler

    def _count(self) -> None:
        """Throw the warm-up away, and say from its events how large the trace will be."""
        steps = self.profile.warmup
        profiler = self._stop()
        profiler.stop_trace()
        assert profiler.profiler is not None
        assert profiler.profiler.kineto_results is not None
        events = len(profiler.profiler.kineto_results.events())
        if self.estimated_bytes is None:
            kept = self.profile.active * self.profile.repeat
            size = BYTES_PER_EVENT * (SHAPES_FACTOR if self.profile.shapes else 1)
            self.estimated_bytes = round(events / steps * kept * size)
            if self.world.rank == 0:
                self.world.tell({"trace_bytes_estimated": self.estimated_bytes})

    def _keep(self, last: int) -> None:
        """Write the window that ended with step ``last``; all ranks wait until all have."""
        profiler = self._stop()
        first, clock = self._opened["step"], self._opened["clock"]
        profiler.add_metadata_json(
            "shardlab",
            json.dumps(
                {
                    "schema": SCHEMA,
                    "run": self.run,
                    "strategy": self.name,
                    "rank": self.world.rank,
                    "world": self.world.size,
                    "backend": self.world.backend,
                    "device": self.world.device.type,
                    "host": socket.gethostname(),
                    **({"node": nodes.CURRENT.here} if nodes.CURRENT.are_several else {}),
                    "pid": os.getpid(),
                    "steps": [first, last],
                    "ledger": [self._opened["seq"], self.ledger.calls - 1],
                    "clock": [clock, _clock()],
                }
            ),
        )
        profiler.stop_trace()
        self.folder.mkdir(parents=True, exist_ok=True)
        name = f"rank{self.world.rank}.steps{first}-{last}.pt.trace.json.gz"
        write_trace(profiler, self.folder / name)
        if self.profile.memory_snapshot and not self.files:
            torch.cuda.memory._dump_snapshot(str(self.folder / "memory.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)
        self.files.append(self.folder / name)
        self._read_clocks(f"after step {last}")
        self.world.gather(None)

    def _read_clocks(self, when: str) -> None:
        if self.files:  # else there is nothing to correct
            self.clocks.read(when)
            self.clocks.keep(self.folder.parents[1])


def write_trace(profiler: Any, path: Path) -> None:
    """Compressed, and whole or not there at all."""
    plain = path.with_name(path.name.removesuffix(".gz") + ".part")
    try:
        profiler.export_chrome_trace(str(plain))
        with (
            replacing(path) as part,
            plain.open("rb") as source,
            gzip.open(part, "wb", compresslevel=COMPRESSION) as out,
        ):
            shutil.copyfileobj(source, out, 1 << 20)
    finally:
        plain.unlink(missing_ok=True)


def _clock() -> dict[str, int]:
    """One moment on the ledger's clock and on the profiler's, so that the two can be joined."""
    before = time.perf_counter_ns()
    unix = time.time_ns()
    return {"monotonic_ns": (before + time.perf_counter_ns()) // 2, "unix_ns": unix}


def folder_name(label: str) -> str:
    """A strategy's label as the name of a folder: ``pytorch_ddp (bucket_mb=1)``."""
    return re.sub(r"[^A-Za-z0-9_.=-]+", "-", label).strip("-.") or "run"
