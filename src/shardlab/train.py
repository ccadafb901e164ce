"""The loop, and what a rank builds before it can run it."""

from __future__ import annotations

import functools
import os
import socket
import statistics
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardlab import (
    boards,
    comm,
    environment,
    evaluate,
    inject,
    naming,
    numbers,
    optimizers,
    runlock,
)
from shardlab import config as configs
from shardlab import world as worlds
from shardlab.checkpoint import course
from shardlab.checkpoint import start as starts
from shardlab.checkpoint.course import Saving, kept_rows
from shardlab.checkpoint.start import Start, refuse_unfit
from shardlab.config import LOSS_SCALE, Config, TrainingConfig
from shardlab.data import audit as audits
from shardlab.data import loader, sampler
from shardlab.data.audit import Audit
from shardlab.errors import UsageError
from shardlab.guard import pulse, watchdog
from shardlab.guard import stop as stopping
from shardlab.guard.guards import Guards, refuse_unequal_data
from shardlab.guard.numbers import NumbersGuard
from shardlab.record import README, Recorder, mark, new_folder, room_needed, write_json
from shardlab.runlock import RunLock
from shardlab.schedule import learning_rate_factor
from shardlab.strategies import STRATEGIES
from shardlab.strategies.base import Infer, Setup, Strategy, T, refuse_unsupported
from shardlab.strategies.update import Rule
from shardlab.trace import capture
from shardlab.workloads import WORKLOADS, batchnorm, custom
from shardlab.workloads.base import Batch, LossFn, Workload, cast_model
from shardlab.workloads.blame import blame
from shardlab.workloads.first_calls import watch_first_calls
from shardlab.world import World

VISIBLE_S = 5.0  # how long a rank looks for the run folder that rank 0 has made

Check = Callable[[int, Tensor, Sequence[Batch]], None]  # step, loss, micro-batches: before update
Act = Callable[[int, Tensor], None]  # step, loss: after it


def no_check(_step: int, _loss: Tensor, _microbatches: Sequence[Batch]) -> None: ...


def always() -> bool:
    return True


def train(
    strategy: Strategy,
    batches: Iterator[Sequence[Batch]],
    record: Recorder,
    steps: range,
    check: Check = no_check,
    between: Sequence[Act] = (),
    may_begin: Callable[[], bool] = always,
) -> None:
    """The loop of every strategy. It cannot tell them apart."""
    for step in steps:
        if not may_begin():  # a signal came, and the ranks agreed to stop before this step
            break
        microbatches = next(batches)
        with record.step(step, microbatches):
            loss = strategy.gradients(microbatches)
            check(step, loss, microbatches)
            strategy.step()
        record.loss(step, loss)
        for act in between:
            act(step, loss)


class Batches:
    """This rank's micro-batches, on its device: one list for each step from ``first`` on."""

    def __init__(self, workload: Workload, config: Config, world: World, first: int = 0) -> None:
        order = data_order(workload, config)
        sampler.check_epoch(order.length, order.global_batch, order.mode)
        self.step = first - 1
        self.read: list[sampler.Draw] = []  # the samples of the last step
        self.targets = 0  # and how many targets they have
        self._steps = prepared(workload, config, world, order, first, config.data.prefetch)

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> list[Batch]:
        loaded = next(self._steps)
        self.step += 1
        self.read = loaded.read
        self.targets = sum(b.count for b in loaded.microbatches)
        if inject.ACTIVE is not None:
            inject.ACTIVE.begin_step(self.step)
        return loaded.microbatches

    def close(self) -> None:
        """End its thread, also after a crash."""
        self._steps.close()


def data_order(workload: Workload, config: Config) -> loader.Order:
    training = config.training
    return loader.Order(
        length=len(workload.dataset),
        global_batch=training.global_batch,
        accumulate=training.accumulate,
        seed=training.seed,
        shuffle=config.data.shuffle,
        mode=config.data.epoch,
    )


