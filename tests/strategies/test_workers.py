"""Workers that take steps of their own: planted bugs, and exact resumes.

That rounds of one step of SGD are data parallelism is the zoo's claim.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import saboteurs
import toys
from conformance import AS_ONE, WORKERS, Case, arrays, build, conform
from conftest import GetRanks, long_unless
from resuming import batches
from shardlab import config as configs
from shardlab.checkpoint import manifest as manifests
from shardlab.checkpoint import rng
from shardlab.checkpoint.load import put_back
from shardlab.checkpoint.resume import Start
from shardlab.checkpoint.save import About, Checkpoints
from shardlab.config import CheckpointConfig
from shardlab.errors import UsageError
from shardlab.guard import drift
from shardlab.strategies.base import Rounds
from shardlab.strategies.local.diloco import DiLoCo
from shardlab.strategies.local.rounds import checked, cut
from shardlab.strategies.local.streaming_diloco import StreamingDiLoCo
from shardlab.strategies.local.workers import Workers
from shardlab.strategies.update import Rule
from shardlab.world import World

CASES = [Case(toy, 2, "adamw") for toy in ("mlp", "tied_frozen", "buffers", "unused")]
PLANTED = {
    name: kind
    for name, kind in vars(saboteurs).items()
    if isinstance(kind, type) and issubclass(kind, Workers) and kind.__module__ == "saboteurs"
}


# ------------------------------------------------------------------ planted bugs


@pytest.mark.long
@pytest.mark.parametrize("name", PLANTED)
def test_the_suite_catches(name: str, ranks: GetRanks) -> None:
    complaints = conform(ranks(2), PLANTED[name], CASES, {"every": 2})
    assert complaints, f"nobody noticed: {PLANTED[name].__doc__}"


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, {"delay": 0}, {"fragments": 1, "delay": 1, "mix": 0.0}])
def test_streaming_in_other_ways(options: dict[str, Any], ranks: GetRanks) -> None:
    assert conform(ranks(2), "streaming_diloco", CASES, {"every": 2, **options}) == []


# ------------------------------------------------------------------ checkpoints

ROUND, SAVED, STEPS = 3, 4, 8  # saved in the middle of the second round


def make(world: World, kind: Any, seed: int) -> Any:
    rule = Rule(clip_norm=0.5, schedule=lambda step: 1 / (1 + step))
    return build(kind, "buffers", world, seed, rule=rule, every=ROUND)


def train(strategy: Any, world: World, steps: range) -> list[float]:
    found = []
    for step in steps:
        found.append(float(strategy.gradients(batches(world, step, 2))))
        strategy.step()
    return found


def save(world: World, kind: Any, folder: str, saved: int) -> Any:
    strategy = make(world, kind, world.rank)
    train(strategy, world, range(saved))
    name = "diloco" if kind is DiLoCo else "streaming_diloco"
    about = About({}, name, None)
    checkpoints = Checkpoints(Path(folder), CheckpointConfig(every=1), world, strategy, about)
    checkpoints.save(saved, rng.get(world.device))
    anchor = arrays(strategy.anchor), arrays(strategy.momentum)
    return train(strategy, world, range(saved, STEPS)), arrays(strategy.full_tensors()), anchor


def resume(world: World, kind: Any, folder: str, saved: int, lost: str = "-") -> Any:
    strategy = make(world, kind, 100 + world.rank)
    load = strategy.load_extra_state
    strategy.load_extra_state = lambda shared, own: load(
        without(shared, lost), None if own is None else without(own, lost)
    )
    path = Path(folder) / "checkpoints" / f"step-{saved:06d}"
    name = "streaming_diloco" if kind is StreamingDiLoCo else "diloco"
    start = Start(None, path, manifests.read(path))
    put_back(start, strategy, world, configs.load(None, {"strategy.name": name}))
    anchor = arrays(strategy.anchor), arrays(strategy.momentum)
    return train(strategy, world, range(saved, STEPS)), arrays(strategy.full_tensors()), anchor


def is_same(first: Any, second: Any) -> bool:
    losses, params, _ = first
    return losses == second[0] and all(np.array_equal(params[n], second[1][n]) for n in params)


# What a resume may lose: what is saved under a name, or a number that begins again.
LOST = {
    DiLoCo: ("anchor/", "momentum/", "model/", "since the exchange", "/step"),
    StreamingDiLoCo: ("sent/",),
}


def without(state: dict[str, Any], lost: str) -> dict[str, Any]:
    kept = {name: value for name, value in state.items() if not name.startswith(lost)}
    return {n: torch.zeros_like(v) if n.endswith(lost) else v for n, v in kept.items()}


@pytest.mark.parametrize("saved", long_unless(lambda saved: saved == 6, [SAVED, 6]))
@pytest.mark.parametrize("kind", [DiLoCo, StreamingDiLoCo])
def test_as_many_workers_continue_bit_for_bit(
    kind: Any, saved: int, ranks: GetRanks, tmp_path: Path
) -> None:
    whole = ranks(2).run(save, kind, str(tmp_path), saved, deadline_s=60)
    again = ranks(2).run(resume, kind, str(tmp_path), saved, deadline_s=60)
    assert all(is_same(*pair) for pair in zip(whole, again, strict=True))
    if saved == SAVED:
        for lost in LOST[kind]:
            wrong = ranks(2).run(resume, kind, str(tmp_path), saved, lost, deadline_s=60)
            assert not all(is_same(*p) for p in zip(whole, wrong, strict=True)), lost


@pytest.mark.long
@pytest.mark.parametrize("saved", [SAVED, 6])
def test_another_number_of_workers_keeps_the_anchor(
    saved: int, ranks: GetRanks, tmp_path: Path
) -> None:
    (_, _, whole), _ = ranks(2).run(save, DiLoCo, str(tmp_path), saved, deadline_s=60)
    for losses, _, outer in ranks(3).run(resume, DiLoCo, str(tmp_path), saved, deadline_s=60):
        assert np.isfinite(losses).all()
        for was, now in zip(whole, outer, strict=True):
            assert all(np.array_equal(was[name], now[name]) for name in was)


# ------------------------------------------------------------------ guards and options


def drifts(world: World, every: int, what: str) -> None:
    strategy = make(world, DiLoCo, 0)
    train(strategy, world, range(every))
    if world.rank and what:
        next(iter(getattr(strategy, what).values())).data.add_(1e-9)
    drift.check(strategy, world, every)


def test_workers_may_differ_between_exchanges_and_not_after_one(ranks: GetRanks) -> None:
    ranks(2).run(drifts, 2, "params")
    for step, what in ((3, "params"), (2, "anchor"), (2, "momentum")):
        with pytest.raises(Exception, match="drifted apart"):
            ranks(2).run(drifts, step, what)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every must be 1 or more, got 0"),
        ({"every": 2, "outer_lr": 0.0}, "outer_lr must be above 0"),
        ({"every": 2, "outer_momentum": 1.0}, "from 0 to below 1"),
        ({"every": 2, "fragments": 3}, "fragments must be from 1 to every"),
        ({"every": 2, "delay": 2}, "delay must be from 0"),
        ({"every": 2, "mix": 0.5}, "mix must be 0 without a delay"),
    ],
)
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        checked(Rounds(**options))


def test_a_parameter_is_in_one_fragment() -> None:
    model = toys.build("mlp", 0)
    params = dict(model.named_parameters())
    for fragments in (1, 2, 3, 9):
        parts = cut(Rounds(9, fragments=fragments), params)
        assert [name for names in parts for name in names] == list(params)
        assert len(parts) == fragments
    assert set(AS_ONE).isdisjoint(WORKERS)
