"""One rank's whole run: what it builds, the loop, what it leaves."""

from __future__ import annotations

import statistics
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardlab import pulse, stats
from shardlab.checkpoint import load
from shardlab.checkpoint import resume as resumes
from shardlab.checkpoint.load import kept_rows
from shardlab.checkpoint.resume import Start, refuse_unfit
from shardlab.checkpoint.save import Saving
from shardlab.config import Config
from shardlab.errors import UsageError
from shardlab.faults import inject
from shardlab.files import room_needed, write_json
from shardlab.guard import graceful_stop, watchdog
from shardlab.guard.guards import Guards, refuse_unequal_data
from shardlab.guard.nonfinite import NumbersGuard
from shardlab.ledger import LEDGER
from shardlab.runfolder import mark
from shardlab.runlock import RunLock
from shardlab.strategies.base import Strategy
from shardlab.trace import capture
from shardlab.training import equivalence_check, evaluate, loggers
from shardlab.training.builders import axes_of, build_strategy, build_workload, in_precision, notes
from shardlab.training.folder import make_folder, refuse_apart
from shardlab.training.loop import Act, Batches, data_order, prepared, train, with_steps
from shardlab.training.recorder import Recorder
from shardlab.workloads.base import Workload
from shardlab.world import World


def train_rank(world: World, config: Config, command: str) -> dict[str, Any]:
    """What ``shardlab train`` runs on every rank; returns the summary that it prints.

    The folder is made only when model, data and strategy have been built: a run that is
    refused leaves nothing behind.
    """
    config = config.at_world(world.size)
    hang_s, timeout_s = config.guard.hang_s, config.launch.timeout_s
    with (
        watchdog.watching(world, hang_s, timeout_s),
        room_needed(world.rank),
        RunLock() as lock,
        graceful_stop.watching(world) as stop,
        # torchrun's ranks hear signals from their first moment on; ours, if their parent sends one.
        nullcontext() if world.pulse is None else graceful_stop.heard(stop.ask),
    ):
        return _train_rank(world, config, command, lock, stop)


def _train_rank(
    world: World, config: Config, command: str, lock: RunLock, stop: graceful_stop.Stop
) -> dict[str, Any]:
    refuse_apart(config, world)
    workload = build_workload(config)
    refuse_unequal_data(workload, world)
    # From here on it says what was chosen: in config.yaml, and in checkpoints.
    config = with_steps(config.with_overrides(workload.chosen), workload)
    LEDGER.reset(full_steps=config.profile.ledger_steps)
    guards = Guards(config, world)
    refuse_early(config, world, workload)
    start = resumes.choose(config, world, lock, workload.chosen)
    before = evaluations_before(start, config, world, workload)
    strategy = prepare_strategy(start, config, world, workload)
    folder = make_folder(config, workload, world, command, start, lock)
    inject.arm(config.faults, world, config.strategy.name, folder)
    stop.is_on = config.checkpoint.every is not None
    announce(folder, config, workload, world, start)

    traces = None if start.step else make_capture(config, world, strategy, folder)
    finite = NumbersGuard(strategy, world, config.training.on_nonfinite)
    recorder = make_recorder(config, world, strategy, folder, traces, start)
    feed = closing(Batches(workload, config, world, start.step))
    with feed as batches, recorder, finite.explaining():
        if start.keeps_rows(world.size):
            recorder.rows = kept_rows(folder, world)
        saving = Saving(config, workload, world, strategy, recorder, guards)

        def why_ended() -> str | None:
            return evaluate.why_ended([*before, *recorder.evaluations], config.training)

        def may_begin() -> bool:
            # An evaluation is the same on every rank, and so is what follows from it.
            return why_ended() is None and stop.may_begin()

        between: list[Act] = [
            keep_choice(strategy, config, world, folder, start.step),
            finite.after_step,
            lambda step, _loss: guards.after_step(step, strategy),
            make_evaluation_act(config, workload, world, strategy, recorder),
            saving.after_step,
        ]
        steps = range(start.step, config.training.steps)
        train(strategy, batches, recorder, steps, finite.check_loss, between, may_begin)
        guards.after_loop()
        saving.finish()
        ended = why_ended() if saving.finished < steps.stop else None

    last = saving.last()
    if stop.is_stopped:
        made = start.step + stop.begun
        if world.rank == 0:
            mark(folder, "interrupted", reason=stop.reason, steps=made)
        return {
            "folder": str(folder), "stopped": made, "signal": stop.signal, "checkpoint": last,
        }  # fmt: skip
    rows_of_ranks = world.gather(recorder.rows)
    if world.rank == 0:
        unsaved = (last or {}).get("error")
        because = {"reason": unsaved or ended} if unsaved or ended else {}
        mark(folder, "not saved" if unsaved else "finished", **because)
    return {
        "folder": str(folder),
        "data": workload.data,
        "chosen": strategy.chosen(),
        **summary(rows_of_ranks, workload),
        "seconds": recorder.seconds,
        "first_step": start.step,
        "evaluations": recorder.evaluations,
        "ended_early": ended,
        "checkpoint": last,
        "traces": None if traces is None else traces.summary(),
    }


# ------------------------------------------------------------------ before the loop


def refuse_early(config: Config, world: World, workload: Workload) -> None:
    """What cannot be had here is refused before a model is built, which may take minutes."""
    capture.check(config.profile, world.device)
    if config.training.evaluate_every is not None:
        evaluate.held_out_of(workload)
    loggers.check(config.output)


