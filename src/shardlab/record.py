"""The run folder: what a run leaves behind, and the boundary between running and looking.

Everything that analyses or draws reads these files and nothing else. No torch is needed to
read or mark a folder.
"""

from __future__ import annotations

import errno
import json
import math
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from shardlab import boards
from shardlab.errors import Halt, RankFailure
from shardlab.guard.pulse import LEFT, PULSE

if TYPE_CHECKING:
    from torch import Tensor

    from shardlab.boards import Board
    from shardlab.comm import Ledger
    from shardlab.trace.capture import Capture
    from shardlab.workloads.base import Batch
    from shardlab.world import World

README = """\
# {title}

| file | what it is |
|---|---|
| `config.yaml` | the resolved configuration; again: `shardlab train --config config.yaml` |
| `env.json` | versions, CPU, GPU, git commit, command |
| `status.json` | running, finished, crashed (which rank, where), hung, interrupted |
| `run.lock` | held while the run goes on, so that no second run writes into this folder |
| `rank<r>.jsonl` | a line per optimizer step of rank r: loss, times, samples, bytes, memory |
| `ledger.rank<r>.jsonl` | a line per collective that our code called: what, where, when |
| `traces/rank<r>/` | only with `--profile`: PyTorch profiler traces; `shardlab trace analyze .` |
| `tensorboard/` | only with `output.tensorboard`: for `tensorboard --logdir .` |
| `wandb/` | only with `output.wandb`: what Weights & Biases keeps of the run |
| `audit.json` | only after `--audit-data`: how often each sample was fed, epoch by epoch |
| `evaluation.jsonl` | only if the run evaluated: a line per evaluation on the held-out samples |
| `checkpoints/step-<n>/` | only with `--checkpoint-every`: what `--resume .` goes on from |
| `checkpoints.jsonl` | a line per checkpoint: how long it took, how large, what went wrong |
| `resumes.jsonl` | only if the run was resumed: a line each time, from where and as what |
| `faults.rank<r>.jsonl` | only with `--inject`: the faults that struck rank r |
| `crash.txt` | only after a crash: the first failing rank and its traceback |
| `hang.txt`, `hang.json` | only after a hang: who was missing, and each rank's Python stack |
| `out-of-step.*`, `drifted.*`, `not-finite.*` | only if a guard ended the run: what it found |

Times ending in `_ns` are of the host's monotonic clock. `step_ms` covers forward, backward,
communication and update; `data_ms` is the wait for the batch before it.
"""


def new_folder(root: Path, name: str, chosen: Path | None = None) -> Path:
    """An empty folder: the chosen one, or ``root/<time>-<name>``."""
    if chosen is not None:
        chosen.mkdir(parents=True, exist_ok=True)
        return chosen
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    for suffix in ("", *(f"-{i}" for i in range(2, 1000))):
        folder = root / f"{stamp}-{name}{suffix}"
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:  # two runs in one second
            continue
    raise FileExistsError(root / f"{stamp}-{name}")


def write_text(path: Path, text: str) -> None:
    """Whole or not at all: a reader never sees half a file."""
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(text, encoding="utf-8", newline="\n")
        os.replace(part, path)  # noqa: PTH105
    except OSError:  # a full disk
        with suppress(OSError):
            part.unlink()
        raise


def write_json(path: Path, value: Any) -> None:
    write_text(path, json_text(value, indent=1) + "\n")


def json_text(value: Any, indent: int | None = None) -> str:
    """Strict JSON: it has no NaN or infinity, so a loss that is one becomes null."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return value


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The rows of a file that may have been cut off in its last line."""
    rows: list[dict[str, Any]] = []
    if path.exists() and not path.is_file():
        return rows
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            break
        if not isinstance(row, dict):
            break
        rows.append(row)
    return rows


NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


@contextmanager
def room_needed(rank: int) -> Iterator[None]:
    """A disk that is full ends a run with a sentence, not with the stack of whoever wrote last."""
    try:
        yield
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        what = f": {error.filename}" if error.filename else ""
        raise Halt(
            "disk full",
            f"rank {rank} cannot write the run's files: {error.strerror}{what}. Checkpoints that "
            "are there are whole: make room, then go on with --resume",
            rank,
        ) from None


def mark(folder: Path, state: str, **details: Any) -> None:
    write_json(folder / "status.json", {"state": state, **details})


def mark_crashed(folder: Path, failure: RankFailure) -> None:
    """Say in the folder that the run crashed: which rank, after which step, and why."""
    if isinstance(failure, Halt):
        _mark_halted(folder, failure)
        return
    path = folder / f"rank{failure.rank}.jsonl"
    steps = read_jsonl(path) if path.exists() else []
    last = steps[-1]["step"] if steps else None
    mark(folder, "crashed", rank=failure.rank, last_finished_step=last, reason=failure.message)
    where = "before its first step was finished" if last is None else f"after step {last}"
    text = failure.traceback or "(no traceback: the process was ended from outside)\n"
    (folder / "crash.txt").write_text(
        f"rank {failure.rank} failed {where}: {failure.message}\n\n{text}", encoding="utf-8"
    )


def _mark_halted(folder: Path, halt: Halt) -> None:
    """The verdict of a guard: its state in the status, and all it knows in two files."""
    mark(folder, halt.state, rank=halt.rank, reason=halt.message)
    name = {"hung": "hang"}.get(halt.state, halt.state.replace(" ", "-"))
    write_json(folder / f"{name}.json", {"schema": 1, "state": halt.state, **halt.details})
    write_text(folder / f"{name}.txt", f"{halt.message}\n\n{halt.traceback or ''}")


