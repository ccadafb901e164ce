"""The recorder: it times the steps of a rank and writes a line for each into the run folder."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import torch

from shardlab.errors import Halt
from shardlab.files import append_jsonl, append_to, json_text
from shardlab.pulse import LEFT, PULSE
from shardlab.training import loggers
from shardlab.world import sent_to_host

if TYPE_CHECKING:
    from torch import Tensor

    from shardlab.batch import Batch
    from shardlab.ledger import Ledger
    from shardlab.trace.capture import Capture
    from shardlab.training.loggers import Board
    from shardlab.world import World


@dataclass
class _Step:
    """A step on its way to the file; on a GPU its loss and times are read when they are there."""

    row: dict[str, Any]
    loss: Tensor
    events: tuple[Any, ...] = ()  # of CUDA: the step's begin and end, and its loss on the host


class Recorder:
    """Times the steps, and writes ``rank<r>.jsonl`` and the ledger if it is given a folder.

    On a GPU nothing here waits for the device while it may be busy: steps are timed by events
    and written some steps later, so recording does not slow what it records.
    """

    LAG = 8  # steps that may be under way on a GPU before we wait for the oldest

    def __init__(
        self,
        folder: Path | None,
        world: World,
        ledger: Ledger,
        total_steps: int,
        capture: Capture | None = None,
        shown_on: Sequence[Board] = (),
        first: int = 0,
        rate: Callable[[], float] | None = None,
        log_every: int | None = None,
    ) -> None:
        """``first``: the step that a resumed run begins with; it adds to the files that are there.
        ``rate``: the learning rate of the step just made. ``log_every``: steps whose numbers are
        told in any case; None: ten times in a run, and at least every hundredth step.
        """
        self.world = world
        self.rate = rate
        self.log_every = log_every or min(100, max(1, total_steps // 10))
        self.first = first
        self.boards = shown_on
        self.capture = capture
        self.ledger = ledger
        self.total_steps = total_steps
        self.rows: list[dict[str, Any]] = []
        self.evaluations: list[dict[str, Any]] = []
        self._files = ExitStack()
        self._file = self._open(folder, f"rank{world.rank}.jsonl")
        self._ledger_file = self._open(folder, f"ledger.rank{world.rank}.jsonl")
        self.folder = folder
        self._under_way: deque[_Step] = deque()
        self._last_end = time.perf_counter_ns()
        self._last_told = 0.0
        self._began = time.monotonic()
        self.seconds = 0.0  # from the first step to the last, with all that is between them

    def __enter__(self) -> Recorder:
        self._began = time.monotonic()
        self._between_steps(self.first)
        PULSE.begin_loop()
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        """Also after a crash: what was measured is kept. A trace under way is not."""
        self.seconds = time.monotonic() - self._began
        if error is None:
            PULSE.enter(LEFT)
        if self.capture is not None:
            if error is None:
                self.capture.discard()
            else:
                self.capture.abandon(error)
        try:
            self._write(all_of_them=True)
        finally:
            self._files.close()
            for board in self.boards:
                board.close()

    def _open(self, folder: Path | None, name: str) -> TextIO | None:
        if folder is None:
            return None
        path = folder / name
        if not self.first:
            path.unlink(missing_ok=True)
        return self._files.enter_context(append_to(path))

    @contextmanager
    def step(self, number: int, microbatches: Sequence[Batch]) -> Iterator[None]:
        """Times the step inside."""
        ledger = self.ledger
        PULSE.begin_step(number)
        calls, size, crossed = ledger.calls, ledger.bytes, ledger.sent_between
        ledger.step = number
        profiled = self.capture is not None and self.capture.recording
        start = time.perf_counter_ns()
        events = self._cuda_events()
        if events:
            events[0].record()
        yield
        if events:
            events[1].record()
        end = time.perf_counter_ns()
        ledger.step = None
        self._row = {
            "step": number,
            "loss": None,
            **({} if self.rate is None else {"learning_rate": self.rate()}),
            "step_ms": (end - start) / 1e6,
            "data_ms": (start - self._last_end) / 1e6,
            "samples": sum(b.samples for b in microbatches),
            "targets": sum(b.count for b in microbatches),
            "collectives": ledger.calls - calls,
            "collective_bytes": ledger.bytes - size,
            **({"between_bytes": ledger.sent_between - crossed} if ledger.ranks_per_node else {}),
            "profiled": profiled,
            **self._memory(),
        }
        self._events = events
        self._last_end = end
        PULSE.end_step()
        self._between_steps(number + 1)

    def _between_steps(self, number: int) -> None:
        """Open and close windows of the profiler; what that takes counts in no step's time."""
        if self.capture is not None:
            self.capture.boundary(number)
            self._last_end = time.perf_counter_ns()

    def loss(self, number: int, loss: Tensor) -> None:
        """The loss of the step just made; its row is complete with this."""
        assert self._row["step"] == number
        events: tuple[Any, ...] = ()
        if self._events:
            # Reading a GPU's number would wait for all that is queued behind it as well, so it is
            # sent to the host now and read when it has come.
            loss, arrived = sent_to_host(loss)
            events = (*self._events, arrived)
        self._under_way.append(_Step(self._row, loss, events))
        self._write()
        self._last_end = time.perf_counter_ns()  # writing is no wait for data

    def evaluated(self, finished: int, result: Mapping[str, Any]) -> None:
        """Record an evaluation after ``finished`` steps. Its duration counts in no step's time."""
        row = {"steps": finished, **result}
        self.evaluations.append(row)
        for board in self.boards:
            board.show(finished, loggers.of_evaluation(row))
        self._note("evaluation", "evaluation.jsonl", row)

    def flush(self) -> None:
        """Every row to its file: a checkpoint's steps are recorded before it has its name."""
        self._write(all_of_them=True)

    def checkpointed(self, row: Mapping[str, Any]) -> None:
        """A checkpoint is there, or failed. What the run waited for it is in no step's time."""
        self._note("checkpoint", "checkpoints.jsonl", row)

    def _note(self, kind: str, file: str, row: Mapping[str, Any]) -> None:
        """Rank 0 writes a row and tells it. What came before it is in no step's time."""
        if self.world.rank == 0:
            if self.folder is not None:
                append_jsonl(self.folder / file, row)
            self.world.tell({kind: row})
        self._last_end = time.perf_counter_ns()

    def _write(self, all_of_them: bool = False) -> None:
        while self._under_way:
            oldest = self._under_way[0]
            if oldest.events:
                begin, end, arrived = oldest.events
                if not (all_of_them or len(self._under_way) > self.LAG or arrived.query()):
                    return
                arrived.synchronize()
                oldest.row["step_ms"] = begin.elapsed_time(end)
            oldest.row["loss"] = float(oldest.loss)
            self._under_way.popleft()
            self.rows.append(oldest.row)
            for board in self.boards:
                board.show(oldest.row["step"], loggers.of_step(oldest.row))
            if self._file:
                self._file.write(json_text(oldest.row) + "\n")
                self._file.flush()
                self._refuse_removed(self._file.fileno())
            self._tell(oldest.row)
        if self._ledger_file:
            for entry in self.ledger.take():
                self._ledger_file.write(json_text(entry) + "\n")
            self._ledger_file.flush()

    def _refuse_removed(self, file: int) -> None:
        """A file without a name is written to in vain, and so would be all that follows."""
        if os.fstat(file).st_nlink == 0:
            raise Halt(
                "folder gone",
                f"rank {self.world.rank}: somebody removed the run folder {self.folder} while the "
                "run was writing into it",
                self.world.rank,
            )

    def _tell(self, row: Mapping[str, Any]) -> None:
        """Progress, from rank 0, ten times a second at most, and always what belongs in a log: the
        first step, the last and those at regular distances."""
        now, step = time.monotonic(), row["step"]
        is_logged = step in (self.first, self.total_steps - 1) or (step + 1) % self.log_every == 0
        if self.world.rank == 0 and (is_logged or now - self._last_told > 0.1):
            self._last_told = now
            about = {"steps": self.total_steps, "logged": is_logged, "seconds": now - self._began}
            self.world.tell({**row, **about})

    def _cuda_events(self) -> tuple[Any, Any] | None:
        if self.world.device.type != "cuda":
            return None
        return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def _memory(self) -> dict[str, int]:
        """The process's resident memory on a CPU, the peak of PyTorch's allocator on a GPU."""
        if self.world.device.type != "cuda":
            return {"rss_bytes": resident_bytes()}
        return {"cuda_peak_bytes": torch.cuda.max_memory_allocated(self.world.device)}


def resident_bytes() -> int:
    """The resident memory of this process now (Linux), or its peak so far (elsewhere)."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
