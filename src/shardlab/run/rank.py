"""One rank's whole run: what it builds, the loop, what it leaves."""

from __future__ import annotations

import statistics
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardlab import comm, numbers, pulse
from shardlab import config as configs
from shardlab.checkpoint import course
from shardlab.checkpoint import start as starts
from shardlab.checkpoint.course import Saving, kept_rows
from shardlab.checkpoint.start import refuse_unfit
from shardlab.config import Config
from shardlab.data import audit as audits
from shardlab.data import sampler
from shardlab.data.audit import Audit
from shardlab.faults import inject
from shardlab.files import room_needed, write_json
from shardlab.guard import stop as stopping
from shardlab.guard import watchdog
from shardlab.guard.guards import Guards, refuse_unequal_data
from shardlab.guard.numbers import NumbersGuard
from shardlab.run import absences, boards, collect, evaluate
from shardlab.run.assemble import axes_of, build_strategy, build_workload, in_precision, notes
from shardlab.run.folder import make_folder, ranks_apart
from shardlab.run.loop import Act, Batches, data_order, prepared, train, with_steps
from shardlab.run.recorder import Recorder
from shardlab.runfolder import mark
from shardlab.runlock import RunLock
from shardlab.strategies.base import Strategy
from shardlab.trace import capture
from shardlab.workloads.base import Workload
from shardlab.world import World


def train_rank(world: World, values: dict[str, Any], command: str) -> dict[str, Any]:
    """What ``shardlab train`` runs on every rank; returns the summary that it prints.

    The folder is made only when model, data and strategy have been built: a run that is
    refused leaves nothing behind.
    """
    config = configs.from_dict(values).with_overrides({"launch.world": world.size})
    hang_s, timeout_s = config.guard.hang_s, config.launch.timeout_s
    with (
        watchdog.watching(world, hang_s, timeout_s),
        room_needed(world.rank),
        RunLock() as lock,
        stopping.watching(world) as stop,
        # torchrun's ranks hear signals from their first moment on; ours, if their parent sends one.
        nullcontext() if world.pulse is None else stopping.heard(stop.ask),
    ):
        return _train_rank(world, config, command, lock, stop)