def prepared(
    workload: Workload, config: Config, world: World, order: loader.Order, first: int, depth: int
) -> Generator[loader.Step, None, None]:
    return loader.load(
        workload.dataset,
        order,
        config.training.steps,
        ranks=world.size,
        rank=world.rank,
        device=world.device,
        dtype=torch.float64 if config.precision.compute == "fp64" else None,
        depth=depth,
        first=first,
    )


# ------------------------------------------------------------------ building


def build_workload(config: Config) -> Workload:
    """The workload that the config names: ours, or the user's by import path."""
    model = config.model
    options = dict(model.options)
    if model.size is not None:
        options["size"] = model.size
    if ":" in model.workload:
        on_gpu = config.launch.device != "cpu" and torch.cuda.is_available()
        device = torch.device("cuda" if on_gpu else "cpu")
        return custom.build(model.workload, config.data, options, device)
    make = naming.resolve(model.workload, WORKLOADS, "workload")
    naming.check_options(make, options, f"workload {model.workload}")
    workload: Workload = make(config.data, **options)
    return workload


def resolve_strategy(config: Config) -> type[Strategy]:
    """The class of the strategy that the config names: ours, or the user's by import path."""
    name = config.strategy.name
    make = naming.resolve(name, STRATEGIES, "strategy")
    if not (isinstance(make, type) and issubclass(make, Strategy)):
        raise UsageError(
            f"{name} is not a strategy: write a class that inherits from shardlab's Strategy "
            "(shardlab.strategies.base), as docs/your-strategy.md shows"
        )
    naming.check_options(make, config.strategy.options, f"strategy {name}")
    return make


def build_strategy(config: Config, workload: Workload, world: World) -> Strategy:
    """A model from the seed, owned by the strategy that the config names.

    The model is the same on every rank. What a rank draws from then on is its own.
    """
    make = resolve_strategy(config)
    worlds.seed(config.training.seed)
    dtype = torch.float64 if config.precision.compute == "fp64" else torch.float32
    # Initialised on the CPU, so that the same seed is the same model on every device.
    model = workload.make_model()
    refuse_unsupported(model, world.size)
    model = cast_model(model, world.device, dtype)
    batchnorm.join(model, world.group)
    prepare_blocks(model, workload, config.training)
    blocks = workload.blocks_of(model)
    if make.WORKS_BY_BLOCK and config.training.compile == "model" and blocks:
        raise UsageError(
            f"{config.strategy.name} works block by block, and a model that is compiled as one "
            "has none: use training.compile: blocks"
        )
    optimizer = make_optimizer(config.training, workload, model)
    if config.checkpoint.every is not None and optimizer.traits and optimizer.traits.unsaved:
        reason = optimizer.traits.unsaved
        raise UsageError(f"checkpoint.every: {reason}, and a checkpoint would not have it")
    if config.training.clip_value is not None:
        refuse_complex(model)
    setup = Setup(
        model,
        optimizer,
        loss_fn(config, workload, world),
        world.mesh,
        make_rule(config, workload),
        blocks,
    )
    strategy: Strategy = make(setup, **config.strategy.options)
    worlds.seed_rank(config.training.seed, world.rank)
    return strategy


def refuse_complex(model: nn.Module) -> None:
    for name, p in model.named_parameters():
        if p.is_complex():
            raise UsageError(f"training.clip_value: '{name}' is complex, and has no largest value")


def notes(config: Config, workload: Workload) -> list[str]:
    """What is to be said once of a workload and its strategy; nothing of it is an error."""
    found = list(workload.notes)
    if resolve_strategy(config).WORKS_BY_BLOCK and workload.blocks == ():
        found.append(nothing_to_shard_by(config.strategy.name))
    return found


def nothing_to_shard_by(strategy: str) -> str:
    return (
        f"{strategy} has nothing to shard by: the workload names no blocks and none can be guessed "
        "from its model, so the whole model is one unit, and each rank gathers all of it"
    )


