"""Strategies side by side: the same model, data, seed and global batch, in one set of ranks.

Timing is unprofiled, after a warm-up, in interleaved repeats: each repeat visits every strategy
once, in another order, so that a machine that slows down slows all of them and none follows the
same one each time. A step counts as long as its slowest rank took. Memory, proofs and profiles come
afterwards. The upper half of this module runs in the parent and imports no torch; the functions
that take a ``World`` run in the ranks.
"""

from __future__ import annotations

import functools
import queue
import socket
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import structs

from shardlab import stats, trace
from shardlab.config import Config, ProfileConfig
from shardlab.errors import Interrupted, Late, NodeLost, RankFailure, UsageError
from shardlab.launch import forking
from shardlab.launch.rank_set import RankSet, on_its_ranks
from shardlab.measure import choice, estimate
from shardlab.measure.cells import Cell, Plan
from shardlab.measure.estimate import WEIGHED, Simulator
from shardlab.naming import EVERY_STRATEGY
from shardlab.proof import judge, prove
from shardlab.proof.cache import ProofCache, source_digest

if TYPE_CHECKING:
    from shardlab.world import World

SCHEMA = 1
PROOF_STEPS = 2
# Ranks need these sooner or later. They are renewed several times, and the fork server is not.
FOR_RANKS = ("shardlab.measure.simulate", "shardlab.proof.evidence", "shardlab.training.preflight")
# They describe the model, not where it ran.
OF_LOSSES = ("normalizes_batches", "couples_samples", "loss_not_compared")

# What a cell has only if it was timed.
NUMBERS = (
    "step_ms", "speed_to_baseline", "speed_interval", "skew_ms", "samples_per_s", "tokens_per_s",
    "mfu", "peak_bytes", "loss", "loss_difference", "loss_difference_max",
)  # fmt: skip

OnProgress = Callable[[str, int, int], None]


def compare(
    cells: list[Cell],
    plan: Plan,
    command: str,
    on_progress: OnProgress = lambda _what, _done, _total: None,
    folder: Callable[[], Path] | None = None,
    keeps_proofs: bool = False,
    on_interrupted: Callable[[dict[str, Any]], None] = lambda _result: None,
) -> dict[str, Any]:
    """Run the plan and return the content of ``compare.json``. A cell that fails is a row.

    ``folder`` is asked for once nothing is refused; the traces go there.
    ``keeps_proofs``: and estimates, in the user's cache. It is for the command alone: ranks import
    the script that calls us, which may change a strategy.
    ``on_interrupted`` gets the result so far when Ctrl-C or a lost node ends the measuring.
    """
    size = max(cell.world for cell in cells)
    limit = plan.time_limit_s
    source = source_digest()
    names = dict.fromkeys(cell.config.strategy.name for cell in cells)
    ours = [EVERY_STRATEGY[name].partition(":")[0] for name in names if name in EVERY_STRATEGY]
    forking.fork_server(*FOR_RANKS, *ours)
    with RankSet(cells[0].config.launch, size, limit) as ranks, ExitStack() as closing:
        # What is wrong with any cell is wrong input, and refused before anything is measured.
        for cell in cells:
            look(ranks, "shardlab.training.preflight:check", cell)
        env = look(ranks, "shardlab.training.preflight:describe", cells[0], command)
        losses = "shardlab.proof.chance:why_losses_differ"
        env["loss_not_compared"] = look(ranks, losses, cells[0])
        if env["device"] == "cuda":
            env |= _calibrate(ranks, cells, command)
        traces_in = None if folder is None else folder()
        cache = ProofCache(env, source) if keeps_proofs else None
        estimates = closing.enter_context(_Estimates(env, plan, cells, cache))
        jobs = list(_jobs(ranks, cells, plan, traces_in, estimates, cache))
        try:
            for done, job in enumerate(jobs):
                on_progress(f"{job.cell.label} · {job.what}", done, len(jobs))
                # A process may be 10% faster or slower than another for all its life. On a GPU
                # that matters less, and to start there takes long.
                if job.begins_repeat and env["device"] == "cpu":
                    ranks.renew()
                if job.cell.status == "ok":
                    job.run(job.cell)
        except (KeyboardInterrupt, Interrupted, NodeLost):
            _note_missing(cells, plan)
            on_interrupted(summarize(cells, plan, command, env, interrupted=True))
            raise
    on_progress("done", len(jobs), len(jobs))
    return summarize(cells, plan, command, env)


