"""What a rank builds before it can train: workload, model, optimizer, strategy."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardlab import axes, naming
from shardlab import world as worlds
from shardlab.axes import Axes
from shardlab.config import LOSS_SCALE, Config, TrainingConfig
from shardlab.data import loader
from shardlab.errors import UsageError
from shardlab.faults import inject
from shardlab.ledger import LEDGER
from shardlab.naming import CUTS, EVERY_STRATEGY, TWINS_CUTS, WORKLOADS
from shardlab.optim import optimizers
from shardlab.optim.schedule import learning_rate_factor
from shardlab.optim.swap import WholeModelOptimizer
from shardlab.specs import BASELINE
from shardlab.strategies import model_checks
from shardlab.strategies.base import Infer, Setup, Strategy, T
from shardlab.strategies.cut_model import CutAxis, CutModel
from shardlab.strategies.update import Rule
from shardlab.text import beside, count
from shardlab.workloads import batchnorm, custom
from shardlab.workloads.base import Batch, LossFn, Workload, cast_model
from shardlab.workloads.context import context_of
from shardlab.workloads.first_calls import watch_first_calls
from shardlab.workloads.user_errors import blame
from shardlab.world import World


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


# Methods that strategies once had, with what replaces them: the lab no longer calls the old ones.
OLDER = {
    **dict.fromkeys(("full_params", "full_tensors", "slots", "saved"), "shards"),
    **dict.fromkeys(("own_state", "shared_state"), "extra_state"),
    "whole": "model_spec",
}


def resolve_strategy(config: Config) -> type[Strategy]:
    """The class of the strategy that the config names: ours, or the user's by import path."""
    name = config.strategy.name
    make = naming.resolve(name, EVERY_STRATEGY, "strategy")
    if not (isinstance(make, type) and issubclass(make, Strategy)):
        raise UsageError(
            f"{name} is not a strategy: write a class that inherits from shardlab's Strategy "
            "(shardlab.strategies.base), as docs/your-strategy.md shows"
        )
    for old, new in OLDER.items():
        if getattr(make, old, None) is not getattr(Strategy, old, None):
            raise UsageError(f"{name} has {old}() of its own; write {new}() in its place")
    own = {key: value for key, value in config.strategy.options.items() if key not in axes.OPTIONS}
    naming.check_options(_taking_options(config), own, f"strategy {name}", axes.OPTIONS)
    return make


def _taking_options(config: Config) -> Any:
    """The class that the strategy's own options are for. A strategy that is an axis of the mesh has
    no options; those that are not the axes' belong to the strategy that shares the data."""
    name = config.strategy.name
    return naming.resolve(
        axes.inner_of(name) if name in axes.NAMED else name, EVERY_STRATEGY, "strategy"
    )


def axes_of(config: Config, world: World) -> tuple[Axes | None, dict[str, Any]]:
    """The axes of the mesh that the config asks for, and the strategy's own options."""
    return axes.axes_of(config.strategy.name, config.strategy.options, world.size)


def data_share(config: Config, world: World) -> tuple[int, int]:
    """Which share of each batch this rank gets, and of how many. Ranks that cut one model between
    them get the same."""
    found, _ = axes_of(config, world)
    return (world.rank, world.size) if found is None else found.data_share(world.rank)


def options_of(config: Config) -> dict[str, Any]:
    """The strategy's options as they are in force: those that nobody set have their defaults."""
    parameters = inspect.signature(_taking_options(config)).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    return {**defaults, **config.strategy.options}


def build_strategy(config: Config, workload: Workload, world: World) -> Strategy:
    """A model from the seed, owned by the strategy that the config names.

    The model is the same on every rank. What a rank draws from then on is its own.
    """
    make = resolve_strategy(config)
    if workload.refuse is not None:
        workload.refuse(config, axes_of(config, world)[0], world.device)
    worlds.seed(config.training.seed)
    dtype = torch.float64 if config.precision.compute == "fp64" else torch.float32
    # Initialised on the CPU, so that the same seed is the same model on every device.
    model = workload.make_model()
    model_checks.refuse_unsupported(model, world.size)
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
    setup = Setup(
        model,
        optimizer,
        loss_fn(config, workload, world),
        world.mesh,
        make_rule(config, workload),
        blocks,
        world.ranks_per_node,
        sample(config, workload, world, dtype),
        workload.splits_of(model),
        context=context_of(workload, model),
    )
    LEDGER.ranks_per_node = world.ranks_per_node
    strategy = on_axes(config, make, setup, world)
    model_checks.refuse_sparse_gradients(strategy.params)
    worlds.seed_rank(config.training.seed, _chance(config, world))
    return strategy