def loss_fn(config: Config, workload: Workload, world: World) -> LossFn:
    """The workload's loss in the run's precision; in a run with faults, where they strike."""
    loss = in_precision(workload.loss, config.precision.compute)
    loss = watch_first_calls(
        loss, lambda note: world.tell({"note": note}) if world.rank == 0 else None
    )
    inject.arm(config.faults, world, config.strategy.name)
    return inject.in_forward(loss, config.strategy.name) if config.faults else loss


def make_optimizer(
    training: TrainingConfig,
    workload: Workload,
    model: nn.Module,
    device: torch.device | None = None,
    measures: bool = True,
) -> optimizers.Plan:
    """A factory: a strategy that shards builds its optimizer over what it keeps.

    The model is whole here, before a strategy owns it. ``device``: the run's, if not the model's.
    """
    make, after = workload.optimizer, workload.after_step
    return optimizers.plan(training, make, after, model, workload.name, device, measures)


def make_rule(config: Config, workload: Workload | None = None) -> Rule:
    """What the config and the workload ask of every update beside the optimizer."""
    training, precision = config.training, config.precision
    return Rule(
        clip_norm=training.clip_norm,
        clip_value=training.clip_value,
        loss_scale=(precision.loss_scale or LOSS_SCALE) if precision.compute == "fp16" else None,
        schedule=make_schedule(training, workload),
        on_nonfinite=training.on_nonfinite,
    )


def make_schedule(training: TrainingConfig, workload: Workload | None) -> Callable[[int], float]:
    """The factor of a step's learning rates: ours, or the user's function."""
    own = None if workload is None else workload.schedule
    label = "the workload's schedule"
    if own is not None and (training.schedule != "constant" or training.warmup_steps):
        raise UsageError(
            "the workload has a schedule of its own: leave out training.schedule and "
            "training.warmup_steps, or that"
        )
    if own is None and ":" in training.schedule:
        label = f"training.schedule {training.schedule}"
        with blame(training.schedule, "importing it"):
            own = naming.resolve(training.schedule, {}, "training.schedule")
    if own is None:
        return functools.partial(
            learning_rate_factor,
            total=training.steps,
            warmup=training.warmup_steps,
            kind=training.schedule,
            floor=training.min_rate,
        )
    if not callable(own):
        raise UsageError(f"{label} is a {type(own).__name__}, not a function of the step")

    def factor(step: int) -> float:
        with blame(label, "the step's factor"):
            value = float(own(step))
        if not 0 <= value < float("inf"):
            raise UsageError(f"{label} gives {value} for step {step}: a factor, 0 or more, belongs")
        return value

    factor(0)
    return factor