def evaluations_before(
    start: Start, config: Config, world: World, workload: Workload
) -> list[dict[str, Any]]:
    """Those that ``training.patience`` counts from before a resume, if the checkpoint fits."""
    refuse_unfit(start, config, len(workload.dataset), workload.chosen)
    before: list[dict[str, Any]] = []
    if config.training.patience is not None:
        before = resumes.agree(world, start.evaluations)
    ended = evaluate.why_ended(before, config.training)
    if ended is not None and not start.keeps_rows(world.size):
        raise UsageError(f"{start.checkpoint}: {ended}: to go on, raise training.patience")
    return before


def prepare_strategy(start: Start, config: Config, world: World, workload: Workload) -> Strategy:
    """Model, optimizer and strategy, as the checkpoint has them if there is one."""
    equivalence_check.check(config, workload, world)
    strategy = build_strategy(config, workload, world)
    if start.manifest is not None:
        order = data_order(workload, config)
        first = prepared(workload, config, world, order, start.step, depth=0)
        load.restore(start, strategy, world, config, lambda: next(first).microbatches)
    return strategy


def announce(folder: Path, config: Config, workload: Workload, world: World, start: Start) -> None:
    """Tell the command where the run is, and on what."""
    world.tell({"folder": str(folder)})
    if world.rank == 0 and workload.data:
        world.tell({"data": workload.data})
    if world.rank == 0 and not start.is_resumed:
        for note in notes(config, workload):
            world.tell({"note": note})


def make_recorder(
    config: Config,
    world: World,
    strategy: Strategy,
    folder: Path,
    traces: capture.Capture | None,
    start: Start,
) -> Recorder:
    return Recorder(
        folder,
        world,
        LEDGER,
        config.training.steps,
        traces,
        loggers.of_run(config, folder, start.step) if world.rank == 0 else [],
        start.step,
        rate=lambda: strategy.update.learning_rate,
        log_every=config.output.log_every,
    )


# ------------------------------------------------------------------ between two steps


def keep_choice(
    strategy: Strategy, config: Config, world: World, folder: Path, first_step: int
) -> Act:
    """What notes, after the first step, which options the strategy has set by itself."""

    def act(step: int, _loss: Tensor) -> None:
        if step != first_step or world.rank:
            return
        (folder / "chosen.json").unlink(missing_ok=True)  # of before a resume
        if chosen := strategy.chosen():
            write_json(folder / "chosen.json", chosen)
            said = ", ".join(f"{name}={value:.4g}" for name, value in chosen.items())
            world.tell({"note": f"{config.strategy.name} chose {said}"})

    return act


def make_evaluation_act(
    config: Config,
    workload: Workload,
    world: World,
    strategy: Strategy,
    recorder: Recorder,
) -> Act:
    """What evaluates after a step, if the config asks for it and it is due."""
    every, total = config.training.evaluate_every, config.training.steps
    if every is None:
        return lambda _step, _loss: None
    evaluation = make_evaluation(config, workload, world, strategy)

    def act(step: int, _loss: Tensor) -> None:
        if evaluate.is_due(step + 1, every, total):
            with pulse.PULSE.at(pulse.EVALUATION):
                recorder.evaluated(step + 1, evaluation())

    return act


def make_evaluation(
    config: Config, workload: Workload, world: World, strategy: Strategy
) -> evaluate.Evaluation:
    """Evaluate this run's model in its precision, with as many samples at a time as in training."""
    training, compute = config.training, config.precision.compute
    return evaluate.Evaluation(
        strategy,
        workload,
        world,
        in_precision(evaluate.sums_of(workload), compute),
        chunk=-(-training.global_batch // config.accumulate),
        samples=training.evaluate_samples,
        dtype=torch.float64 if compute == "fp64" else torch.float32,
        of_average=training.ema_decay is not None,
        axes=axes_of(config, world)[0],
    )


def make_capture(
    config: Config, world: World, strategy: Strategy, folder: Path
) -> capture.Capture | None:
    """What records the windows that the config asks for, if it asks."""
    if not config.profile.enabled:
        return None
    return capture.Capture(config.profile, world, LEDGER, strategy, folder, config.strategy.label)


def summary(rows_of_ranks: list[list[dict[str, Any]]], workload: Workload) -> dict[str, Any]:
    """The run in a few numbers. A step is as slow as its slowest rank; the first are warm-up.

    Steps under the profiler are slower and do not count, unless there are no others.
    """
    steps = list(zip(*rows_of_ranks, strict=True))
    warmup = min(3, len(steps) // 4)
    timed = [rows for rows in steps[warmup:] if not rows[0]["profiled"]] or steps[warmup:]
    slowest_ms = [max(row["step_ms"] for row in rows) for rows in timed]
    # The last batch of an exact epoch may be short; the median step's is not.
    samples = statistics.median_high(sum(row["samples"] for row in rows) for rows in timed)
    return {
        "steps": len(steps),
        "warmup_steps": warmup,
        "first_loss": steps[0][0]["loss"],
        "loss": steps[-1][0]["loss"],
        "step_ms": stats.spread(slowest_ms),
        "data_ms": stats.spread([max(row["data_ms"] for row in rows) for rows in timed]),
        **stats.throughput(slowest_ms, samples, workload.tokens_per_sample),
    }
