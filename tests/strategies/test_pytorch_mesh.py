"""PyTorch's own tensor and pipeline parallelism against one process: equal, or refused by name."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import meshed
from conformance import Trajectory, arrays, make_optimizer
from conftest import GetRanks, long_unless
from shardlab import axes, naming
from shardlab.errors import UsageError
from shardlab.naming import EVERY_STRATEGY
from shardlab.strategies.base import Setup
from shardlab.strategies.on_mesh import OnMesh
from shardlab.strategies.update import Rule
from shardlab.workloads import gpt2
from shardlab.workloads.architectures import known_splits
from shardlab.workloads.base import Batch
from shardlab.world import World

TENSOR, PIPELINE = "pytorch_tensor_parallel", "pytorch_pipeline"


def even(step: int, share: int, micro: int) -> Batch:
    """Micro-batches of one shape, whose counts differ."""
    generator = torch.Generator().manual_seed(10_000 * step + 100 * share + micro)
    x, y = torch.randint(0, meshed.VOCAB, (2, 2, 6), generator=generator)
    y[torch.rand(2, 6, generator=generator) < 0.3] = -100
    return Batch(x, y, int((y != -100).sum()), 2)


SUBJECTS = {
    **meshed.SUBJECTS,
    "deep": replace(
        meshed.SUBJECTS["gpt2"],
        make=functools.partial(gpt2.GPT2, replace(meshed.SHAPE, layers=8)),
        batch=even,
    ),
    "even nasty": replace(meshed.SUBJECTS["nasty"], batch=even),
}


def built(
    world: World, name: str, subject: str, options: dict[str, Any], inner: str, clip: float | None
) -> OnMesh:
    found, _ = axes.axes_of(name, options, world.size)
    assert found is not None
    what = SUBJECTS[subject]
    model = meshed.built(what, world.rank)
    splits = known_splits(model) if what.splits is None else what.splits
    blocks = [n for n, _ in model.named_modules() if n.startswith("blocks.") and n.count(".") == 1]
    rule, sample = Rule(clip_norm=clip), what.batch(0, 0, 0)
    setup = Setup(
        model, make_optimizer("adamw"), what.loss, world.mesh, rule, blocks,
        sample=sample, splits=splits,
    )  # fmt: skip
    make = naming.resolve(name, EVERY_STRATEGY, "strategy")
    strategy: OnMesh = make(setup, found, naming.resolve(inner, EVERY_STRATEGY, "strategy"))
    return strategy


def course(
    world: World,
    name: str,
    subject: str,
    options: dict[str, Any],
    inner: str = "single",
    micro: int = 2,
    clip: float | None = None,
) -> Trajectory | str:
    """On a rank: losses, gradients, parameters of some steps; or what it refuses."""
    try:
        strategy = built(world, name, subject, options, inner, clip)
        share, _ = strategy.axes.data_share(world.rank)
        result = Trajectory()
        for step in range(meshed.STEPS):
            batches = [SUBJECTS[subject].batch(step, share, m) for m in range(micro)]
            result.losses.append(float(strategy.gradients(batches)))
            result.grads.append(arrays(strategy.full_grads()))
            strategy.step()
            result.params.append(arrays(strategy.full_params()))
    except UsageError as error:
        return str(error)
    return result