def in_precision(function: Infer[T], compute: str) -> Infer[T]:
    """The loss function with its forward in autocast, for bf16 and fp16. All strategies get it."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(compute)
    if dtype is None:
        return function

    def in_autocast(model: nn.Module, batch: Batch) -> T:
        device = next(model.parameters()).device.type
        with torch.autocast(device, dtype):
            return function(model, batch)

    return in_autocast


def prepare_blocks(model: nn.Module, workload: Workload, training: TrainingConfig) -> None:
    """Checkpoint and compile, before the strategy owns the model.

    Only the instance's ``forward`` is replaced, no module is wrapped: parameters keep their
    names, and a strategy's hooks on a block run around it. What they gather before a block's
    backward is thus there when checkpointing computes the block's forward again.
    """
    blocks = [model.get_submodule(name) for name in workload.blocks_of(model)]
    if training.compile != "none":
        _refuse_without_compiler(next(model.parameters()).device)
    if training.compile == "blocks" and blocks:
        for module in (*blocks, *map(model.get_submodule, workload.compile_also)):
            module.forward = torch.compile(module.forward)
    if training.activation_checkpointing:
        if not blocks:
            raise UsageError(
                f"training.activation_checkpointing works block by block, and the workload "
                f"{workload.name} names no blocks"
            )
        for block in blocks:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    if training.compile == "model" or (training.compile == "blocks" and not blocks):
        model.forward = torch.compile(model.forward)


def _refuse_without_compiler(device: torch.device) -> None:
    """On a CPU, torch.compile writes C++. (On a GPU Triton brings its own.)"""
    if device.type != "cpu":
        return
    from torch._inductor import cpp_builder, exc  # half a second

    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler:
        raise UsageError(
            "training.compile needs a C++ compiler on a CPU, and there is none; install g++, or "
            "name yours in the environment variable CXX"
        ) from None


# ------------------------------------------------------------------ a rank's whole run


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
    workload = build_workload(config)
    refuse_unequal_data(workload, world)
    order = data_order(workload, config)
    sampler.check_epoch(order.length, order.global_batch, order.mode)
    comm.LEDGER.reset(full_steps=config.profile.ledger_steps)
    guards = Guards(config, world)
    capture.check(config.profile, world.device)
    if config.training.evaluate_every is not None:
        evaluate.held_out_of(workload)
    boards.check(config.output)
    start = starts.choose(config, world, lock)
    refuse_unfit(start, config, len(workload.dataset))
    audit = Audit() if config.data.audit else None
    strategy = build_strategy(config, workload, world)
    if start.manifest is not None:
        restore(start, strategy, workload, world, config, audit)
    folder = make_folder(config, workload, world, command, start, lock)
    inject.arm(config.faults, world, config.strategy.name, folder)
    stop.is_on = config.checkpoint.every is not None
    world.tell({"folder": str(folder)})
    if world.rank == 0 and not start.is_resumed:
        for note in notes(config, workload):
            world.tell({"note": note})
    traces = None if start.step else make_capture(config, world, strategy, folder)
    shown_on = boards.of_run(config, folder, start.step) if world.rank == 0 else []
    steps = range(start.step, config.training.steps)
    finite = NumbersGuard(strategy, world, config.training.on_nonfinite)
    with (
        closing(Batches(workload, config, world, start.step)) as feed,
        Recorder(folder, world, comm.LEDGER, steps.stop, traces, shown_on, start.step) as recorder,
        finite.explaining(),
    ):
        if start.keeps_rows(world.size):
            recorder.rows = kept_rows(folder, world)
        saving = Saving(config, workload, world, strategy, recorder, audit, guards)
        evaluating = make_evaluation_act(config, workload, world, strategy, recorder)

        def keep_count(_step: int, _loss: Tensor) -> None:
            if audit is not None:
                audit.note(feed.read, feed.targets)

        between: list[Act] = [
            keep_count,
            finite.after_step,
            lambda step, _loss: guards.after_step(step, strategy),
            evaluating,
            saving.after_step,
        ]
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
    rows_of_ranks = world.gather(recorder.rows)
    audited = None if audit is None else judge_data(audit, workload, config, world)
    if world.rank == 0:
        if audited is not None:
            write_json(folder / "audit.json", audited)
        mark(folder, "finished")
    return {
        "folder": str(folder),
        **summary(rows_of_ranks, workload),
        "evaluations": recorder.evaluations,
        "audit": audited,
        "checkpoint": saving.last(),
        "traces": None if traces is None else traces.summary(),
    }


def restore(
    start: Start,
    strategy: Strategy,
    workload: Workload,
    world: World,
    config: Config,
    audit: Audit | None,
) -> None:
    """The strategy as it was when the checkpoint was taken."""

    def first_batches() -> Sequence[Batch]:
        order = data_order(workload, config)
        with closing(prepared(workload, config, world, order, start.step, depth=0)) as steps:
            return next(steps).microbatches

    course.restore(start, strategy, world, config, audit, first_batches)


def make_evaluation_act(
    config: Config, workload: Workload, world: World, strategy: Strategy, recorder: Recorder
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
        chunk=-(-training.global_batch // training.accumulate),
        samples=training.evaluate_samples,
        dtype=torch.float64 if compute == "fp64" else torch.float32,
        of_average=training.ema_decay is not None,
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


def make_folder(
    config: Config, workload: Workload, world: World, command: str, start: Start, lock: RunLock
) -> Path:
    """The run folder, made and filled by rank 0 and known to all; or that of the run to go on."""
    pids = world.gather(os.getpid())  # for a debugger, or for whoever must end a rank by hand
    said = notes(config, workload)
    folder = Path(_agreed(world, lambda: str(_take_folder(config, workload, world, start, lock))))
    try:
        refuse_invisible(folder, world, lock)
        _agreed(world, lambda: _fill_folder(folder, config, world, command, start, pids, said))
    except UsageError:
        if start.run is None:
            lock.discard()
        raise
    return folder


def _agreed(world: World, act: Callable[[], T]) -> T:
    """What rank 0 does with the folder, for all ranks: if it cannot, all are refused alike."""

    def writing() -> T:
        try:
            return act()
        except OSError as error:
            raise UsageError(f"cannot write the run folder: {error}") from None

    found: T = starts.agree(world, writing)
    return found


def _take_folder(
    config: Config, workload: Workload, world: World, start: Start, lock: RunLock
) -> Path:
    """On rank 0: the folder, ours alone from here on."""
    if start.run is not None:
        lock.take(start.run)
        return start.run
    strategy = config.strategy.name.rpartition(":")[2]
    name = f"{workload.name}-{strategy}-w{world.size}"
    chosen = Path(config.output.dir) if config.output.dir else None
    try:
        str(chosen or config.output.root).encode()
    except UnicodeEncodeError:  # the file system would take it, but no text file could name it
        raise UsageError(
            f"the name of the run folder is not UTF-8: {chosen or config.output.root}"
        ) from None
    folder = new_folder(Path(config.output.root), name, chosen)
    lock.take(folder)
    if any(path.name != runlock.NAME for path in folder.iterdir()):
        raise UsageError(f"the output folder {folder} has been used meanwhile; choose another")
    return folder


def _fill_folder(
    folder: Path,
    config: Config,
    world: World,
    command: str,
    start: Start,
    pids: list[int],
    said: list[str],
) -> None:
    """On rank 0: what stands in the folder before the first step."""
    if start.run is not None:
        starts.clear(start)
    else:
        described = environment.describe(world.device, command)
        write_json(folder / "env.json", {**described, "notes": said})
        readme = README.format(title=folder.name)
        (folder / "README.md").write_text(readme, encoding="utf-8")
    again = config.with_overrides({"output.dir": None, "checkpoint.resume": None})
    (folder / "config.yaml").write_text(again.to_yaml(), encoding="utf-8")
    if start.is_resumed:
        world.tell({"resumed": starts.note(folder, start, config, command)})
    mark(folder, "running", pids=pids, host=socket.gethostname())


def refuse_invisible(folder: Path, world: World, lock: RunLock) -> None:
    """Every rank writes into the run folder, so every rank must see the one that rank 0 made."""
    token, host = world.share((lock.token, socket.gethostname()))
    limit = time.monotonic() + VISIBLE_S
    while not (is_seen := runlock.token_in(folder) == token) and time.monotonic() < limit:
        time.sleep(0.1)  # over NFS it may take a moment
    where = f"rank {world.rank} on {socket.gethostname()}, in {_current_folder()}"
    missing = [found for found in world.gather(None if is_seen else where) if found is not None]
    if missing:
        raise UsageError(
            f"the run folder {folder} that rank 0 has made on {host} is not visible to "
            f"{'; '.join(missing)}: name a folder that all ranks share, as in --out /shared/run"
        )


def _current_folder() -> str:
    try:
        return str(Path.cwd())
    except OSError:
        return "a folder that is gone"


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
