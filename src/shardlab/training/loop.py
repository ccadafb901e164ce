"""The loop of every strategy, and the batches that it asks for."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence

import torch
from msgspec.structs import replace
from torch import Tensor

from shardlab.config import Config
from shardlab.data import loader, sampler
from shardlab.errors import UsageError
from shardlab.faults import inject
from shardlab.strategies.base import Strategy
from shardlab.training import builders
from shardlab.training.recorder import Recorder
from shardlab.workloads.base import Batch, Workload
from shardlab.workloads.samples import ENDLESS
from shardlab.world import World

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
        self.step = first - 1
        self._steps = prepared(workload, config, world, order, first, config.data.prefetch)

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> list[Batch]:
        microbatches = next(self._steps).microbatches
        self.step += 1
        if inject.ACTIVE is not None:
            inject.ACTIVE.begin_step(self.step)
        return microbatches

    def close(self) -> None:
        """End its thread, also after a crash."""
        self._steps.close()


def with_steps(config: Config, workload: Workload) -> Config:
    """The config with the steps that its epochs take, which the data's size decides."""
    training = config.training
    if training.epochs is None:
        return config
    length = data_order(workload, config).length
    if length == ENDLESS:
        raise UsageError("training.epochs: the data is a stream, and has no size; use steps")
    steps = sampler.steps_of_epochs(
        training.epochs, training.global_batch, length, config.data.epoch
    )
    if training.steps not in (0, steps):
        raise UsageError(
            f"training.epochs {training.epochs:g} are {steps:,} steps ({length:,} samples, global "
            f"batch {training.global_batch:,}) and training.steps is {training.steps:,}; leave out "
            "one of them"
        )
    return replace(config, training=replace(training, steps=steps))


def data_order(workload: Workload, config: Config) -> loader.Order:
    training = config.training
    return loader.Order(
        length=len(workload.dataset),
        global_batch=training.global_batch,
        accumulate=config.accumulate,
        seed=training.seed,
        shuffle=config.data.shuffle,
        mode=config.data.epoch,
    )


def prepared(
    workload: Workload, config: Config, world: World, order: loader.Order, first: int, depth: int
) -> Generator[loader.Step, None, None]:
    share, shares = builders.data_share(config, world)
    return loader.load(
        workload.dataset,
        order,
        config.training.steps,
        ranks=shares,
        rank=share,
        device=world.device,
        dtype=torch.float64 if config.precision.compute == "fp64" else None,
        depth=depth,
        first=first,
    )