def _calibrate(ranks: RankSet, cells: Sequence[Cell], command: str) -> dict[str, Any]:
    """What MFU needs: the FLOPs of a sample, and how fast the device really multiplies matrices."""
    peaks, flops = {}, None
    for precision in dict.fromkeys(cell.config.precision.compute for cell in cells):
        cell = next(c for c in cells if c.config.precision.compute == precision)
        found = ranks.run("shardlab.measure.throughput:describe", cell.config, command)[0]
        peak, flops = found["peak"], found["flops_per_sample"]
        of_device = peak["flops_per_s"] * ranks.size / peak["devices"]  # which ranks may share
        peaks[precision] = {**peak, "flops_per_s": of_device}
    return {"matmul": peaks, "flops_per_sample": flops}


@dataclass(frozen=True)
class Job:
    """One thing that is done with one cell."""

    cell: Cell
    what: str
    run: Callable[[Cell], None]
    begins_repeat: bool = False


def _jobs(
    ranks: RankSet,
    cells: Sequence[Cell],
    plan: Plan,
    traces_in: Path | None,
    estimates: _Estimates,
    cache: ProofCache | None,
) -> Iterator[Job]:
    """All there is to do, in order: nothing that slows a step comes before the last is timed."""
    time = functools.partial(_time, ranks, plan.warmup)
    for repeat, order in enumerate(schedule(len(cells), plan.repeats)):
        for place, index in enumerate(order):
            cell, what = cells[index], f"repeat {repeat + 1} of {plan.repeats}"
            yield Job(cell, what, time, begins_repeat=repeat > 0 and place == 0)
    passes: list[tuple[str, Callable[[Cell], None]]] = [
        ("memory", functools.partial(_weigh, ranks))
    ]
    if plan.prove:

        def prove_and_estimate(cell: Cell) -> None:
            estimates.begin()
            _prove(ranks, cells, cell, cache, plan.fresh)
            estimates.take(cell)

        passes.append(("proof", prove_and_estimate))
    else:
        passes.append(("estimate", estimates.take))
    if plan.profile is not None and traces_in is not None:
        profile = functools.partial(_profile, ranks, plan.profile, traces_in)
        passes.append(("traces", profile))
    for what, run in passes:
        for cell in cells:
            yield Job(cell, what, run)


