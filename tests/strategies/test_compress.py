"""Compressed gradients: what is sent, what is lost, and what is only late."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import toys
from conformance import Arrays, arrays
from conftest import GetRanks
from shardlab import comm, naming
from shardlab import config as configs
from shardlab.errors import UsageError
from shardlab.naming import STRATEGIES
from shardlab.optim import factory
from shardlab.run import assemble, loop
from shardlab.strategies.base import Setup
from shardlab.strategies.compress import Compressor, Half
from shardlab.strategies.powersgd import PowerSGD
from shardlab.strategies.update import Rule
from shardlab.workloads.base import Batch
from shardlab.world import World

OURS = [
    "simple_ddp",
    "simple_ddp_ga",
    "simple_ddp_hook",
    "simple_ddp_async",
    "bucket_ddp_async",
]
SHAPES = {"matrix": (12, 9), "conv": (8, 3, 3, 3), "vector": (7,), "thin": (20, 2), "scalar": ()}
STEPS = 6
WITHOUT_GPU = pytest.mark.skipif(
    torch.cuda.is_available(), reason="PyTorch's PowerSGD hook refuses CPU ranks beside a GPU"
)


def gradients(step: int, rank: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in SHAPES.items()
    }


def true_sums(ranks: int, step: int) -> dict[str, np.ndarray]:
    each = [gradients(step, rank) for rank in range(ranks)]
    return {name: sum(g[name] for g in each).numpy() for name in SHAPES}


# ------------------------------------------------------------------ the compressors themselves


def reduce_by(
    world: World, make: Callable[[], Compressor], how: str
) -> tuple[list[Arrays], Arrays, list[tuple[str, int]]]:
    """What each step's gradients became, what PowerSGD has not sent, and the ledger."""
    compressor, results = make(), []
    comm.LEDGER.reset()
    for step in range(STEPS):
        grads = gradients(step, world.rank)
        if how == "bucket":
            flat = torch.cat([g.flatten() for g in grads.values()])
            views = flat.split([g.numel() for g in grads.values()])
            grads = {n: v.view(SHAPES[n]) for n, v in zip(grads, views, strict=True)}
            pending = compressor.all_reduce_bucket(
                grads, flat, world.group, label="bucket 0", async_op=True
            )
            pending.wait()
            pending.wait()  # once is enough, twice must do no harm
        else:
            under_way = [
                compressor.all_reduce(n, g, world.group, label=f"grad {n}", async_op=how == "async")
                for n, g in grads.items()
            ]
            if how == "async":
                for pending in under_way:
                    pending.wait()
        results.append(arrays(dict(grads)))
    unsent = arrays(dict(compressor.unsent)) if isinstance(compressor, PowerSGD) else {}
    return results, unsent, [(r["label"], r["bytes"]) for r in comm.LEDGER.take()]


MAKERS: dict[str, Callable[[], Compressor]] = {
    "none": Compressor,
    "fp16": functools.partial(Half, torch.float16),
    "bf16": functools.partial(Half, torch.bfloat16),
    "powersgd": functools.partial(PowerSGD, 2),
}


