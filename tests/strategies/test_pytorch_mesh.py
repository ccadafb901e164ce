"""PyTorch's own tensor and pipeline parallelism against one process: equal, or refused by name."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

import meshed
import resuming
from conformance import Trajectory, first_difference, make_optimizer
from conftest import GetRanks, deep_unless, long_unless
from shardlab import axes, naming
from shardlab.errors import UsageError
from shardlab.naming import EVERY_STRATEGY
from shardlab.strategies.base import Setup
from shardlab.strategies.cut_model import CutModel
from shardlab.training.builders import cuts_of
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


def built(world: World, name: str, subject: str, options: dict[str, Any], inner: str) -> CutModel:
    found, _ = axes.axes_of(name, options, world.size)
    assert found is not None
    what = SUBJECTS[subject]
    model = meshed.built(what, world.rank)
    splits = known_splits(model) if what.splits is None else what.splits
    blocks = [n for n, _ in model.named_modules() if n.startswith("blocks.") and n.count(".") == 1]
    sample = what.batch(0, 0, 0)
    setup = Setup(
        model, make_optimizer("adamw"), what.loss, world.mesh, blocks=blocks,
        sample=sample, splits=splits,
    )  # fmt: skip
    make = naming.resolve(name, EVERY_STRATEGY, "strategy")
    of_data = naming.resolve(inner, EVERY_STRATEGY, "strategy")
    strategy: CutModel = make(setup, found, of_data, cuts_of(name, found))
    return strategy


def course(
    world: World,
    name: str,
    subject: str,
    options: dict[str, Any],
    inner: str,
    micro: int,
) -> Trajectory | str:
    """On a rank: losses, gradients, parameters of some steps; or what it refuses."""
    try:
        strategy = built(world, name, subject, options, inner)
        share, _ = strategy.axes.data_share(world.rank)
        result = Trajectory()
        for step in range(meshed.STEPS):
            batches = [SUBJECTS[subject].batch(step, share, m) for m in range(micro)]
            result.take_step(strategy, batches)
    except UsageError as error:
        return str(error)
    return result


def plain(subject: str, shares: int, micro: int) -> Trajectory:
    with mock.patch.dict(meshed.SUBJECTS, SUBJECTS):
        return meshed.plain(subject, shares, micro)


# ------------------------------------------------------------------ equal to one process

TENSORS = [  # subject, ranks, options, who shares the data
    ("gpt2", 2, {}, "single"),
    ("llama", 2, {}, "single"),
    ("gpt2", 4, {"tensor": 2}, "pytorch_zero3"),  # FSDP2 x TP
    ("gpt2", 4, {"tensor": 2}, "zero2"),
]
PIPES = [  # subject, ranks, options, who shares the data, micro-batches
    ("deep", 2, {"schedule": "gpipe"}, "single", 2),
    ("even nasty", 2, {"schedule": "zero_bubble"}, "single", 2),
    ("even nasty", 4, {"schedule": "1f1b", "pipeline": 2}, "zero1", 2),
    ("deep", 4, {"schedule": "zbv"}, "single", 8),
    ("deep", 2, {"schedule": "1f1b"}, "single", 3),
    ("deep", 2, {"schedule": "interleaved"}, "single", 4),
    ("deep", 2, {"schedule": "zero_bubble"}, "single", 4),
    ("deep", 2, {"schedule": "zbv"}, "single", 4),
]
WAYS = [*((TENSOR, *way, 2) for way in TENSORS), *((PIPELINE, *way) for way in PIPES)]
QUICK, FAST = (WAYS[4],), (*WAYS[:3], *WAYS[4:8])


@pytest.mark.parametrize(
    ("name", "subject", "size", "options", "inner", "micro"),
    long_unless(lambda *way: way in QUICK, deep_unless(lambda *way: way in FAST, WAYS)),
)
def test_they_equal_one_process(
    name: str,
    subject: str,
    size: int,
    options: dict[str, Any],
    inner: str,
    micro: int,
    ranks: GetRanks,
) -> None:
    """A fused layer, tied embeddings, a vocabulary that nothing divides, a share without rows;
    frozen and unused parameters, counts that differ."""
    found = ranks(size).run(course, name, subject, options, inner, micro, deadline_s=60)
    expected = plain(subject, size // options.get("tensor", options.get("pipeline", size)), micro)
    said = [f if isinstance(f, str) else first_difference(f, expected) for f in found]
    assert said == [None] * size


def handed_on(world: World) -> Trajectory:
    """On a rank: a step of one twin, whose state the other loads and goes on with, and back."""
    result = Trajectory()
    before = None
    for step, name in enumerate((TENSOR, PIPELINE, TENSOR)):
        strategy = built(world, name, "deep", {}, "single")
        if before is not None:
            resuming.hand_over(world, before, strategy)
        result.take_step(strategy, [even(step, 0, m) for m in range(2)])
        before = strategy
    return result


@pytest.mark.long
def test_one_goes_on_with_what_the_other_has_made(ranks: GetRanks) -> None:
    assert first_difference(ranks(2).run(handed_on)[0], plain("deep", 1, 2)) is None


# ------------------------------------------------------------------ refused

REFUSED: dict[str, tuple[str, str, dict[str, Any], int]] = {
    "'blocks.0.up' (Linear) has 13 to cut": (TENSOR, "nasty", {}, 2),
    "'transformer.h.0.attn.c_attn' (Conv1D) is neither": (TENSOR, "their gpt2", {}, 2),
    "the micro-batches of a step differ in shape ([1, 6] and [2, 6])": (PIPELINE, "gpt2", {}, 2),
    "did you mean 'gpipe'?": (PIPELINE, "deep", {"schedule": "gpip"}, 2),
    "multiple of the number of rounds (2)": (PIPELINE, "deep", {"schedule": "interleaved"}, 5),
}


@pytest.mark.parametrize("words", REFUSED)
def test_refused_by_name(words: str, ranks: GetRanks) -> None:
    name, subject, options, micro = REFUSED[words]
    for found in ranks(2).run(course, name, subject, options, "single", micro):
        assert isinstance(found, str)
        assert words in found
