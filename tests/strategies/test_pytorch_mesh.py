"""PyTorch's own tensor and pipeline parallelism against one process: equal, or refused by name."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

import meshed
from conformance import Trajectory, arrays, first_difference, make_optimizer
from conftest import GetRanks, long_unless
from shardlab import axes, naming
from shardlab.errors import UsageError
from shardlab.naming import EVERY_STRATEGY
from shardlab.strategies.base import Setup
from shardlab.strategies.on_mesh import OnMesh
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


def built(world: World, name: str, subject: str, options: dict[str, Any], inner: str) -> OnMesh:
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
    strategy: OnMesh = make(setup, found, naming.resolve(inner, EVERY_STRATEGY, "strategy"))
    return strategy


def course(
    world: World,
    name: str,
    subject: str,
    options: dict[str, Any],
    inner: str = "single",
    micro: int = 2,
) -> Trajectory | str:
    """On a rank: losses, gradients, parameters of some steps; or what it refuses."""
    try:
        strategy = built(world, name, subject, options, inner)
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


def plain(subject: str, shares: int, micro: int) -> Trajectory:
    with mock.patch.dict(meshed.SUBJECTS, SUBJECTS):
        return meshed.plain(subject, shares, micro)


# ------------------------------------------------------------------ equal to one process

WAYS = [  # subject, ranks, options, who shares the data
    ("gpt2", 2, {}, "single"),
    ("llama", 2, {}, "single"),
    ("gpt2", 4, {"tensor": 2}, "pytorch_zero3"),  # FSDP2 x TP
    ("gpt2", 4, {"tensor": 2}, "zero2"),
]


def is_first(subject: str, size: int, *_: Any) -> bool:
    return (subject, size) == ("gpt2", 2)


@pytest.mark.parametrize(("subject", "size", "options", "inner"), long_unless(is_first, WAYS))
def test_parallelize_module(
    subject: str, size: int, options: dict[str, Any], inner: str, ranks: GetRanks
) -> None:
    """A fused layer, tied embeddings, a vocabulary that nothing divides, a share without rows."""
    found = ranks(size).run(course, TENSOR, subject, options, inner, deadline_s=60)
    expected = plain(subject, size // options.get("tensor", size), 2)
    assert [f if isinstance(f, str) else first_difference(f, expected) for f in found] == [
        None
    ] * size


PIPES = [  # subject, schedule, ranks, micro-batches, options, who shares the data
    ("deep", "1f1b", 2, 3, {}, "single"),
    ("deep", "gpipe", 2, 2, {}, "single"),
    ("deep", "interleaved", 2, 4, {}, "single"),
    ("deep", "zero_bubble", 2, 4, {}, "single"),
    ("deep", "zbv", 2, 4, {}, "single"),
    ("even nasty", "zero_bubble", 2, 2, {}, "single"),
    ("deep", "zbv", 4, 8, {}, "single"),
    ("even nasty", "1f1b", 4, 2, {"pipeline": 2}, "zero1"),
]


@pytest.mark.parametrize(
    ("subject", "schedule", "size", "micro", "options", "inner"),
    long_unless(lambda _subject, schedule, *_: schedule == "gpipe", PIPES),
)
def test_pipelining(
    subject: str,
    schedule: str,
    size: int,
    micro: int,
    options: dict[str, Any],
    inner: str,
    ranks: GetRanks,
) -> None:
    """Tied embeddings, frozen and unused parameters, counts that differ."""
    options = {"schedule": schedule, **options}
    found = ranks(size).run(course, PIPELINE, subject, options, inner, micro, deadline_s=60)
    expected = plain(subject, size // options.get("pipeline", size), micro)
    assert [f if isinstance(f, str) else first_difference(f, expected) for f in found] == [
        None
    ] * size


def handed_on(world: World) -> Trajectory:
    """On a rank: a step of one twin, whose state the other loads and goes on with, and back."""
    result = Trajectory()
    state: dict[str, Any] | None = None
    for step, name in enumerate((TENSOR, PIPELINE, TENSOR)):
        strategy = built(world, name, "deep", {}, "single")
        if state is not None:
            strategy.load_state_dict(state)
        result.losses.append(float(strategy.gradients([even(step, 0, m) for m in range(2)])))
        result.grads.append(arrays(strategy.full_grads()))
        strategy.step()
        result.params.append(arrays(strategy.full_params()))
        state = strategy.state_dict()
    return result


@pytest.mark.long
def test_one_goes_on_with_what_the_other_has_made(ranks: GetRanks) -> None:
    assert first_difference(ranks(2).run(handed_on)[0], plain("deep", 1, 2)) is None


# ------------------------------------------------------------------ refused

REFUSED: dict[str, tuple[str, str, dict[str, Any], int]] = {
    "'blocks.0.up' (Linear) has 13 to cut": (TENSOR, "nasty", {}, 2),
    "'transformer.h.0.attn.c_attn' (Conv1D) is neither": (TENSOR, "their gpt2", {}, 2),
    "no axes but tensor and data": (TENSOR, "gpt2", {"sequence": True}, 2),
    "no axes but pipeline and data": (PIPELINE, "deep", {"tensor": 2, "pipeline": 1}, 2),
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