@pytest.mark.parametrize("world", [1, 2, 3])
def test_none_is_the_sum(world: int, ranks: GetRanks) -> None:
    for results, _, _ in ranks(world).run(reduce_by, Compressor, "sync"):
        for step in range(STEPS):
            for name, total in true_sums(world, step).items():
                np.testing.assert_allclose(results[step][name], total, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_half_is_within_rounding(world: int, dtype: torch.dtype, ranks: GetRanks) -> None:
    """Every addend is rounded once and every partial sum once: half a unit in the last place."""
    unit = torch.finfo(dtype).eps / 2
    for results, _, _ in ranks(world).run(reduce_by, functools.partial(Half, dtype), "sync"):
        for step in range(STEPS):
            size = sum(gradients(step, r)["matrix"].abs() for r in range(world))
            error = np.abs(results[step]["matrix"] - true_sums(world, step)["matrix"])
            assert (error <= world * unit * size.numpy() * 1.01).all()
            assert error.any()


@pytest.mark.parametrize("how", ["sync", "async", "bucket"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_powersgd_loses_nothing(world: int, how: str, ranks: GetRanks) -> None:
    """All that was sent, and all ranks' unsent, add up to all gradients there were."""
    by_rank = ranks(world).run(reduce_by, MAKERS["powersgd"], how)
    for name in ("matrix", "conv"):
        sent = sum(step[name] for step in by_rank[0][0])
        unsent = sum(unsent[name] for _, unsent, _ in by_rank)
        true = sum(true_sums(world, step)[name] for step in range(STEPS))
        assert np.abs(unsent).max() > 0.1
        error = sent.reshape(unsent.shape) + unsent - true.reshape(unsent.shape)
        assert np.abs(error).max() < 1e-12
        for step in range(STEPS):
            matrix = by_rank[0][0][step][name].reshape(len(true), -1)
            assert np.linalg.matrix_rank(matrix, tol=1e-9) == 2
    for step in range(STEPS):
        for name in ("vector", "thin", "scalar"):  # would not shrink
            np.testing.assert_allclose(
                by_rank[0][0][step][name], true_sums(world, step)[name], rtol=0, atol=1e-12
            )


@pytest.mark.parametrize("how", ["sync", "async", "bucket"])
@pytest.mark.parametrize("name", MAKERS)
def test_ranks_agree_bitwise(name: str, how: str, ranks: GetRanks) -> None:
    first, second = ranks(2).run(reduce_by, MAKERS[name], how)
    for mine, theirs in zip(first[0], second[0], strict=True):
        assert all(np.array_equal(mine[n], theirs[n]) for n in SHAPES)
    assert first[2] == second[2]


def test_the_ledger_shrinks(ranks: GetRanks) -> None:
    sizes = {name: int(np.prod(shape)) for name, shape in SHAPES.items()}

    def per_step(name: str, how: str = "sync") -> dict[str, int]:
        rows = ranks(2).run(reduce_by, MAKERS[name], how)[0][2]
        assert len(rows) % STEPS == 0
        return dict(rows[: len(rows) // STEPS])

    assert per_step("none") == {f"grad {n}": 8 * size for n, size in sizes.items()}
    for half in ("fp16", "bf16"):
        assert per_step(half) == {f"grad {n}": 2 * size for n, size in sizes.items()}
    low = {"matrix P": 12 * 2, "matrix Q": 9 * 2, "conv P": 8 * 2, "conv Q": 27 * 2}
    rest = {n: sizes[n] for n in ("vector", "thin", "scalar")}
    assert per_step("powersgd") == {f"grad {n}": 8 * s for n, s in (low | rest).items()}
    first = low["matrix P"] + low["conv P"] + sum(rest.values())
    second = low["matrix Q"] + low["conv Q"]
    assert per_step("powersgd", "bucket") == {"bucket 0 P": 8 * first, "bucket 0 Q": 8 * second}


def reduce_low_rank(world: World, rank: int) -> float:
    """Gradients that have a rank of 2: the largest error of their sum."""
    compressor, worst = PowerSGD(rank), 0.0
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        columns = torch.randn(12, 2, generator=generator, dtype=torch.float64)
        rows = torch.randn(world.size, 2, 9, generator=generator, dtype=torch.float64)
        gradient = columns @ rows[world.rank]
        compressor.all_reduce("matrix", gradient, world.group, label="grad")
        worst = max(worst, float((gradient - columns @ rows.sum(0)).abs().max()))
    return worst


def test_enough_rank_is_exact(ranks: GetRanks) -> None:
    for rank in (2, 3, 4):
        assert max(ranks(2).run(reduce_low_rank, rank)) < 1e-12
    assert min(ranks(2).run(reduce_low_rank, 1)) > 0.1
    assert max(ranks(2).run(reduce_low_rank, 9)) < 1e-12  # whole: travels as it is


def reduce_after_nothing(world: World) -> list[float]:
    """Steps without any gradient, then always the same one, in the last rows and columns."""
    compressor, norms = PowerSGD(1), []
    for step in range(12):
        gradient = torch.zeros(8, 8)
        if step >= 2:
            gradient[5:, 5:] = torch.eye(3)
        compressor.all_reduce("matrix", gradient, world.group, label="grad")
        norms.append(float(gradient.norm()))
    return [*norms, float(compressor.unsent["matrix"].norm())]


def test_zeros_do_not_end_it(ranks: GetRanks) -> None:
    """P of a zero gradient has no direction; a division by its length would be NaN ever after."""
    *norms, unsent = ranks(2).run(reduce_after_nothing)[0]
    assert norms[:2] == [0, 0]
    assert all(norm > 0.5 for norm in norms[2:])
    assert unsent < 12


# ------------------------------------------------------------------ under a strategy


def build(
    name: str, model: torch.nn.Module, world: World, rule: Rule = Rule(), **options: Any
) -> Any:
    make = naming.resolve(name, STRATEGIES, "strategy")
    sgd = factory.of_class(torch.optim.SGD, lr=0.1)
    return make(Setup(model, sgd, toys.loss, world.mesh, rule), **options)


def train_toy(
    world: World, name: str, toy: str, rule: Rule, options: dict[str, Any]
) -> tuple[Arrays, Arrays, dict[str, Any]]:
    """Gradients of the last step, and parameters and update's state after it."""
    strategy = build(name, toys.build(toy, world.rank), world, rule, **options)
    for step in range(STEPS):
        strategy.gradients([toys.batch(step, world.rank, m) for m in range(2)])
        grads = arrays(strategy.full_grads())
        strategy.step()
    return grads, arrays(strategy.full_params()), strategy.state_dict()["update"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "compress"),
    [
        *itertools.product(OURS, ("fp16", "bf16", "powersgd")),
        ("pytorch_ddp", "fp16"),  # bf16 is for NCCL only: its refusal is tested below
        pytest.param("pytorch_ddp", "powersgd", marks=WITHOUT_GPU),
    ],
)
def test_replicas_stay_equal(name: str, compress: str, ranks: GetRanks) -> None:
    """Bit for bit; near what exact gradients come to; and what nobody uses stays without."""
    options: dict[str, Any] = {"compress": compress}
    exact: dict[str, Any] = {}
    if compress == "powersgd":
        options["powersgd_rank"] = 1
    if name == "pytorch_ddp":
        options["find_unused_parameters"] = exact["find_unused_parameters"] = True
    for world in (2, 3):
        for toy in ("mlp", "unused"):
            runs = ranks(world).run(train_toy, name, toy, Rule(), options)
            _, expected, _ = ranks(world).run(train_toy, name, toy, Rule(), exact)[0]
            grads, params, _ = runs[0]
            for _, others, _ in runs[1:]:
                assert all(np.array_equal(params[n], others[n]) for n in params)
            assert [n for n, g in grads.items() if g is None] == (
                ["never.weight", "never.bias"] if toy == "unused" else []
            )
            off = max(np.abs(params[n] - expected[n]).max() for n in params)
            assert 0 < off < (0.5 if compress == "powersgd" else 0.01)


def test_fp16_is_its_twins(ranks: GetRanks) -> None:
    """PyTorch's hook halves what was doubled: that rounds nothing but fp16's smallest numbers."""
    options = {"compress": "fp16"}
    ours, mine, _ = ranks(2).run(train_toy, "simple_ddp_ga", "mlp", Rule(), options)[0]
    theirs, their, _ = ranks(2).run(train_toy, "pytorch_ddp", "mlp", Rule(), options)[0]
    for name in ours:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=0, atol=6e-8)
    for name in mine:
        np.testing.assert_allclose(mine[name], their[name], rtol=0, atol=6e-8)


def test_an_overflow_of_fp16_skips_the_step(ranks: GetRanks) -> None:
    """What a scaled loss makes infinite on the way is infinite on all ranks."""
    rule = Rule(loss_scale=2.0**20)
    runs = ranks(2).run(train_toy, "simple_ddp_ga", "mlp", rule, {"compress": "fp16"})
    state = runs[0][2]
    assert 0 < state["steps"] < STEPS
    assert state["scale"] == 2.0 ** (20 - (STEPS - state["steps"]))
    assert runs[0][2] == runs[1][2]
    for name, p in runs[0][1].items():
        assert np.isfinite(p).all()
        assert np.array_equal(p, runs[1][1][name])


def train_with_nan(world: World, name: str, bad: int | None, rank: int, at: str) -> Arrays:
    """Parameters after STEPS steps; step ``bad`` is NaN in one rank's data, or is left out."""
    rule = Rule(on_nonfinite="skip")
    options = {"compress": "powersgd", "powersgd_rank": 1}
    strategy = build(name, toys.build("mlp", 0), world, rule, **options)
    for step in range(STEPS):
        if step == bad and at == "left out":
            continue
        batches = [toys.batch(step, world.rank, m) for m in range(2)]
        if step == bad and world.rank == rank:
            batches[1].inputs[0, 0] = float(at)
        strategy.gradients(batches)
        strategy.step()
    return arrays(strategy.full_params())


@pytest.mark.parametrize("name", [*OURS, pytest.param("pytorch_ddp", marks=WITHOUT_GPU)])
@pytest.mark.parametrize("at", ["nan", "inf"])
def test_a_skipped_step_leaves_no_trace_in_powersgd(name: str, at: str, ranks: GetRanks) -> None:
    """Error feedback would keep a NaN for ever. The run goes on as if the step had not been."""
    draw = random.Random()
    bad, rank = draw.randrange(3, STEPS - 1), draw.randrange(2)
    skipped = ranks(2).run(train_with_nan, name, bad, rank, at)
    plain = ranks(2).run(train_with_nan, name, bad, rank, "left out")
    for ours, expected in zip(skipped, plain, strict=True):
        for parameter, value in expected.items():
            assert np.isfinite(value).all()
            assert np.array_equal(ours[parameter], value), (bad, rank, parameter)


def several_buckets(world: World) -> Arrays:
    config = configs.load(
        None,
        {
            "model.size": "tiny", "model.options.layers": 6, "training.steps": 15,
            "strategy.name": "pytorch_ddp",
            "strategy.options": {"compress": "powersgd", "bucket_mb": 0.1},
        },
    )  # fmt: skip
    workload = assemble.build_workload(config)
    strategy = assemble.build_strategy(config, workload, world)
    for microbatches in loop.Batches(workload, config, world):
        strategy.gradients(microbatches)
        strategy.step()
    return arrays(strategy.full_params())


@pytest.mark.long
@WITHOUT_GPU
def test_pytorchs_powersgd_does_not_mix_up_its_buckets(ranks: GetRanks) -> None:
    """On Gloo it does, left to itself: wrong pairs of all-reduces, an abort or a hang."""
    first, second = ranks(2).run(several_buckets, deadline_s=60)
    assert all(np.array_equal(first[n], second[n]) for n in first)


# ------------------------------------------------------------------ error feedback


class Forgets(PowerSGD):
    """A planted bug: what was not sent is dropped."""

    def launch(self, parts: Any, flat: Tensor, group: Any, label: str) -> Any:
        for unsent in self.unsent.values():
            unsent.zero_()
        return super().launch(parts, flat, group, label)


def regress(world: World, make: Callable[[], Compressor]) -> float:
    """The last loss of a linear map that is learned from samples of 16 equal directions."""
    torch.manual_seed(0)
    truth = torch.randn(16, 16, dtype=torch.float64)
    model = torch.nn.Linear(16, 16, bias=False).double()
    strategy = build("simple_ddp", model, world)
    strategy.loss_fn = lambda m, b: (m(b.inputs) - b.targets).square().sum()
    strategy.compressor = make()
    for step in range(150):
        generator = torch.Generator().manual_seed(10 * step + world.rank)
        x = torch.randn(8, 16, generator=generator, dtype=torch.float64)
        loss = strategy.gradients([Batch(x, x @ truth.T, 8 * 16, 8)])
        strategy.step()
    return float(loss)


@pytest.mark.long
def test_what_error_feedback_is_for(ranks: GetRanks) -> None:
    exact, low, forgets = (
        ranks(2).run(regress, make)[0]
        for make in (Compressor, functools.partial(PowerSGD, 1), functools.partial(Forgets, 1))
    )
    assert low < 2 * exact
    assert forgets > 5 * low, f"nobody noticed: {Forgets.__doc__}"


# ------------------------------------------------------------------ refusals


def just_build(world: World, name: str, toy: str, rule: Rule, options: dict[str, Any]) -> None:
    build(name, toys.build(toy, 0), world, rule, **options)


POWER = {"compress": "powersgd"}


@pytest.mark.parametrize(
    ("name", "toy", "rule", "options", "message"),
    [
        (
            "simple_ddp",
            "mlp",
            Rule(),
            {"compress": "pf16"},
            "unknown compress 'pf16'; did you mean",
        ),
        ("simple_ddp", "mlp", Rule(), {"compress": "fp16", "powersgd_rank": 2}, "is for compress"),
        ("simple_ddp", "mlp", Rule(), {**POWER, "powersgd_rank": 0}, "must be at least 1, got 0"),
        ("simple_ddp", "mlp", Rule(loss_scale=8.0), POWER, "one overflow of fp16 would stay"),
        ("pytorch_ddp", "mlp", Rule(loss_scale=8.0), POWER, "one overflow of fp16 would stay"),
        ("pytorch_ddp", "mlp", Rule(), {"compress": "bf16"}, "needs the nccl backend, and this is"),
        ("pytorch_ddp", "scalar", Rule(), POWER, "which has no dimensions"),
    ],
)
def test_refuses(
    name: str, toy: str, rule: Rule, options: dict[str, Any], message: str, ranks: GetRanks
) -> None:
    with pytest.raises(UsageError) as caught:
        ranks(1).run(just_build, name, toy, rule, options)
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def build_beside_a_gpu(world: World) -> None:
    torch.cuda.is_available = lambda: True
    just_build(world, "pytorch_ddp", "mlp", Rule(), POWER)


def test_pytorchs_powersgd_on_a_cpu_beside_a_gpu_is_refused(ranks: GetRanks) -> None:
    """Its hook synchronises "the" GPU whenever there is one, and raises for a CPU's bucket."""
    with pytest.raises(UsageError, match="fails for ranks on the CPU where there is a GPU"):
        ranks(1).run(build_beside_a_gpu)


def test_single_has_nothing_to_compress() -> None:
    config = configs.load(None, {"strategy.name": "single", "strategy.options.compress": "fp16"})
    with pytest.raises(UsageError, match="unknown option of strategy single 'compress'"):
        assemble.resolve_strategy(config)
