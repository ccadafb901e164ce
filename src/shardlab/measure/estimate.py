"""Memory without running: the estimate of ``simulate``, the largest batch, and the error of both.

The upper half runs in the parent and imports no torch. An estimate is made in a process of its
own, which answers one config after another; ``weigh``, at the end, measures the same on ranks.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardlab.config import Config
from shardlab.errors import Late, RankFailure, UsageError
from shardlab.launch.forking import fork_server
from shardlab.launch.rank_set import RankSet, on_its_ranks
from shardlab.measure.fields import CAUSES
from shardlab.specs import BASELINE, parse_spec

if TYPE_CHECKING:
    from shardlab.world import World

SCHEMA = 1
# Optimizer state exists from the second step on; one more for what settles late. Nothing is
# prepared ahead: whether a thread is done with it at the peak is chance.
# The first step learns the order of gradients and makes the optimizer's state, the second has both.
WEIGHED = {"training.steps": 2, "training.warmup_steps": 0, "data.prefetch": 0}
NOT_COUNTED = {
    "cpu": "the interpreter and its libraries, what Gloo and small kernels take for themselves",
    "cuda": "the CUDA context, NCCL's buffers, workspaces of kernels, the allocator's gaps",
}
PEAKS = ("building", "step")
MOST = 1 << 20  # samples of a rank: the largest batch that is tried
LIMIT_S = 300.0  # one estimate of GPT-2 XL takes some 10 s


def ask_all(
    simulators: Sequence[Simulator], function: str, limit_s: float, config: Config, *args: Any
) -> list[Any]:
    """What each of them answers, all at work at the same time. If one fails, all are ended."""
    try:
        for simulator in simulators:
            simulator._send(function, limit_s, config, *args)
        return [simulator._answer(limit_s) for simulator in simulators]
    except BaseException:
        for simulator in simulators:
            simulator.__exit__()
        raise


class Simulator:
    """A process that estimates. It is started when first asked, and ends with the ``with``."""

    def __init__(self) -> None:
        self._process: Any = None
        self._pipe: Any = None
        self._stacks: int | None = None  # the file that the process writes its stack to, if asked

    def __enter__(self) -> Simulator:
        return self

    def __exit__(self, *_: object) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.join()
            self._pipe.close()

    def run(
        self,
        config: Config,
        device: str,
        here: bool = False,
        limit_s: float = LIMIT_S,
        events: bool = False,
        longest: bool = False,
    ) -> dict[str, Any]:
        """``device``, ``kernels``, and ``weights`` at two peaks: ``building`` and ``step``.

        ``here``: for the ranks that this machine would start, which may have to share a GPU.
        ``events``: the last step's events as well, under ``steps`` (``plan.graph.Step``).
        ``longest``: of the longest samples, whose numbers are under the same name.
        """
        function = "shardlab.measure.simulate:simulate"
        args = device, here, events, longest
        found: dict[str, Any] = self.ask(function, limit_s, config, *args)
        return found

    def ask(self, function: str, limit_s: float, config: Config, *args: Any) -> Any:
        """The result of ``module:function`` for a config, in the process.

        After ``limit_s`` seconds without an answer the process is ended, and the error names the
        line it stood at.
        """
        self._send(function, limit_s, config, *args)
        return self._answer(limit_s)

    def _send(self, function: str, limit_s: float, config: Config, *args: Any) -> None:
        with self._ended_on_failure():
            if self._process is None:
                self._start()
                self._stacks = self._receive(limit_s)
            self._pipe.send((function, config, args))

    def _answer(self, limit_s: float) -> Any:
        with self._ended_on_failure():
            kind, value = self._receive(limit_s)
        if kind == "usage":
            raise UsageError(value)
        if kind == "error":
            message, trace = value
            self.__exit__()  # the next has a new process, in which nothing has failed
            raise RankFailure(0, f"the estimate failed: {message}", trace)
        return value

    @contextlib.contextmanager
    def _ended_on_failure(self) -> Iterator[None]:
        """An answer that nobody waited for would be taken for the next one's."""
        try:
            yield
        except (EOFError, ConnectionResetError, BrokenPipeError):
            self.__exit__()
            raise RankFailure(0, "the estimate's process died") from None
        except BaseException:
            self.__exit__()
            raise

    def _start(self) -> None:
        context = fork_server()
        self._pipe, theirs = context.Pipe()
        process = context.Process(target=_answer, args=(theirs,), daemon=True)
        process.start()
        self._process = process  # only now can it be ended
        theirs.close()

    def _receive(self, limit_s: float) -> Any:
        if self._pipe.poll(limit_s):
            return self._pipe.recv()
        from shardlab.guard import stacks

        place = stacks.place_of(stacks.ask(self._process.pid, self._stacks))
        self.__exit__()
        where = f"; it stood at {place}" if place else ""
        raise Late(0, f"the estimate gave no answer within {limit_s:g} s{where}")


