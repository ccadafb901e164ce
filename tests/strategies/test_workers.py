"""Workers that take steps of their own: planted bugs, data parallelism, and exact resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import saboteurs
import toys
from conformance import AS_ONE, WORKERS, Case, arrays, conform
from conftest import GetRanks
from resuming import batches
from shardlab import config as configs
from shardlab import naming
from shardlab.checkpoint import course
from shardlab.checkpoint import manifest as manifests
from shardlab.checkpoint.save import About, Checkpoints
from shardlab.checkpoint.start import Start
from shardlab.config import CheckpointConfig
from shardlab.errors import UsageError
from shardlab.guard import drift
from shardlab.naming import STRATEGIES
from shardlab.optim import factory
from shardlab.proof import judge
from shardlab.proof.prove import cases_of, small
from shardlab.proof.reference import rounded
from shardlab.strategies import lowbit
from shardlab.strategies.base import Rounds, Setup
from shardlab.strategies.diloco import DiLoCo
from shardlab.strategies.streaming_diloco import StreamingDiLoCo
from shardlab.strategies.update import Rule
from shardlab.world import World

CASES = [Case(toy, 2, "adamw") for toy in ("mlp", "tied_frozen", "buffers", "unused")]
PLANTED = {saboteur.__name__: saboteur for saboteur in saboteurs.WORKER_SABOTEURS}


# ------------------------------------------------------------------ planted bugs


@pytest.mark.parametrize("name", PLANTED)
def test_the_suite_catches(name: str, ranks: GetRanks) -> None:
    complaints = conform(ranks(2), PLANTED[name], CASES, {"every": 2})
    assert complaints, f"nobody noticed: {PLANTED[name].__doc__}"


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    # The stack has nothing tied; of those in few bits two are enough.
    [n for n in PLANTED if n not in ("TiedTwice", "SignLost", "HalvesSwapped", "RoundsDown")],
)
def test_a_proof_catches(name: str, ranks: GetRanks) -> None:
    config = configs.load(None, {"data.seq_len": 16, "training.steps": 3})
    (case,) = cases_of(small(config), [f"saboteurs:{name}"], [2])
    equal = judge.equal(ranks(2).run("judging:examine_equal", case.to_dict()))
    assert not equal["pass"]
    assert "\n" not in equal["message"]


@pytest.mark.parametrize(
    "options",
    [{}, {"delay": 0}, {"fragments": 1, "delay": 1, "mix": 0.0}]
    + [{"bits": bits, "delay": int(bits == 4)} for bits in (4, 8, 16)],
)
def test_streaming_in_other_ways(options: dict[str, Any], ranks: GetRanks) -> None:
    assert conform(ranks(2), "streaming_diloco", CASES, {"every": 2, **options}) == []


# ------------------------------------------------------------------ few bits


@pytest.mark.parametrize("bits", [4, 8, 16])
def test_a_message_holds_what_the_law_says(bits: int) -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(shape) * 10.0**-i for i, shape in enumerate([(3, 129), (), (7,), (0,)])]
    tensors += [torch.randn(300, dtype=torch.float64), torch.zeros(5), torch.randn(4).bfloat16()]
    tensors += [torch.randn(9, dtype=torch.complex64), torch.randn(6, 50).t()]
    message = lowbit.encode(tensors, bits)
    counts = [t.numel() * (2 if t.is_complex() else 1) for t in tensors]
    assert len(message) == sum(-(-n * bits // 8) + 4 * -(-n // 128) for n in counts)
    for tensor, found in zip(tensors, lowbit.decode(message, tensors, bits), strict=True):
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        wide = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
        assert torch.equal(found, rounded(wide, bits).to(tensor.dtype))
        if tensor.numel():
            most = (0.5 / lowbit.top(bits) + 0.005) * tensor.abs().max()
            assert (found - tensor).abs().max() <= 1.5 * most


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_not_hidden_in_few_bits(bad: float) -> None:
    tensor = torch.ones(300)
    tensor[200] = bad
    (found,) = lowbit.decode(lowbit.encode([tensor], 4), [tensor], 4)
    assert found[:128].eq(1).all()
    assert not found[128:256].isfinite().any()


def test_the_smallest_numbers_stay_small() -> None:
    """The scale of a block of denormal numbers may itself be rounded, or 0."""
    for size in (1e-45, 1e-44, 1e-40, 1e-300):
        tensor = torch.tensor([size, -size / 2, 0.0], dtype=torch.float64)
        (found,) = lowbit.decode(lowbit.encode([tensor], 8), [tensor], 8)
        assert found.isfinite().all()
        assert (found.abs() <= 2 * size).all()


# ------------------------------------------------------------------ data parallelism


def trained(world: World, name: str, options: dict[str, Any], toy: str) -> Any:
    """Three steps of plain SGD on ragged batches."""
    make = naming.resolve(name, STRATEGIES, "strategy")
    plain = factory.of_class(torch.optim.SGD, lr=0.1)
    strategy = make(Setup(toys.build(toy, world.rank), plain, toys.loss, world.mesh), **options)
    losses = []
    for step in range(3):
        losses.append(float(strategy.gradients([toys.batch(step, world.rank, m) for m in (0, 1)])))
        strategy.step()
    return losses, arrays(strategy.full_params())


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("name", WORKERS)
def test_a_round_of_one_step_of_sgd_is_data_parallelism(
    name: str, world: int, ranks: GetRanks
) -> None:
    options: dict[str, Any] = {"every": 1}
    if name != "local_sgd":
        options |= {"outer_lr": 1.0, "outer_momentum": 0.0}
    if name == "streaming_diloco":
        options |= {"fragments": 1, "delay": 0}
    for toy in ("tied_frozen", "buffers", "unused"):
        expected = ranks(world).run(trained, "simple_ddp_ga", {}, toy)
        for (losses, params), (want, wanted) in zip(
            ranks(world).run(trained, name, options, toy), expected, strict=True
        ):
            assert losses == pytest.approx(want, abs=1e-10)
            for key, value in wanted.items():
                np.testing.assert_allclose(params[key], value, atol=1e-10, err_msg=key)


# ------------------------------------------------------------------ checkpoints

ROUND, SAVED, STEPS = 3, 4, 8  # saved in the middle of the second round


class InFourBits(StreamingDiLoCo):
    """What `bits=4` makes of it."""

    def __init__(self, setup: Setup, *, every: int) -> None:
        super().__init__(setup, every=every, bits=4)


def make(world: World, kind: Any, seed: int) -> Any:
    rule = Rule(clip_norm=0.5, schedule=lambda step: 1 / (1 + step))
    optimizer = factory.of_class(torch.optim.AdamW, lr=0.05, weight_decay=0.1)
    model = toys.build("buffers", seed)
    return kind(Setup(model, optimizer, toys.loss, world.mesh, rule), every=ROUND)


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
    checkpoints.save(saved, course.own_state(strategy, world.device, None))
    anchor = arrays(strategy.anchor), arrays(strategy.momentum)
    return train(strategy, world, range(saved, STEPS)), arrays(strategy.full_params()), anchor


def resume(world: World, kind: Any, folder: str, saved: int) -> Any:
    strategy = make(world, kind, 100 + world.rank)
    path = Path(folder) / "checkpoints" / f"step-{saved:06d}"
    name = "streaming_diloco" if issubclass(kind, StreamingDiLoCo) else "diloco"
    start = Start(None, path, manifests.read(path))
    course.put_back(start, strategy, world, configs.load(None, {"strategy.name": name}))
    anchor = arrays(strategy.anchor), arrays(strategy.momentum)
    return train(strategy, world, range(saved, STEPS)), arrays(strategy.full_params()), anchor


def is_same(first: Any, second: Any) -> bool:
    losses, params, _ = first
    return losses == second[0] and all(np.array_equal(params[n], second[1][n]) for n in params)


class LosesAnchor(DiLoCo):
    """The resumed run takes the difference from where it resumed."""

    def load_shared_state(self, state: dict[str, Any]) -> None:
        super().load_shared_state({n: t for n, t in state.items() if not n.startswith("anchor/")})


class LosesMomentum(DiLoCo):
    def load_shared_state(self, state: dict[str, Any]) -> None:
        super().load_shared_state({n: t for n, t in state.items() if not n.startswith("momentum/")})


class LosesPlace(DiLoCo):
    """A new round begins with the resume."""

    def load_shared_state(self, state: dict[str, Any]) -> None:
        super().load_shared_state(state)
        self.since = 0


class LosesInnerSteps(DiLoCo):
    """AdamW corrects its bias as if it had just begun."""

    def load_own_state(self, state: dict[str, Any]) -> None:
        steps = {n: torch.ones_like(t) for n, t in state.items() if n.endswith("/step")}
        super().load_own_state(state | steps)


class LosesOwnParameters(DiLoCo):
    """Every worker continues from the average."""

    def load_own_state(self, state: dict[str, Any]) -> None:
        super().load_own_state({n: t for n, t in state.items() if not n.startswith("model/")})


class LosesCounts(DiLoCo):
    def load_own_state(self, state: dict[str, Any]) -> None:
        super().load_own_state(state)
        self.seen.zero_()


class LosesWhatIsUnderWay(InFourBits):
    def load_shared_state(self, state: dict[str, Any]) -> None:
        super().load_shared_state({n: t for n, t in state.items() if not n.startswith("sent/")})


FORGETFUL = [
    LosesAnchor, LosesMomentum, LosesPlace, LosesInnerSteps, LosesOwnParameters, LosesCounts,
    LosesWhatIsUnderWay,
]  # fmt: skip


@pytest.mark.parametrize("saved", [SAVED, 6])
@pytest.mark.parametrize("kind", [DiLoCo, StreamingDiLoCo, InFourBits])
def test_as_many_workers_continue_bit_for_bit(
    kind: Any, saved: int, ranks: GetRanks, tmp_path: Path
) -> None:
    whole = ranks(2).run(save, kind, str(tmp_path), saved, deadline_s=60)
    again = ranks(2).run(resume, kind, str(tmp_path), saved, deadline_s=60)
    assert all(is_same(*pair) for pair in zip(whole, again, strict=True))
    if saved == SAVED:
        forgetful = [k for k in FORGETFUL if k.__base__ is kind]
        for bug in forgetful:
            wrong = ranks(2).run(resume, bug, str(tmp_path), saved, deadline_s=60)
            assert not all(is_same(*p) for p in zip(whole, wrong, strict=True)), bug.__name__


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
        ({"every": 2, "bits": 2}, "bits must be 4, 8, 16 or 32, got 2"),
    ],
)
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Rounds(**options)


def test_a_parameter_is_in_one_fragment() -> None:
    model = toys.build("mlp", 0)
    params = dict(model.named_parameters())
    for fragments in (1, 2, 3, 9):
        cut = Rounds(9, fragments=fragments).cut(params)
        assert [name for names in cut for name in names] == list(params)
        assert len(cut) == fragments
    assert set(AS_ONE).isdisjoint(WORKERS)