def _chance(config: Config, world: World) -> int:
    """Ranks with the same number draw the same (dropout): those that share samples and tokens."""
    found, _ = axes_of(config, world)
    if found is None:
        return world.rank
    place = found.place(world.rank)
    return place["data"] * found.context + place["context"]


def on_axes(config: Config, make: type[Strategy], setup: Setup, world: World) -> Strategy:
    """The strategy on the whole model, or on this rank's part of it."""
    found, options = axes_of(config, world)
    if found is None:
        return make(setup, **options)
    if max(found.tensor, found.context) > 1 and config.training.compile != "none":
        raise UsageError(
            "training.compile: ranks that share a layer (tensor) or a sequence (context) meet "
            "inside of each block, and that cannot be compiled; leave one of the two out"
        )
    if found.pipeline > 1 and make.WORKS_BY_BLOCK:
        raise UsageError(
            f"{config.strategy.name} gathers the parameters of each block for every micro-batch, "
            "forward and backward; with pipeline use zero1 or zero2"
        )
    if issubclass(make, CutModel):
        # Where an axis has a name of its own, the best replicas share the data.
        shares = axes.inner_of(config.strategy.name) if found.gradient_ranks > 1 else BASELINE
        inner = naming.resolve(shares, EVERY_STRATEGY, "strategy")
        if found.gradient_ranks == 1 and options:
            raise UsageError(
                f"{config.strategy.name}: all ranks cut one model, so nothing is sent as "
                f"{', '.join(options)} says; leave it out"
            )
        make_inner = functools.partial(inner, **options)
        return make(setup, found, make_inner, cuts_of(config.strategy.name, found))
    cuts = cuts_of(config.strategy.name, found)
    return CutModel(setup, found, functools.partial(make, **options), cuts)


def cuts_of(name: str, found: Axes) -> list[CutAxis]:
    """What cuts the model, in this order: along the tensor axis, then context, then pipeline."""
    own = {**CUTS, **TWINS_CUTS.get(name, {})}
    along = [axis for axis in reversed(axes.CUTS) if getattr(found, axis) > 1]
    return [naming.resolve(axis, own, "axis") for axis in along]


def sample(config: Config, workload: Workload, world: World, dtype: torch.dtype) -> Batch | None:
    """One sample, if the model is to be cut: running it shows how that can be done."""
    found, _ = axes_of(config, world)
    if found is None or found.model_ranks == 1:
        return None
    few = range(min(16, len(workload.dataset)))
    batches = (workload.dataset.batch([i]) for i in few)  # one without targets would show nothing
    sample = next((b for b in batches if b.count), None) or workload.dataset.batch([0])
    return loader.cast(sample, dtype).to(world.device)


def notes(config: Config, workload: Workload) -> list[str]:
    """Notes on a workload and its strategy that are printed once. None of them is an error."""
    found = list(workload.notes)
    if resolve_strategy(config).WORKS_BY_BLOCK and workload.blocks == ():
        found.append(nothing_to_shard_by(config.strategy.name))
    training, world = config.training, config.launch.world
    if training.micro_batch is not None and world is not None:
        found.append(
            f"a step takes {training.global_batch:,} samples: {count(world, 'rank')} x "
            f"{count(config.accumulate, 'micro-batch', 'micro-batches')} of "
            f"{training.micro_batch:,}"
        )
    shares = config.data_ranks
    if training.global_batch % (shares * config.accumulate):
        found.append(
            f"{training.global_batch:,} samples are no multiple of {shares:,} x "
            f"{config.accumulate:,} micro-batches: their sizes differ by one sample; the loss "
            "stays exact"
        )
    if workload.couples_samples and not workload.couples_ranks and shares > 1:
        batch, parts = training.global_batch, config.accumulate
        found.append(
            f"the loss looks at the samples of a micro-batch together, each beside "
            f"{beside(batch, shares * parts)} others (negatives); in one process it would be "
            f"{beside(batch, parts)}, and the loss another"
        )
    if training.epochs is not None and training.steps:
        found.append(
            f"{training.epochs:g} epochs of {len(workload.dataset):,} samples are "
            f"{training.steps:,} steps"
        )
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
) -> WholeModelOptimizer:
    """The optimizer over the whole model: a strategy then puts in its place what a rank updates."""
    make, after = workload.optimizer, workload.after_step
    blocks = workload.blocks_of(model)
    return optimizers.build(training, make, after, model, workload.name, blocks)


def make_rule(config: Config, workload: Workload | None = None) -> Rule:
    """What the config and the workload ask of every update, apart from the optimizer."""
    training, precision = config.training, config.precision
    return Rule(
        clip_norm=training.clip_norm,
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