@dataclass
class Row:
    """A strategy at a world: its estimate, and what was measured, or why there is neither."""

    config: Config
    device: str = "auto"  # what the estimate is for
    kernels: str | None = None  # the device whose operators were asked
    estimate: dict[str, dict[str, int]] | None = None
    ranks: Sequence[Mapping[str, Any]] = ()  # what each of those holds that may differ
    # The same; and the bytes of all "ranks", and "reserved" ones, on a GPU
    measured: dict[str, Any] | None = None
    assumed: Sequence[str] = ()  # lines of the model that asked a tensor for its value
    uncounted: Sequence[str] = ()  # kernels whose own memory it lacks: it is a lower bound
    longest: Sequence[int] = ()  # the samples that it is of; none: the first of a run
    about: Mapping[str, Any] = field(default_factory=dict)  # the data, and notes on the workload
    largest_batch: int | None = None  # samples of a rank's micro-batch that fit; 0: not even one
    status: str = "ok"
    reason: str | None = None
    unmeasured: str | None = None  # why it was not measured, if it was asked for

    @property
    def batch(self) -> int:
        """Samples of a micro-batch for each rank, the largest if they differ."""
        return self._share(self.config.launch.world or 1)

    @property
    def samples(self) -> int:
        """Samples of the micro-batch that a rank works on, alone or with model-parallel ranks."""
        return self._share(self.config.data_ranks)

    def _share(self, ranks: int) -> int:
        return -(-self.config.training.global_batch // (ranks * self.config.accumulate))


def with_batch(config: Config, batch: int) -> Config:
    """``batch`` samples in each micro-batch of each rank, and as many micro-batches as before."""
    parts = (config.launch.world or 1) * config.accumulate
    batches = {"training.global_batch": batch * parts, "training.micro_batch": None}
    return config.with_overrides(batches).in_parts(config.accumulate)


def rows_of(config: Config, specs: Sequence[str], world: int, batch: int | None) -> list[Row]:
    """A row for each ``name`` or ``name:option=value``. ``single`` is one process, in any world."""
    rows, times = [], config.accumulate
    for spec in specs:
        name, options = parse_spec(spec)
        ranks = 1 if name == BASELINE else world
        overrides: dict[str, Any] = {
            "strategy.name": name, "strategy.options": options, "launch.world": ranks,
        }  # fmt: skip
        if batch is not None:
            # Before the ranks are counted: the config's own batch may not be theirs to share.
            overrides["training.global_batch"] = batch * ranks * times
            overrides["training.micro_batch"] = None
        made = config.with_overrides({**overrides, **WEIGHED})
        rows.append(Row(made if batch is None else made.in_parts(times)))
    return rows


def estimate(
    rows: Sequence[Row],
    device: str,
    limit: int | None,
    command: str,
    measure: Callable[[Config, Sequence[int]], dict[str, Any]] | None = None,
    on_progress: Callable[[str, int, int], None] = lambda _what, _done, _total: None,
) -> dict[str, Any]:
    """The content of ``memory.json``. A strategy that cannot be estimated is a row that says so.

    ``limit`` (bytes) asks for the largest batch whose step fits; ``measure`` runs a config on real
    ranks, with batches of the samples that it is given, and then the estimate is for these.
    """
    total = len(rows) * (2 if measure else 1)
    with Simulator() as simulator:
        for done, row in enumerate(rows):
            on_progress(f"{row.config.strategy.label} · estimate", done, total)
            try:
                found = simulator.run(row.config, device, here=measure is not None, longest=True)
                row.device, row.kernels = found["device"], found["kernels"]
                row.estimate, row.assumed = found["weights"], found["assumed"]
                row.ranks, row.about = found["ranks"], found["about"]
                row.uncounted = found["uncounted"]
                row.longest = found["longest"][: row.samples]
                if limit is not None:
                    row.largest_batch = _largest(simulator, row, limit, measure is not None)
            except (RankFailure, UsageError) as error:
                if len(rows) == 1:
                    raise
                row.status = "failed" if isinstance(error, RankFailure) else "skipped"
                row.reason = str(error)
    reasons = {row.reason for row in rows}
    if len(reasons) == 1 and rows[0].status == "skipped":  # the model or the data, not a strategy
        raise UsageError(str(rows[0].reason))
    if measure is not None:
        for done, row in enumerate(rows, start=len(rows)):
            on_progress(f"{row.config.strategy.label} · measured", done, total)
            try:
                row.measured = measure(row.config, row.longest)
            except (RankFailure, UsageError) as error:
                row.unmeasured = str(error)
    on_progress("done", total, total)
    return summarize(rows, limit, command)


def _largest(simulator: Simulator, row: Row, limit: int, here: bool) -> int:
    def peak(batch: int) -> int:
        found = row.estimate
        if found is None or batch != row.batch:
            config = with_batch(row.config, batch)
            found = simulator.run(config, row.device, here, longest=True)["weights"]
        return int(found["step"]["total"])

    return largest_batch(peak, limit, row.batch)


def largest_batch(peak: Callable[[int], int], limit: int, start: int = 1, most: int = MOST) -> int:
    """The largest batch whose ``peak`` is within ``limit``; 0 if none is.

    The peak hardly ever falls with the batch, and mostly grows in a line: the next guess is where
    the line through the two nearest known batches reaches the limit. Every answer was tried: it
    fits, and one more does not.
    """
    tried = {start: peak(start)}
    other = 2 * start if tried[start] <= limit else max(1, start // 2)
    tried.setdefault(other, peak(other))
    while True:
        fits = max((b for b, bytes_ in tried.items() if bytes_ <= limit), default=0)
        fails = min((b for b, bytes_ in tried.items() if bytes_ > limit), default=most + 1)
        if fails - fits <= 1:
            return fits
        near = sorted(tried, key=lambda b: abs(tried[b] - limit))[:2]
        low, high = min(near), max(near)
        slope = (tried[high] - tried[low]) / (high - low) if high > low else 0.0
        guess = low + (limit - tried[low]) / slope if slope > 0 else 2 * fits + 1
        nearest = min(guess, float(most + 1))
        # Inside what is still open; beyond what was never seen to fail, at most eight times.
        upper = fails - 1 if fails <= most else min(most, max(1, fits) * 8)
        chosen = min(max(int(nearest), fits + 1), upper)
        if chosen in tried:  # the line was no help
            chosen = (fits + fails) // 2
        tried[chosen] = peak(chosen)


def summarize(rows: Sequence[Row], limit: int | None, command: str) -> dict[str, Any]:
    """The numbers of ``memory.json``. Pure."""
    known = next((row for row in rows if row.kernels is not None), rows[0])
    device = known.device if known.device != "auto" else "cpu"
    return {
        "schema": SCHEMA,
        "command": command,
        "device": device,
        "kernels": known.kernels,
        "limit_bytes": limit,
        "not_counted": NOT_COUNTED[device],
        "data": known.about.get("data", ""),
        "notes": known.about.get("notes", []),
        "config": rows[0].config.to_dict(),
        "rows": [_row(row, limit) for row in rows],
    }


def _row(row: Row, limit: int | None) -> dict[str, Any]:
    config = row.config
    estimate, measured = row.estimate or {}, row.measured or {}
    step = estimate.get("step")
    return {
        "strategy": config.strategy.name,
        "label": config.strategy.label,
        "options": dict(config.strategy.options),
        "world": config.launch.world,
        "batch": row.batch,
        "samples": row.samples,
        "accumulate": config.accumulate,
        "status": row.status,
        "reason": row.reason,
        "step_bytes": step,
        "update_bytes": estimate.get("update"),
        "between_bytes": estimate.get("between"),
        "building_bytes": estimate["building"]["total"] if estimate else None,
        "ranks": list(row.ranks),
        "fits": None if limit is None or step is None else step["total"] <= limit,
        "largest_batch": row.largest_batch,
        "measured_step_bytes": measured.get("step"),
        "measured_update_bytes": measured.get("update"),
        "measured_between_bytes": measured.get("between"),
        "measured_building_bytes": measured["building"]["total"] if measured else None,
        "measured_rank_bytes": measured.get("ranks"),
        "measured_reserved_bytes": measured.get("reserved"),
        "unmeasured": row.unmeasured,
        "assumed": list(row.assumed),
        "uncounted": list(row.uncounted),
        "error": errors(step, measured.get("step")),
    }


def errors(
    estimate: Mapping[str, int] | None, measured: Mapping[str, int] | None
) -> dict[str, float] | None:
    """For each cause, estimate less measured as a share of the measured peak. They add up."""
    if estimate is None or measured is None:
        return None
    causes = ("total", *CAUSES)
    return {cause: (estimate[cause] - measured[cause]) / measured["total"] for cause in causes}


def fullest(weights: Iterable[dict[str, int]]) -> dict[str, int]:
    """Bytes by cause where there are most: of several ranks, or of the two peaks of one."""
    return max(weights, key=lambda peak: peak["total"])


def snapshots(ranks: RankSet, row: Row, folder: Path) -> list[str]:
    """The files that PyTorch's memory viewer reads, one of each rank."""
    args = row.config, str(folder), row.longest
    found = ranks.run(f"{__name__}:write_snapshot", *args)
    return [path for path in found if path is not None]


# ------------------------------------------------------------------ the estimate's process


def _answer(pipe: Any) -> None:
    """Estimate what the parent asks for, until it is gone."""
    import torch

    from shardlab.guard import stacks

    torch.set_num_threads(1)  # as a rank has: hardly anything is computed, and more would only spin
    with contextlib.suppress(EOFError, BrokenPipeError), stacks.Answering() as answering:
        pipe.send(answering.fd)  # the file that the stack is written to, if asked for
        while True:
            name, config, args = pipe.recv()
            answer: tuple[str, Any]
            try:
                module, _, function = name.partition(":")
                answer = (
                    "result",
                    getattr(import_module(module), function)(config, *args),
                )
            except UsageError as error:
                answer = "usage", str(error)
            except Exception as error:
                message = str(error).strip().partition("\n")[0]
                answer = "error", (f"{type(error).__name__}: {message}", traceback.format_exc())
            pipe.send(answer)


# ------------------------------------------------------------------ in the ranks


@on_its_ranks
def weigh(world: World, config: Config, longest: Sequence[int] = ()) -> dict[str, Any]:
    """The same, measured: the fullest rank at each of the two peaks, and each rank's of a step.

    ``longest``: the samples that every batch is of; none: those of a run.
    """
    import torch

    from shardlab.measure import memory
    from shardlab.measure.longest import of_longest
    from shardlab.training import builders, loop

    causes = memory.Causes()
    if world.device.type == "cuda":  # what the allocator has reserved until now is not this run's
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(world.device)
    workload = of_longest(builders.build_workload(config), longest)
    built, allocations = memory.trace(
        world.device, lambda: memory.run_steps(workload, config, world, causes, loop.Batches)
    )
    own = memory.weights(allocations, causes, built)
    ranks = world.gather(own)
    found: dict[str, Any] = {part: fullest(rank[part] for rank in ranks) for part in own}
    return {**found, "ranks": [rank["step"]["total"] for rank in ranks]}


@on_its_ranks
def reserved(world: World, _config: Config) -> int | None:
    """Bytes that PyTorch's allocator took of a GPU at most, since these ranks were last weighed."""
    import torch

    if world.device.type != "cuda":
        return None
    return int(max(world.gather(torch.cuda.max_memory_reserved(world.device))))


@on_its_ranks
def refuse_snapshot(world: World, _config: Config) -> None:
    """Before anything is written."""
    if world.device.type != "cuda":
        raise UsageError(
            f"--snapshot is made by PyTorch's CUDA allocator, and these ranks are on the "
            f"{world.device.type}; leave it out (--measure shows the peak that a run has)"
        )


@on_its_ranks
def write_snapshot(world: World, config: Config, folder: str, longest: Sequence[int]) -> str:
    """A few steps on the GPU with every allocation noted, and where it was made."""
    import torch

    from shardlab.measure import memory
    from shardlab.measure.longest import of_longest
    from shardlab.trace import capture
    from shardlab.training import builders, loop

    name = f"memory.{capture.folder_name(config.strategy.label)}.rank{world.rank}.pickle"
    torch.cuda.memory._record_memory_history(max_entries=10**6)
    try:
        workload = of_longest(builders.build_workload(config), longest)
        memory.run_steps(workload, config, world, memory.Causes(), loop.Batches)
        torch.cuda.memory._dump_snapshot(str(Path(folder) / name))
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    return str(Path(folder) / name)