def schedule(cells: int, repeats: int) -> Iterator[list[int]]:
    """The cells in the order of each repeat: what follows what changes from one to the next.

    A strategy may suffer from what the one before it has left behind (caches, memory, heat). In a
    Williams design, of as many repeats as there are cells (of twice as many, if they are odd in
    number), each cell follows each other equally often, and has each place equally often.
    """
    zigzag = [(i + 1) // 2 * (-1) ** (i + 1) for i in range(cells)]  # 0, 1, -1, 2, -2, …
    for repeat in range(repeats):
        turn, mirrored = divmod(repeat, 2) if cells % 2 else (repeat, 0)
        order = [(turn + z) % cells for z in zigzag]
        yield order[::-1] if mirrored else order


def look(ranks: RankSet, function: str, cell: Cell, *args: Any) -> Any:
    """Rank 0's result of a function, before anything is measured: a failure ends the comparison."""
    try:
        return ranks.run(function, cell.config, *args)[0]
    except Late as late:
        what = "building and trying the model took too long (--time-limit)"
        raise Late(late.rank, f"{what}: {late.message}") from None


def _try_on_ranks(ranks: RankSet, function: str, cell: Cell, *args: Any) -> Any:
    """Rank 0's result of a function of this module; a failure is noted in the cell."""
    try:
        return ranks.run(f"{__name__}:{function}", cell.config, *args)[0]
    except (RankFailure, UsageError) as error:
        cell.status = "failed" if isinstance(error, RankFailure) else "skipped"
        cell.reason = reason_of(error, "a visit" if function == "time_cell" else "weighing it")
        return None


def reason_of(error: Exception, what: str) -> str:
    """Why something failed; if it took too long, ``what`` did."""
    return f"{what} took too long (--time-limit): {error}" if type(error) is Late else str(error)


def _time(ranks: RankSet, warmup: int, cell: Cell) -> None:
    result = _try_on_ranks(ranks, "time_cell", cell, warmup)
    if result is None:
        return
    cell.times_ms.append(result["slowest_ms"][warmup:])
    cell.skews_ms += result["skew_ms"][warmup:]
    cell.losses = cell.losses or result["losses"]
    cell.changes = result["changes"]
    cell.samples, cell.tokens_per_sample = result["samples"], result["tokens_per_sample"]
    cell.every, cell.chosen = result["every"], result["chosen"]


def _weigh(ranks: RankSet, cell: Cell) -> None:
    cell.peak_bytes = _try_on_ranks(ranks, "weigh_cell", cell)


class _Estimates(ExitStack):
    """The estimates of ``shardlab memory`` beside what was weighed, or why there are none.

    They are made in processes of their own, beside the proofs: the ranks of a proof often wait for
    each other, and nothing is timed then.
    """

    def __init__(
        self, env: Mapping[str, Any], plan: Plan, cells: Sequence[Cell], cache: ProofCache | None
    ) -> None:
        super().__init__()
        self.env, self.plan, self.cells, self.cache = env, plan, cells, cache
        self.idle: queue.SimpleQueue[Simulator] = queue.SimpleQueue()
        self.has_begun = False
        self.found: dict[Cell, Future[dict[str, Any]]] = {}

    def take(self, cell: Cell) -> None:
        """Note a cell's estimate, once it is made."""
        self.begin()
        if cell in self.found:
            cell.estimated_bytes = self.found[cell].result()

    def begin(self) -> None:
        """Start to estimate all cells that have no estimate in the cache."""
        if self.has_begun:
            return
        self.has_begun = True
        missing = [cell for cell in self.cells if cell.status == "ok"]
        if self.cache is not None and not self.plan.fresh:
            for cell in missing:
                cell.estimated_bytes = self.cache.find_estimate(*self._about(cell.config))
        missing = [cell for cell in missing if cell.estimated_bytes is None]
        # On a GPU an estimate asks the device for its kernels, and needs memory there.
        at_once = min(len(missing), 2 if self.env["device"] == "cpu" else 1)
        if not at_once:
            return
        for _ in range(at_once):
            self.idle.put(self.enter_context(Simulator()))
        workers = ThreadPoolExecutor(at_once)
        # Ctrl-C does not wait for an estimate.
        self.callback(workers.shutdown, wait=False, cancel_futures=True)
        self.found = {cell: workers.submit(self._estimate, cell.config) for cell in missing}

    def _about(self, config: Config) -> tuple[Config, str]:
        """What is estimated, and the data that it is for."""
        config = config.with_overrides({**WEIGHED, "launch.backend": self.env["backend"]})
        return config, self.env["chosen"].get("data.source", config.data.source)

    def _estimate(self, config: Config) -> dict[str, Any]:
        config, data = self._about(config)
        limit_s = self.plan.time_limit_s
        simulator = self.idle.get()
        try:
            found = simulator.run(config, self.env["device"], limit_s=limit_s)["weights"]
        except (RankFailure, UsageError) as error:
            return {"total": None, "reason": str(error)}
        finally:
            self.idle.put(simulator)
        sizes = estimate.fullest(found[peak] for peak in estimate.PEAKS)
        if self.cache is not None:
            self.cache.keep_estimate(config, data, sizes)
        return sizes


def _prove(
    ranks: RankSet, cells: Sequence[Cell], cell: Cell, cache: ProofCache | None, fresh: bool
) -> None:
    """The five checks on a small model. Precision and accumulation are the proof's own: one
    proof serves all cells that differ in nothing else. One in the cache does, unless ``fresh``.
    """
    config = proof_config(cell.config)
    for other in cells:
        if other.proof is not None and proof_config(other.config) == config:
            cell.proof = other.proof
            return
    try:
        prove.refuse_rounding(config.strategy.options)
        data = ranks.run("shardlab.proof.subjects:check", config)[0]
        if cache is not None and not fresh and (found := cache.find(config, data)) is not None:
            cell.proof = found
            return
        evidence = ranks.run("shardlab.proof.evidence:examine", config)
        checks = judge.judge([e for e in evidence if e is not None])
    except (UsageError, Late) as refusal:  # neither says that anything is wrong
        cell.proof = {"pass": None, "message": reason_of(refusal, "the proof"), "checks": {}}
        return
    except RankFailure as failure:
        checks = judge.failed(f"it did not get through: {failure}")
    cell.proof = {
        "pass": judge.passes(checks),
        "message": _what_is_wrong(checks) or _what_is_right(checks),
        "checks": {name: {k: c[k] for k in ("pass", "message")} for name, c in checks.items()},
    }
    if cache is not None:
        cache.keep(config, data, cell.proof)


def _what_is_wrong(checks: Mapping[str, dict[str, Any]]) -> str:
    """The checks that failed and why; a crash is named once."""
    wrong = judge.reasons(checks)
    return wrong.get("every check") or "; ".join(f"{name}: {why}" for name, why in wrong.items())


def _what_is_right(checks: Mapping[str, dict[str, Any]]) -> str:
    unchecked = [f"not checked, {name}: {why}" for name, why in judge.unchecked(checks).items()]
    return "; ".join([checks["equal"]["message"], *unchecked])


def proof_config(config: Config) -> Config:
    """A small float64 run of the same workload and strategy: two micro-batches, two steps."""
    overrides: dict[str, Any] = {
        "precision.compute": "fp64",
        "precision.loss_scale": None,
        "training.micro_batch": None,
        "training.warmup_steps": 0,
        "training.compile": "none",
    }
    if config.model.workload in prove.SMALLEST:
        overrides |= {"model.options": {}, "data.seq_len": None}
    small = prove.small(config.with_overrides(overrides), PROOF_STEPS)
    return prove.deep_enough(prove.in_parts(small))


def _profile(ranks: RankSet, profile: ProfileConfig, folder: Path, cell: Cell) -> None:
    """The cell's traces, and where their steps went. What was measured stays if this fails."""
    steps = profile.repeat * profile.window
    training = structs.replace(cell.config.training, steps=steps, warmup_steps=0)
    config = structs.replace(cell.config, profile=profile, training=training)
    try:
        found = ranks.run(f"{__name__}:profile_cell", config, str(folder), cell.label)[0]
        cell.sent = found.pop("sent")
        cell.traces = found
        cell.profile = trace.load_once(Path(found["folder"])).mean_step()
    except (RankFailure, UsageError) as error:
        cell.traces = (cell.traces or {}) | {"reason": reason_of(error, "profiling it")}


def _note_missing(cells: Sequence[Cell], plan: Plan) -> None:
    """Say of each cell what an interruption has left out."""
    why = "the comparison was interrupted"
    for cell in cells:
        if cell.status == "ok" and not cell.times_ms:
            cell.status, cell.reason = "skipped", f"not measured: {why}"
        elif cell.status == "ok" and plan.prove and cell.proof is None:
            cell.proof = {"pass": None, "message": why, "checks": {}}


# ------------------------------------------------------------------ numbers


def summarize(
    cells: Sequence[Cell],
    plan: Plan,
    command: str,
    env: Mapping[str, Any],
    interrupted: bool = False,
) -> dict[str, Any]:
    """The numbers of ``compare.json``, from what was measured. Pure."""
    config = cells[0].config
    result = {
        "schema": SCHEMA,
        "command": command,
        "interrupted": interrupted,
        "env": {k: v for k, v in env.items() if k not in OF_LOSSES},
        "baseline": _baseline(cells[0], cells).label,
        "workload": env["workload"],
        "parameters": env["parameters"],
        "global_batch": config.training.global_batch,
        "repeats": plan.repeats,
        "warmup_steps": plan.warmup,
        "timed_steps": plan.steps,
        "loss_not_compared": env.get("loss_not_compared"),
        "couples_samples": env.get("couples_samples", False),
        "config": config.to_dict(),
        "cells": [_row(cell, _baseline(cell, cells), env) for cell in cells],
    }
    return {**result, "answer": choice.answer(result)}


def _baseline(cell: Cell, cells: Sequence[Cell]) -> Cell:
    """``single`` in the cell's precision; without it, the first cell in that precision."""
    same = [c for c in cells if c.config.precision == cell.config.precision]
    return next((c for c in same if c.is_reference), same[0])


def _row(cell: Cell, baseline: Cell, env: Mapping[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {
        "label": cell.label,
        **cell.point,
        "baseline": baseline.label,
        "status": cell.status,
        "reason": cell.reason,
        "changes": cell.changes,
        **dict.fromkeys(NUMBERS),
        "step_ms_repeats": cell.times_ms,
        "estimated_bytes": cell.estimated_bytes,
        "losses": cell.losses,
        "proof": cell.proof,
        "profile": cell.profile,
        "sent": cell.sent,
        "every": cell.every,
        "chosen": cell.chosen,
        "traces": cell.traces,
    }
    if cell.status != "ok" or not cell.times_ms:
        return row
    times = [ms for repeat in cell.times_ms for ms in repeat]
    row["step_ms"] = stats.spread(times)
    row["skew_ms"] = statistics.median(cell.skews_ms)
    row |= stats.throughput(times, cell.samples, cell.tokens_per_sample)
    if env.get("matmul") and env.get("flops_per_sample"):
        peak = env["matmul"][row["precision"]]
        devices = min(cell.world, peak["devices"])
        rate = env["flops_per_sample"] * row["samples_per_s"]
        row["mfu"] = rate / (peak["flops_per_s"] * devices)
    row["peak_bytes"] = cell.peak_bytes or {"total": None}
    row["loss"] = cell.losses[-1]
    if baseline.status == "ok" and baseline.times_ms:
        repeats = baseline.times_ms, cell.times_ms
        row["speed_to_baseline"] = stats.ratio(*repeats)
        if cell is baseline:
            row["speed_interval"] = [1.0, 1.0]
        elif stats.can_tell(*repeats):
            row["speed_interval"] = list(stats.ratio_interval(*repeats, paired=True))
        # Without single there is no reference to differ from; and where forward is random, or
        # BatchNorm or the loss saw other micro-batches than single's, another loss is right. So is
        # that of workers, which train otherwise than one process.
        sees_batches = env.get("normalizes_batches") or env.get("couples_samples")
        same_batches = cell.parts == baseline.parts or not sees_batches
        comparable = cell is baseline or not (env.get("loss_not_compared") or cell.every)
        if baseline.is_reference and same_batches and comparable:
            differences = [abs(a - b) for a, b in zip(cell.losses, baseline.losses, strict=True)]
            row["loss_difference"] = differences[-1]
            row["loss_difference_max"] = max(differences)
    return row


# ------------------------------------------------------------------ in the ranks


def weigh_cell(world: World, config: Config) -> dict[str, int] | None:
    """What the fullest rank holds at its peak, over building and two steps."""
    weights = estimate.weigh(world, config.with_overrides(WEIGHED))
    return None if weights is None else estimate.fullest(weights[p] for p in estimate.PEAKS)


@on_its_ranks
def profile_cell(world: World, config: Config, folder: str, label: str) -> dict[str, Any]:
    """A short run under the profiler, its traces in ``<folder>/<label>/traces``; what it sends."""
    from shardlab.ledger import LEDGER
    from shardlab.proof import evidence
    from shardlab.proof.subjects import Subject
    from shardlab.trace import capture
    from shardlab.training import builders, loop
    from shardlab.training import run as running
    from shardlab.training.recorder import Recorder

    where = f"rank {world.rank} on {socket.gethostname()}"
    unseen = world.gather(None if Path(folder).is_dir() else where)
    if missing := [rank for rank in unseen if rank is not None]:
        raise UsageError(
            f"{folder}, where the traces go, is not visible to {'; '.join(missing)}: name a folder "
            "that all nodes share, as in --out /shared/compare"
        )
    LEDGER.reset()
    workload = builders.build_workload(config)
    strategy = builders.build_strategy(config, workload, world)
    own = Path(folder) / capture.folder_name(label)
    own.mkdir(exist_ok=True)
    traces = running.make_capture(config, world, strategy, own)
    assert traces is not None
    with Recorder(own, world, LEDGER, config.training.steps, traces) as recorder:
        steps = range(config.training.steps)
        loop.train(strategy, loop.Batches(workload, config, world), recorder, steps)
    shares = builders.data_share(config, world)[1]
    if strategy.rounds is not None:
        # A whole round is watched. What workers send does not depend on how many samples they saw.
        few = {"training.global_batch": shares, "training.micro_batch": None}
        config = config.with_overrides(few)
    share = next(loop.Batches(workload, config, world))
    subject = Subject(workload, config.training.seed, [[share] * shares])  # its own is ours
    subject.ranks_per_node = world.ranks_per_node
    sent = evidence.sent_per_step(strategy, subject, config, world)
    return {"folder": str(own), **traces.summary(), "sent": sent}


@on_its_ranks
def time_cell(world: World, config: Config, warmup: int) -> dict[str, Any]:
    """Build the cell's strategy from the seed and run warm-up and timed steps.

    Workers exchange in some steps only: of them a whole round is timed, after the warm-up, and its
    mean stands for each step.
    """
    from shardlab.guard import watchdog
    from shardlab.ledger import LEDGER
    from shardlab.training import builders, loop
    from shardlab.training.recorder import Recorder

    LEDGER.reset(full_steps=0)
    workload = builders.build_workload(config)
    strategy = builders.build_strategy(config, workload, world)
    asked, every = config.training.steps, None
    if strategy.rounds is not None:
        every = strategy.rounds.every
        config = config.with_overrides({"training.steps": max(asked, warmup + every)})
    with (
        watchdog.watching(world, config.guard.hang_s, config.launch.timeout_s),
        Recorder(None, world, LEDGER, config.training.steps) as recorder,
    ):
        steps = range(config.training.steps)
        loop.train(strategy, loop.Batches(workload, config, world), recorder, steps)
    times = list(zip(*world.gather([row["step_ms"] for row in recorder.rows]), strict=True))
    slowest, skews = [max(ranks) for ranks in times], [max(ranks) - min(ranks) for ranks in times]
    if every is not None:
        slowest, skews = ([statistics.mean(ms[-every:])] * asked for ms in (slowest, skews))
    return {
        "slowest_ms": slowest,
        "skew_ms": skews,
        "every": every,
        "chosen": strategy.chosen(),
        "changes": prove.changes(config.strategy.options, strategy),
        "losses": [row["loss"] for row in recorder.rows][:asked],
        "samples": config.training.global_batch,
        "tokens_per_sample": workload.tokens_per_sample,
    }
