"""How throughput grows with the batch, until memory runs out: a row for each size.

A size that does not fit is a row, too. On a GPU the allocator refuses it. On a CPU nothing would,
until the kernel ends some process: there, a limit is set. What tensors hold is measured against
it, and far beyond it the rank's process is refused memory, before the machine runs out of it.

The upper half runs in the parent and imports no torch; the functions that take a ``World`` run in
the ranks.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardlab import stats
from shardlab.config import Config
from shardlab.errors import RankFailure, UsageError
from shardlab.launch.rank_set import RankSet
from shardlab.measure.estimate import with_batch

if TYPE_CHECKING:
    from shardlab.world import World

SCHEMA = 1
KEEP_FREE = 0.1  # share of the machine's free memory that is left alone, if no limit is given
SLACK = 256 << 20  # bytes beside tensors that a rank may take: kernels, the profiler, Gloo, gaps
ATTEMPT_S = 600.0  # for one size, or for looking at the machine: what takes longer has failed
# Not the environment.
OF_WORKLOAD = ("peak", "flops_per_sample", "normalizes_batches", "couples_samples")
# What a row has only if its size fits.
NUMBERS = (
    "step_ms", "steps_per_s", "samples_per_s", "tokens_per_s", "flops_per_s", "mfu", "peak_bytes",
)  # fmt: skip
DAY_S = 86400.0
YEAR_DAYS = 365.25
# How a lack of memory is worded: by PyTorch's allocators, by C++, and by a rank that was killed.
_OOM_WORDS = (
    "out of memory",
    "outofmemoryerror",
    "can't allocate memory",
    "memoryerror",
    "bad_alloc",
    "cannot allocate memory",
    "killed by sigkill",
    "killed by sigabrt",
)


@dataclass(frozen=True)
class Plan:
    """Which sizes (samples of a rank's micro-batch), and how long each is run."""

    batches: tuple[int, ...] = (1, 2, 4, 8)  # a sweep begins with its only one
    sweep: bool = False  # double until memory runs out, then halve the interval
    warmup: int = 2
    steps: int = 5  # timed
    memory_limit: int | None = None  # bytes of a rank's tensors; None: what is free
    most: int = 1 << 16  # where a sweep ends
    time_limit_s: float = 120.0  # a sweep tries no further size after it

    def __post_init__(self) -> None:
        # The optimizer's state exists from the second step on: before it there is no peak.
        limits = {"warmup": (2, ": its state makes the peak"), "steps": (1, ""), "most": (1, "")}
        for name, (least, why) in limits.items():
            if (value := getattr(self, name)) < least:
                raise UsageError(f"--{name} must be at least {least}{why}, got {value}")
        if min(self.batches) < 1:
            raise UsageError(f"--micro-batch {min(self.batches)}: a batch has at least one sample")
        if self.sweep and len(self.batches) != 1:
            raise UsageError("--sweep begins with one size: give --micro-batch one number")
        if self.memory_limit is not None and self.memory_limit < 1:
            raise UsageError("--memory-limit must be above 0")


@dataclass(frozen=True)
class Goal:
    """The training run that is extrapolated to."""

    params: float = 1e12
    tokens: float = 1e13
    days: float = 90.0
    price_per_hour: float | None = None  # of a device; None: it is not asked for

    def __post_init__(self) -> None:
        flags = {
            "model-params": self.params, "tokens": self.tokens, "target-days": self.days,
            "price-per-hour": self.price_per_hour,
        }  # fmt: skip
        for flag, value in flags.items():
            if value is not None and not 0 < value < math.inf:
                raise UsageError(f"--{flag} must be above 0, got {value:g}")


def measure(
    config: Config,
    plan: Plan,
    goal: Goal | None,
    command: str,
    on_progress: Callable[[str, int, int], None] = lambda _what, _done, _total: None,
) -> dict[str, Any]:
    """The content of ``throughput.json``; without a goal nothing is extrapolated."""
    world = config.launch.world or 1
    config = config.with_overrides(
        {"training.steps": plan.warmup + plan.steps, "training.warmup_steps": 0}
    )
    on_progress("the machine's peak", 0, 1 if plan.sweep else len(plan.batches))
    with RankSet(config.launch, world, ATTEMPT_S) as ranks:
        env = ranks.run(f"{__name__}:describe", config, command)[0]
        limit = limit_of(plan.memory_limit, env["device"], world)
        rows: list[dict[str, Any]] = []

        def attempt(batch: int) -> bool:
            total = len(rows) + 1 if plan.sweep else len(plan.batches)  # a sweep's is unknown
            on_progress(f"batch {batch:,}", len(rows), total)
            rows.append({"batch": batch, "status": "ok", "reason": None, "measured": None})
            row = rows[-1]
            if limit["bytes"] is not None:
                ranks.renew()  # a CPU process never returns the memory it was once given
            sized = with_batch(config, batch)
            limits = limit["bytes"], limit["refused_beyond"]
            try:
                measured = ranks.run(f"{__name__}:time_batch", sized, plan.warmup, *limits)[0]
            except RankFailure as failure:
                status = "oom" if is_out_of_memory(str(failure)) else "failed"
                row |= {"status": status, "reason": str(failure)}
                # BatchNorm takes no batch of one sample: one size that fails does not end a list.
                is_last = plan.sweep or batch == plan.batches[-1]
                if status == "failed" and is_last and all(r["status"] != "ok" for r in rows):
                    raise
                return False
            if measured["oom"] is not None:
                row |= {"status": "oom", "reason": measured["oom"]}
                return False
            row["measured"] = measured
            return True

        stopped = None
        if plan.sweep:
            end = time.monotonic() + plan.time_limit_s
            stopped = sweep(attempt, plan.batches[0], plan.most, lambda: time.monotonic() > end)
        else:
            for batch in plan.batches:
                attempt(batch)
    on_progress("done", len(rows), len(rows))
    return summarize(config, plan, goal, env, limit, rows, stopped, command)


def sweep(
    fits: Callable[[int], bool], start: int, most: int, is_late: Callable[[], bool]
) -> str | None:
    """Try sizes: doubled until one does not fit, then halved between. Returns why it ended early.

    Every size is tried once. At the end the largest that fits is known: one more does not.
    """
    good, bad, size = 0, most + 1, min(start, most)
    while bad - good > 1:
        if is_late() and (good or bad <= most):
            return "time"
        if fits(size):
            good = size
        else:
            bad = size
        size = min(2 * good, most) if bad > most else (good + bad) // 2
    return "most" if bad > most else None


def limit_of(given: int | None, device: str, ranks: int) -> dict[str, Any]:
    """Bytes that a rank's tensors may hold on a CPU, and whose limit it is. A GPU has its own."""
    if device != "cpu":
        if given is not None:
            raise UsageError("--memory-limit is for a CPU; a GPU's memory is its own limit")
        return {"bytes": None, "source": "the GPU", "refused_beyond": None}
    free = free_bytes()
    share = None if free is None else int(free * (1 - KEEP_FREE) / ranks)
    if given is not None:
        # Tensors are not all that a process takes; and the limit may be more than there is.
        room = 2 * given + SLACK
        refused = room if share is None else min(room, share)
        return {"bytes": given, "source": "given", "refused_beyond": refused}
    if share is None:
        raise UsageError("how much memory is free here is not known; give --memory-limit")
    source = f"{1 - KEEP_FREE:.0%} of free memory, per rank"
    return {"bytes": share, "source": source, "refused_beyond": share}


def free_bytes() -> int | None:
    """What a program could take now without making others swap; within a container's limit."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    kib = next(line.split()[1] for line in lines if line.startswith("MemAvailable"))
    free = int(kib) * 1024
    try:  # of a container (cgroup 2)
        group = Path("/sys/fs/cgroup")
        most = int((group / "memory.max").read_text())
        free = min(free, most - int((group / "memory.current").read_text()))
    except (OSError, ValueError):  # there is none, or it says "max"
        pass
    return max(0, free)


def is_out_of_memory(message: str) -> bool:
    return any(words in message.lower() for words in _OOM_WORDS)


# ------------------------------------------------------------------ numbers from numbers


def summarize(
    config: Config,
    plan: Plan,
    goal: Goal | None,
    env: Mapping[str, Any],
    limit: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    stopped: str | None,
    command: str,
) -> dict[str, Any]:
    """The numbers of ``throughput.json``, from what was measured. Pure."""
    world = config.launch.world or 1
    shown = [_row(row, config, env, world) for row in rows]
    good = [row for row in shown if row["status"] == "ok"]
    rates = [row["flops_per_s"] for row in good if row["flops_per_s"] is not None]
    bad = [row["batch"] for row in shown if row["status"] == "oom"]
    largest = max((row["batch"] for row in good), default=None)
    return {
        "schema": SCHEMA,
        "command": command,
        "env": {k: v for k, v in env.items() if k not in OF_WORKLOAD},
        "workload": env["workload"],
        "parameters": env["parameters"],
        "strategy": config.strategy.label,
        "world": world,
        "accumulate": config.accumulate,
        "precision": config.precision.compute,
        "warmup_steps": plan.warmup,
        "timed_steps": plan.steps,
        "peak": env["peak"],
        "flops_per_sample": env["flops_per_sample"],
        "limit": dict(limit),
        "config": config.to_dict(),
        "rows": shown,
        "sweep": plan.sweep,
        "stopped": stopped,
        "largest_batch": largest,
        # Proved only if the next size up was tried and did not fit.
        "largest_is_exact": largest is not None and largest + 1 in bad,
        "extrapolation": extrapolate(goal, max(rates), env["peak"]) if goal and rates else None,
    }


def _row(
    row: Mapping[str, Any], config: Config, env: Mapping[str, Any], world: int
) -> dict[str, Any]:
    result: dict[str, Any] = {
        "batch": row["batch"],
        "global_batch": row["batch"] * world * config.accumulate,
        "status": row["status"],
        "reason": row["reason"],
        **dict.fromkeys(NUMBERS),
    }
    measured = row["measured"]
    if measured is None:
        return result
    result["step_ms"] = stats.spread(measured["slowest_ms"])
    result["steps_per_s"] = 1e3 / result["step_ms"]["median"]
    result |= stats.throughput(
        measured["slowest_ms"], result["global_batch"], measured["tokens_per_sample"]
    )
    result["peak_bytes"] = measured["peak_bytes"]
    if env["flops_per_sample"] is not None:
        result["flops_per_s"] = env["flops_per_sample"] * result["samples_per_s"] / world
        result["mfu"] = result["flops_per_s"] / env["peak"]["flops_per_s"]
    return result


def extrapolate(goal: Goal, flops_per_s: float, peak: Mapping[str, Any]) -> dict[str, Any]:
    """How long a model and its tokens would take at the best rate of one device."""
    flops = 6 * goal.params * goal.tokens
    days = flops / flops_per_s / DAY_S
    return {
        "params": goal.params,
        "tokens": goal.tokens,
        "flops": flops,
        "flops_per_s": flops_per_s,
        "mfu": flops_per_s / peak["flops_per_s"],
        "tokens_per_s": flops_per_s / (6 * goal.params),
        "days": days,
        "years": days / YEAR_DAYS,
        "target_days": goal.days,
        "devices": math.ceil(days / goal.days),
        "price_per_hour": goal.price_per_hour,
        "cost": None if goal.price_per_hour is None else 24 * days * goal.price_per_hour,
        "assumption": "6 FLOPs per parameter and token; a device does as many per second as in the "
        "best row, with the larger model too; devices add up without loss",
    }


# ------------------------------------------------------------------ in the ranks


def describe(world: World, config: Config, command: str) -> dict[str, Any]:
    """Where this runs, what, and how fast the device multiplies matrices."""
    from shardlab.launch import environment
    from shardlab.training import builders, preflight
    from shardlab.workloads.base import count_flops

    builders.resolve_strategy(config)
    workload = builders.build_workload(config)
    flops = workload.flops_per_sample
    if flops is None:
        try:
            flops = count_flops(workload.make_model, workload.loss, workload.dataset.batch([0]))
        except Exception:  # a user's model that cannot run without content: no MFU then
            flops = None
    rates = world.gather(matmul_rate(world, config.precision.compute))
    rate = sum(r["flops_per_s"] for r in rates) / len(rates)  # of a rank; they may share a GPU
    gpus = set(world.gather((environment.node_name(), str(world.device))))
    devices = len(gpus) if world.device.type == "cuda" else None
    return {
        **preflight.describe(world, config, command),
        "flops_per_sample": flops,
        "peak": {**rates[0], "flops_per_s": rate, "devices": devices},
    }


def matmul_rate(world: World, compute: str, seconds: float = 0.4) -> dict[str, Any]:
    """FLOP/s of this rank's device on square matrices in the dtype of the computation.

    The best of some tries, all ranks at once, with a rank's own number of threads: MFU is a share
    of what this device does, not of what is printed about it.
    """
    import torch

    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
    dtype = dtypes.get(compute, torch.float32)
    device = world.device
    on_gpu = device.type == "cuda"
    size = (8192 if dtype.itemsize == 2 else 4096) if on_gpu else 768
    times = 10 if on_gpu else 1
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)

    def now() -> float:
        if on_gpu:
            torch.cuda.synchronize(device)
        return time.perf_counter()

    world.gather(None)  # all at once: ranks may share the cores, as they will in the steps
    tries: list[float] = []
    end = time.perf_counter() + seconds
    while len(tries) < 4 or time.perf_counter() < end:
        start = now()
        for _ in range(times):
            torch.mm(a, b, out=out)
        tries.append((now() - start) / times)
    return {
        "flops_per_s": 2 * size**3 / min(tries),
        "dtype": str(dtype).removeprefix("torch."),
        "size": size,
        "threads": None if on_gpu else torch.get_num_threads(),
    }


def time_batch(
    world: World, config: Config, warmup: int, limit: int | None, refused: int | None
) -> dict[str, Any]:
    """Warm-up, in which memory is weighed, then timed steps; or that it did not fit."""
    import torch

    try:
        with refused_beyond(refused):
            return _time(world, config, warmup, limit)
    except (RuntimeError, MemoryError) as error:  # PyTorch's own is a RuntimeError
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        if world.size > 1 or not is_out_of_memory(reason):
            raise  # the others wait for us in a collective: all ranks are replaced
    gc.collect()  # here, where no traceback holds the tensors any more
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
    return {"oom": reason}


@contextmanager
def refused_beyond(size: int | None) -> Iterator[None]:
    """Inside, the process may take ``size`` bytes more than it has; then it is refused (Linux)."""
    status = Path("/proc/self/status")
    if size is None or not status.exists():
        yield
        return
    import resource

    lines = status.read_text(encoding="utf-8").splitlines()
    held = int(next(line.split()[1] for line in lines if line.startswith("VmData"))) * 1024
    before, hard = resource.getrlimit(resource.RLIMIT_DATA)
    soft = held + size
    if hard != resource.RLIM_INFINITY:
        soft = min(soft, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (before, hard))


def _time(world: World, config: Config, warmup: int, limit: int | None) -> dict[str, Any]:
    import torch

    from shardlab.ledger import LEDGER
    from shardlab.measure import memory
    from shardlab.training import builders, loop
    from shardlab.training.recorder import Recorder

    LEDGER.reset(full_steps=0)
    workload = builders.build_workload(config)
    steps = loop.Batches(workload, config, world)

    def begin() -> Any:
        """Build the strategy and run the warm-up: the peak of memory is in here."""
        strategy = builders.build_strategy(config, workload, world)
        for microbatches in islice(steps, warmup):
            strategy.gradients(microbatches)
            strategy.step()
        strategy.settle()
        return strategy

    with closing(steps):
        if world.device.type == "cuda":
            gc.collect()  # a model and its hooks are a ring: the last size's may still be here
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(world.device)
            strategy = begin()
        else:
            strategy, peak = memory.peak_bytes(world.device, begin)
            fullest = max(world.gather(peak))
            if limit is not None and fullest > limit:
                needed, allowed = fullest / 2**20, limit / 2**20
                return {"oom": f"tensors hold {needed:,.0f} MiB, the limit is {allowed:,.0f} MiB"}
        with Recorder(None, world, LEDGER, config.training.steps - warmup) as recorder:
            loop.train(strategy, steps, recorder, range(config.training.steps - warmup))
    if world.device.type == "cuda":
        fullest = max(world.gather(torch.cuda.max_memory_allocated(world.device)))
    times = zip(*world.gather([row["step_ms"] for row in recorder.rows]), strict=True)
    return {
        "oom": None,
        "slowest_ms": [max(ranks) for ranks in times],
        "peak_bytes": fullest,
        "tokens_per_sample": workload.tokens_per_sample,
    }