def _train_rank(
    world: World, config: Config, command: str, lock: RunLock, stop: stopping.Stop
) -> dict[str, Any]:
    apart = ranks_apart(config, world)
    workload = build_workload(config)
    refuse_unequal_data(workload, world)
    # From here on it says what was chosen: in config.yaml, and in checkpoints.
    config = with_steps(config.with_overrides(workload.chosen), workload)
    order = data_order(workload, config)
    sampler.check_epoch(order.length, order.global_batch, order.mode)
    comm.LEDGER.reset(full_steps=config.profile.ledger_steps)
    guards = Guards(config, world)
    capture.check(config.profile, world.device)
    if config.training.evaluate_every is not None:
        evaluate.held_out_of(workload)
    boards.check(config.output)
    start = starts.choose(config, world, lock, workload.chosen)
    refuse_unfit(start, config, len(workload.dataset), workload.chosen)
    audit = Audit() if config.data.audit else None
    strategy = build_strategy(config, workload, world)
    table = absences.table_of(strategy)  # None: all ranks must stay
    alone = world
    if table is not None:
        absences.refuse_unfit(config, strategy, world)
        table.timeout_s = config.launch.timeout_s
        alone = world.alone()
        guards.let_go(alone)
    if start.manifest is not None:
        first = prepared(workload, config, world, order, start.step, depth=0)
        course.restore(start, strategy, world, config, audit, lambda: next(first).microbatches)
    folder = make_folder(config, workload, world, command, start, lock, apart)
    inject.arm(config.faults, world, config.strategy.name, folder)
    stop.is_on = config.checkpoint.every is not None and table is None
    world.tell({"folder": str(folder)})
    if world.rank == 0 and workload.data:
        world.tell({"data": workload.data})
    if world.rank == 0 and not start.is_resumed:
        for note in notes(config, workload):
            world.tell({"note": note})
    traces = None if start.step else make_capture(config, world, strategy, folder)
    shown_on = boards.of_run(config, folder, start.step) if world.rank == 0 else []
    steps = range(start.step, config.training.steps)
    finite = NumbersGuard(strategy, alone, config.training.on_nonfinite)
    recorder = Recorder(
        folder,
        alone,
        comm.LEDGER,
        steps.stop,
        traces,
        shown_on,
        start.step,
        rate=lambda: strategy.update.learning_rate,
        log_every=config.output.log_every,
        rests=lambda: strategy.rests,
    )
    with (
        closing(Batches(workload, config, world, start.step)) as feed,
        recorder,
        finite.explaining(),
    ):
        if start.keeps_rows(world.size):
            recorder.rows = kept_rows(folder, world)
        # Where workers may be lost, worker 0 alone evaluates and saves what all are after an
        # exchange.
        speaks = table is None or world.rank == 0
        saving = Saving(config, workload, alone, strategy, recorder, audit, guards, speaks)
        evaluating = make_evaluation_act(config, workload, alone, strategy, recorder, speaks)

        def keep_count(_step: int, _loss: Tensor) -> None:
            if audit is not None:
                audit.note(feed.read, feed.targets)

        def keep_choice(step: int, _loss: Tensor) -> None:
            if step != start.step or world.rank:
                return
            (folder / "chosen.json").unlink(missing_ok=True)  # of before a resume
            if chosen := strategy.chosen():
                write_json(folder / "chosen.json", chosen)
                said = ", ".join(f"{name}={value:.4g}" for name, value in chosen.items())
                world.tell({"note": f"{config.strategy.name} chose {said}"})

        between: list[Act] = [
            keep_count,
            keep_choice,
            finite.after_step,
            lambda step, _loss: guards.after_step(step, strategy),
            evaluating,
            saving.after_step,
        ]
        attendance = None
        if table is not None and world.rank == 0:
            assert strategy.rounds is not None
            attendance = absences.Attendance(
                table, world, folder, strategy.rounds.every, start.step
            )
            between.insert(0, attendance.after_step)
        train(strategy, feed, recorder, steps, finite.check_loss, between, stop.may_begin)
        guards.after_loop()
        saving.finish()
    if stop.is_stopped:
        made = start.step + stop.begun
        if world.rank == 0:
            mark(folder, "interrupted", reason=stop.reason, steps=made)
        return {
            "folder": str(folder),
            "stopped": made,
            "signal": stop.signal,
            "checkpoint": saving.last(),
        }
    rows_of_ranks = alone.gather(recorder.rows)
    audited = None if audit is None else judge_data(audit, workload, config, world)
    collect.finish(alone)
    if world.rank == 0:
        if audited is not None:
            write_json(folder / "audit.json", audited)
        mark(folder, "finished")
    return {
        "folder": str(folder),
        "data": workload.data,
        "chosen": strategy.chosen(),
        **summary(rows_of_ranks, workload),
        "seconds": recorder.seconds,
        "first_step": start.step,
        "evaluations": recorder.evaluations,
        "audit": audited,
        "checkpoint": saving.last(),
        "traces": None if traces is None else traces.summary(),
        "workers": None if attendance is None else attendance.summary(),
    }


def make_evaluation_act(
    config: Config,
    workload: Workload,
    world: World,
    strategy: Strategy,
    recorder: Recorder,
    evaluates: bool = True,
) -> Act:
    """What evaluates after a step, if the config asks for it and it is due."""
    every, total = config.training.evaluate_every, config.training.steps
    if every is None or not evaluates:
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
        chunk=-(-training.global_batch // training.accumulate),
        samples=training.evaluate_samples,
        dtype=torch.float64 if compute == "fp64" else torch.float32,
        of_average=training.ema_decay is not None,
        axes=axes_of(config, world)[0],
    )


def judge_data(audit: Audit, workload: Workload, config: Config, world: World) -> dict[str, Any]:
    """The audit of all ranks: what was fed, and how often."""
    return audits.judge(
        world.gather(audit.notes()),
        length=len(workload.dataset),
        global_batch=config.training.global_batch,
        mode=config.data.epoch,
        tokens_per_sample=workload.tokens_per_sample,
        left_over_tokens=getattr(workload.dataset, "left_over", None),
    )


def make_capture(
    config: Config, world: World, strategy: Strategy, folder: Path
) -> capture.Capture | None:
    """What records the windows that the config asks for, if it asks."""
    if not config.profile.enabled:
        return None
    return capture.Capture(
        config.profile, world, comm.LEDGER, strategy, folder, config.strategy.label
    )


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
        "step_ms": numbers.spread(slowest_ms),
        "data_ms": numbers.spread([max(row["data_ms"] for row in rows) for rows in timed]),
        **numbers.throughput(slowest_ms, samples, workload.tokens_per_sample),
    }