def cut_back(folder: Path, step: int) -> None:
    """Remove what was recorded of ``step`` and later, by all ranks: it will be done again."""
    for path in _files(folder, "rank*.jsonl"):
        _keep(path, [row for row in read_jsonl(path) if _number(row, "step") < step])
    for name, key in (("evaluation.jsonl", "steps"), ("checkpoints.jsonl", "step")):
        if (folder / name).is_file():
            rows = [row for row in read_jsonl(folder / name) if _number(row, key) <= step]
            _keep(folder / name, rows)
    for path in _files(folder, "ledger.rank*.jsonl"):
        rows = read_jsonl(path)
        later = (i for i, r in enumerate(rows) if r.get("step", 0) is not None
                 and _number(r, "step") >= step)  # fmt: skip
        _keep(path, rows[: next(later, len(rows))])


def _files(folder: Path, pattern: str) -> list[Path]:
    return [path for path in folder.glob(pattern) if path.is_file()]


def _number(row: Mapping[str, Any], key: str) -> float:
    """A number of a row. In a damaged row it is infinite, so the row is not kept."""
    value = row.get(key)
    return value if isinstance(value, int) else math.inf


def _keep(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    write_text(path, "".join(json_text(row) + "\n" for row in rows))


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
    ) -> None:
        """``first``: the step that a resumed run begins with; the files are gone on with."""
        self.world = world
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

    def __enter__(self) -> Recorder:
        self._between_steps(self.first)
        PULSE.begin_loop()
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        """Also after a crash: what was measured is kept. A trace under way is not."""
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
        return self._files.enter_context(path.open("a", encoding="utf-8"))

    @contextmanager
    def step(self, number: int, microbatches: Sequence[Batch]) -> Iterator[None]:
        """Times the step inside."""
        ledger = self.ledger
        PULSE.begin_step(number)
        calls, size = ledger.calls, ledger.bytes
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
            "step_ms": (end - start) / 1e6,
            "data_ms": (start - self._last_end) / 1e6,
            "samples": sum(b.samples for b in microbatches),
            "targets": sum(b.count for b in microbatches),
            "collectives": ledger.calls - calls,
            "collective_bytes": ledger.bytes - size,
            "profiled": profiled,
            **self._memory(),
        }
        self._events = events
        self._last_end = end
        PULSE.end_step()
        self._between_steps(number + 1)

    def _between_steps(self, number: int) -> None:
        """Where windows of the profiler open and close; what that takes is in no step's time."""
        if self.capture is not None:
            self.capture.boundary(number)
            self._last_end = time.perf_counter_ns()

    def loss(self, number: int, loss: Tensor) -> None:
        """The loss of the step just made; its row is complete with this."""
        assert self._row["step"] == number
        events: tuple[Any, ...] = ()
        if self._events:
            # To read a GPU's number is to wait for all that is queued behind it as well, so it is
            # sent to the host now and read when it has come.
            loss, arrived = _sent_to_host(loss)
            events = (*self._events, arrived)
        self._under_way.append(_Step(self._row, loss, events))
        self._write()
        self._last_end = time.perf_counter_ns()  # writing is no wait for data

    def evaluated(self, finished: int, result: Mapping[str, Any]) -> None:
        """An evaluation after so many steps. What it took is in no step's time."""
        row = {"steps": finished, **result}
        self.evaluations.append(row)
        for board in self.boards:
            board.show(finished, boards.of_evaluation(row))
        if self.world.rank == 0:
            if self.folder is not None:
                with (self.folder / "evaluation.jsonl").open("a", encoding="utf-8") as file:
                    file.write(json_text(row) + "\n")
            self.world.tell({"evaluation": row})
        self._last_end = time.perf_counter_ns()

    def flush(self) -> None:
        """Every row to its file: a checkpoint's steps are recorded before it has its name."""
        self._write(all_of_them=True)

    def checkpointed(self, row: Mapping[str, Any]) -> None:
        """A checkpoint is there, or failed. What the run waited for it is in no step's time."""
        if self.world.rank == 0:
            if self.folder is not None:
                with (self.folder / "checkpoints.jsonl").open("a", encoding="utf-8") as file:
                    file.write(json_text(row) + "\n")
            self.world.tell({"checkpoint": row})
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
                board.show(oldest.row["step"], boards.of_step(oldest.row))
            if self._file:
                self._file.write(json_text(oldest.row) + "\n")
                self._file.flush()
            self._tell(oldest.row)
        if self._ledger_file:
            for entry in self.ledger.take():
                self._ledger_file.write(json.dumps(entry) + "\n")
            self._ledger_file.flush()

    def _tell(self, row: Mapping[str, Any]) -> None:
        """Progress, from rank 0, ten times a second at most, and the last step always."""
        now = time.monotonic()
        is_last = row["step"] == self.total_steps - 1
        if self.world.rank == 0 and (is_last or now - self._last_told > 0.1):
            self._last_told = now
            self.world.tell({**row, "steps": self.total_steps})

    def _cuda_events(self) -> tuple[Any, Any] | None:
        if self.world.device.type != "cuda":
            return None
        import torch

        return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def _memory(self) -> dict[str, int]:
        """The process's resident memory on a CPU, the peak of PyTorch's allocator on a GPU."""
        if self.world.device.type != "cuda":
            return {"rss_bytes": resident_bytes()}
        import torch

        return {"cuda_peak_bytes": torch.cuda.max_memory_allocated(self.world.device)}


def _sent_to_host(value: Tensor) -> tuple[Tensor, Any]:
    """A copy on its way to the host, and the event after which it is there."""
    import torch

    copy = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
    copy.copy_(value.detach(), non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()
    return copy, arrived


def resident_bytes() -> int:
    """The resident memory of this process now (Linux), or its peak so far (elsewhere)."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
