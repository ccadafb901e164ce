"""What every strategy takes: clipping, schedule, precision, checkpointing, compile."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import conformance
import planted
import resuming
import toys
from conformance import AS_ONE, Arrays, arrays, by_config
from conftest import GetRanks, deep_unless, long_unless
from shardlab import config as configs
from shardlab.config import Config, PrecisionConfig
from shardlab.errors import UsageError
from shardlab.ledger import LEDGER
from shardlab.optim import optimizers
from shardlab.optim.schedule import SCHEDULES, learning_rate_factor
from shardlab.strategies.update import Rule, Update
from shardlab.strategies.update_state import state_of
from shardlab.training import builders
from shardlab.workloads.base import Batch, Workload
from shardlab.world import World

STEPS = 4
RATE = 0.1
COSINE = functools.partial(learning_rate_factor, total=STEPS, warmup=2, kind="cosine", floor=0.1)
PARALLEL = [name for name in AS_ONE if name != "single"]
QUICK = ("bucket_ddp_async", "zero3")
# One of each way to hold parameters, gradients and optimizer state.
MECHANISMS = (*QUICK, "simple_ddp", "zero1", "zero2", "pytorch_ddp", "pytorch_zero3")


SGD = optimizers.of_class(torch.optim.SGD, lr=RATE)


def build(name: str, toy: str, world: World, rule: Rule, optimizer: Any = SGD, **more: Any) -> Any:
    """SGD: an error in the gradient's size shows, where Adam would hide it."""
    if name == "pytorch_hsdp" and world.size % 2:
        more["shards"] = world.size  # groups of two cannot be formed
    return conformance.build(name, toy, world, optimizer=optimizer, rule=rule, **more)


def after(strategy: Any, world: World, steps: range, micro: int = 2) -> Arrays:
    """The tensors after some steps."""
    for step in steps:
        strategy.gradients([toys.batch(step, world.rank, m) for m in range(micro)])
        strategy.step()
    return arrays(strategy.full_tensors())


def close(actual: Arrays, expected: Arrays, tolerance: float) -> None:
    assert actual.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(
            actual[name], expected[name], rtol=0, atol=tolerance, err_msg=name
        )


# ------------------------------------------------------------------ clipping, schedule, loss scale

TOYS = ("mlp", "tied_frozen", "odd")
CLIP = 0.4


def train_toys(world: World, name: str, scale: float | None) -> list[tuple[Arrays, Arrays]]:
    """Of each toy the first gradients, and the tensors in the end."""
    results = []
    for toy in TOYS:
        rule = Rule(clip_norm=CLIP, schedule=COSINE, loss_scale=scale)
        strategy = build(name, toy, world, rule)
        strategy.gradients([toys.batch(0, world.rank, m) for m in range(2)])
        shown = arrays(strategy.full_grads())
        strategy.step()
        results.append((shown, after(strategy, world, range(1, STEPS))))
    return results


def plain_process(toy: str, world: int) -> tuple[Arrays, list[float]]:
    """PyTorch's own clipping and schedulers in one process; the norms before clipping too."""
    model = toys.build(toy, seed=0)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1 / 3, total_iters=2)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS - 2, eta_min=0.1 * RATE)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], [2])
    norms = []
    for step in range(STEPS):
        share = [toys.batch(step, r, m) for r in range(world) for m in range(2)]
        count = sum(b.count for b in share)
        for b in share:
            (toys.loss(model, b) / count).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return arrays(dict(model.named_parameters())), norms


# At four ranks pytorch_hsdp has two copies of the shards: their squares count once.
SIZES = [("single", 1), *itertools.product(PARALLEL, (2, 3)), ("pytorch_hsdp", 4)]
FAST_SIZES = deep_unless(lambda name, world: world != 3 or name in MECHANISMS, SIZES)


@pytest.mark.parametrize(
    ("name", "world"), long_unless(lambda name, n: n == 2 and "pytorch" not in name, FAST_SIZES)
)
def test_clipping_and_schedule_are_pytorchs_own(name: str, world: int, ranks: GetRanks) -> None:
    """The norm is that of the whole gradient, however it is sharded. Nothing overflows in float64,
    and then scaling the loss by a power of two is nothing, to the last bit."""
    expected = [plain_process(toy, world) for toy in TOYS]
    clipped = [norm > CLIP for _, norms in expected for norm in norms]
    assert any(clipped)
    assert not all(clipped)
    plain = ranks(world).run(train_toys, name, None)
    scaled = ranks(world).run(train_toys, name, 2.0**16)[0]
    for results in plain:
        for (_, got), (want, _) in zip(results, expected, strict=True):
            close(got, want, 1e-12)
    for got, want in zip(scaled, plain[0], strict=True):
        for ours, theirs in zip(got, want, strict=True):
            close(ours, theirs, 0)


RUNS = st.integers(1, 500).flatmap(lambda total: st.tuples(st.just(total), st.integers(0, total)))
FLOORS = st.floats(0, 1)


@given(run=RUNS, kind=st.sampled_from(SCHEDULES), floor=FLOORS)
def test_the_rate_rises_then_falls(run: tuple[int, int], kind: str, floor: float) -> None:
    total, warmup = run
    factors = [learning_rate_factor(s, total, warmup, kind, floor) for s in range(total + 2)]
    rise, fall = factors[:warmup], factors[warmup:]
    assert all(0 < f <= 1 for f in factors[:total])
    assert rise == sorted(rise)
    assert fall == sorted(fall, reverse=True)
    assert all(f < 1 for f in rise)
    assert warmup == total or fall[0] == pytest.approx(1.0)
    assert factors[-1] == (1.0 if kind == "constant" else floor)


def test_a_schedule_reaches_the_optimizer(ranks: GetRanks) -> None:
    """From the config's keys to what the optimizer steps with."""
    overrides = {
        "training.schedule": "cosine", "training.warmup_steps": 1, "training.min_rate": 0.5,
        "training.learning_rate": 2.0, "training.optimizer": "sgd", "training.steps": 4,
    }  # fmt: skip
    (rates,) = ranks(1).run(rates_of_a_run, overrides)
    half = 0.5 + 0.5 * (1 + math.cos(math.pi / 3)) / 2, 0.5 + 0.5 * (1 - math.cos(math.pi / 3)) / 2
    assert rates == pytest.approx([1.0, 2.0, 2 * half[0], 2 * half[1]])


def test_memory_is_weighed_whatever_the_warm_up(ranks: GetRanks) -> None:
    """Three steps are enough for that, and would be too few for this warm-up."""
    overrides = {"model.size": "tiny", "training.warmup_steps": 5, "launch.world": 1}
    config = configs.load(None, {**overrides, "strategy.name": "single"})
    assert ranks(1).run("shardlab.measure.compare:weigh_cell", config)[0]


def rates_of_a_run(world: World, overrides: dict[str, Any]) -> list[float]:
    return [s.optimizer.param_groups[0]["lr"] for s, _ in by_config(world, overrides)]


# ------------------------------------------------------------------ messages in 16 bits


def by_messages_in(world: World, name: str, comm_dtype: str) -> tuple[Arrays, int]:
    """Parameters after some steps, and the bytes of the gradients of the last one."""
    strategy = build(name, "mlp", world, Rule(clip_norm=CLIP), comm_dtype=comm_dtype)
    after(strategy, world, range(STEPS - 1))
    LEDGER.reset()
    params = after(strategy, world, range(STEPS - 1, STEPS))
    rows = LEDGER.take()
    sent = [row["bytes"] for row in rows if row["label"].startswith(("bucket ", "grad "))]
    return params, sum(sent)


@pytest.mark.parametrize("world", long_unless(lambda world: world == 2, [2, 3]))
@pytest.mark.parametrize("name", ["bucket_ddp_async", "zero1", "zero2"])
def test_gradients_in_16_bits(name: str, world: int, ranks: GetRanks) -> None:
    """Replicas stay equal bit for bit, near what exact gradients come to, at a quarter of the
    bytes of float64."""
    runs = ranks(world).run(by_messages_in, name, "bf16")
    exact, bytes_exact = ranks(world).run(by_messages_in, name, "fp32")[0]
    for params, sent in runs:
        assert all(np.array_equal(params[n], runs[0][0][n]) for n in exact)
        assert 0 < sent == bytes_exact // 4
    assert 0 < max(np.abs(runs[0][0][n] - exact[n]).max() for n in exact) < 0.01


def build_complex(world: World, name: str) -> None:
    build(name, "mlp", world, Rule(), dtype=torch.complex64, comm_dtype="bf16")


@pytest.mark.parametrize("name", ["bucket_ddp_async", "zero1", "zero2", "zero3"])
def test_complex_parameters_do_not_travel_in_16_bits(name: str, ranks: GetRanks) -> None:
    """Their imaginary parts would be lost without a word."""
    with pytest.raises(UsageError, match=f"{name}'s comm_dtype bf16: '.*' is complex"):
        ranks(1).run(build_complex, name)


# ------------------------------------------------------------------ loss scaling


def overflow_on_rank_1(world: World, name: str) -> list[tuple[dict[str, Any], Arrays]]:
    """In step 1, rank 1's inputs are larger than any fp16. State and parameters of each step."""
    rule = Rule(loss_scale=2.0**16, clip_norm=1.0)
    loss = builders.in_precision(toys.loss, "fp16")
    strategy = build(name, "mlp", world, rule, dtype=torch.float32, loss=loss)
    history = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(10 * step + world.rank)
        x = torch.randn(4, 6, generator=generator)
        if (step, world.rank) == (1, 1):
            x *= 1e9
        strategy.gradients([Batch(x, torch.arange(4) % 3, 4, 4)])
        strategy.step()
        history.append((state_of(strategy.update), arrays(strategy.full_tensors())))
    return history


@pytest.mark.parametrize("name", long_unless(lambda name: name in QUICK, PARALLEL))
def test_one_ranks_overflow_skips_the_step_on_all(name: str, ranks: GetRanks) -> None:
    first, second = ranks(2).run(overflow_on_rank_1, name)
    assert [state["steps"] for state, _ in first] == [1, 1, 2, 3]
    assert [state["scale"] for state, _ in first] == [2.0**16] + [2.0**15] * 3
    assert [state for state, _ in first] == [state for state, _ in second]
    params = [p for _, p in first]
    for mine, theirs in zip(params, (p for _, p in second), strict=True):
        assert all(np.array_equal(mine[n], theirs[n]) for n in mine)
        assert all(np.isfinite(p).all() for p in mine.values() if p is not None)
    moved = [any((a[n] != b[n]).any() for n in a) for a, b in itertools.pairwise(params)]
    assert moved == [False, True, True]


def one_parameter(rule: Rule) -> tuple[torch.Tensor, Update]:
    p = torch.zeros(2, requires_grad=True)
    return p, Update(torch.optim.SGD([p], lr=1.0), rule)


def test_the_scale_falls_and_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Update, "GROW_AFTER", 3)
    p, update = one_parameter(Rule(loss_scale=8.0))
    scales, taken = [], []
    for bad in (False, True, False, False, True, False, False, False, False):
        p.grad = torch.full((2,), math.inf if bad else update.scale)  # an unscaled gradient of 1
        taken.append(update([p.grad]))
        scales.append(update.scale)
    assert taken == [True, False, True, True, False, True, True, True, True]
    assert scales == [8, 4, 4, 4, 2, 2, 2, 4, 4]
    assert p.tolist() == [-7.0, -7.0]
    assert update.steps == 7


def test_no_gradient_at_all_is_no_obstacle() -> None:
    """As in one process, where the optimizer skips every parameter."""
    _, update = one_parameter(Rule(clip_norm=1.0, loss_scale=8.0))
    assert update([])


def hand_over(world: World, first: str, second: str) -> tuple[dict[str, Any], Arrays, Arrays]:
    """Four steps of a schedule under one strategy, beside two and two under two."""
    rule = Rule(loss_scale=2.0**16, schedule=COSINE)
    config = Config(precision=PrecisionConfig(compute="fp16"))  # others begin with a scale of 1
    whole, part, rest = (
        build(name, "buffers", world, rule, "adamw", seed=seed)
        for name, seed in ((first, 0), (first, 0), (second, 99))
    )
    after(part, world, range(2))
    resuming.hand_over(world, part, rest, config)
    ends = after(whole, world, range(STEPS)), after(rest, world, range(2, STEPS))
    return state_of(rest.update), *ends


# Each to its neighbour, both ways round: together every strategy's state has gone everywhere.
PAIRS = list(itertools.pairwise([*PARALLEL, PARALLEL[0]]))
BACK = deep_unless(lambda *_: False, [pair[::-1] for pair in PAIRS])


@pytest.mark.parametrize(
    ("giver", "taker"), long_unless(lambda *pair: "pytorch" not in str(pair), [*PAIRS, *BACK])
)
def test_the_state_goes_on_elsewhere(giver: str, taker: str, ranks: GetRanks) -> None:
    """The model, what the optimizer keeps, the place in the schedule and the loss scale."""
    for state, whole, rest in ranks(2).run(hand_over, giver, taker):
        assert state == {"steps": 4, "scale": 2.0**16, "good_steps": 4}
        close(rest, whole, 1e-12)


# ------------------------------------------------------------------ precision


def losses(world: World, overrides: dict[str, Any]) -> list[float]:
    return [loss for _, loss in by_config(world, {"training.steps": 4, **overrides})]


FAST = (
    ("bucket_ddp_async", "bf16"), ("zero2", "fp16"), ("zero3", "bf16"), ("pytorch_ddp", "fp16"),
    ("pytorch_zero1", "bf16"), ("pytorch_zero3", "fp16"),
)  # fmt: skip
COMPUTED = deep_unless(lambda *case: case in FAST, itertools.product(PARALLEL, ("bf16", "fp16")))


@pytest.mark.long
@pytest.mark.parametrize(("name", "compute"), COMPUTED)
def test_mixed_precision_is_near_fp32_and_not_it(name: str, compute: str, ranks: GetRanks) -> None:
    exact = ranks(2).run(losses, {"strategy.name": name})[0]
    rounded = ranks(2).run(losses, {"strategy.name": name, "precision.compute": compute})[0]
    assert rounded != exact
    assert rounded == pytest.approx(exact, rel=1e-3)
    assert rounded[-1] < rounded[0] - 0.1


def small_gradients(world: World, scale: float) -> float:
    """The share of gradients that are exactly zero, of a loss that is very small."""
    loss = builders.in_precision(lambda m, b: toys.loss(m, b) * 1e-7, "fp16")
    rule = Rule(loss_scale=scale)
    strategy = build("simple_ddp", "mlp", world, rule, dtype=torch.float32, loss=loss)
    strategy.gradients([Batch(torch.ones(4, 6), torch.zeros(4, dtype=torch.long), 4, 4)])
    grads = torch.cat([g.flatten() for g in strategy.full_grads().values()])
    return float((grads == 0).float().mean())


def test_why_fp16_is_scaled(ranks: GetRanks) -> None:
    assert ranks(1).run(small_gradients, 1.0)[0] > 0.5
    assert ranks(1).run(small_gradients, 2.0**16)[0] == 0


# ------------------------------------------------------------------ checkpointing


def final_params(world: World, overrides: dict[str, Any]) -> Arrays:
    *_, (strategy, _) = by_config(world, overrides)
    return arrays(strategy.full_tensors())


@pytest.mark.long
@pytest.mark.parametrize("name", deep_unless(lambda name: name in MECHANISMS, AS_ONE))
def test_checkpointing_changes_no_result(name: str, ranks: GetRanks) -> None:
    overrides = {
        "strategy.name": name, "precision.compute": "fp64", "training.optimizer": "sgd",
        "training.global_batch": 8, "training.micro_batch": 2,
    }  # fmt: skip
    world = 1 if name == "single" else 2
    plain = ranks(world).run(final_params, overrides)[0]
    again = ranks(world).run(
        final_params, {**overrides, "training.activation_checkpointing": True}
    )[0]
    close(again, plain, 1e-12)


def weigh(world: World, overrides: dict[str, Any]) -> int:
    from shardlab.measure.memory import peak_bytes

    return peak_bytes(world.device, lambda: final_params(world, overrides))[1]


@pytest.mark.long
def test_checkpointing_saves_memory(ranks: GetRanks) -> None:
    """Eight blocks keep one activation each instead of all of theirs."""
    overrides = {"strategy.name": "single", "model.options.layers": 8, "training.steps": 1}
    (plain,) = ranks(1).run(weigh, overrides)
    (again,) = ranks(1).run(weigh, {**overrides, "training.activation_checkpointing": True})
    assert again < 0.5 * plain


def without_blocks() -> Workload:
    return replace(planted.layers(), blocks=())


BARE = {"model.workload": "test_options:without_blocks", "model.size": None}


def test_checkpointing_without_blocks_is_refused(ranks: GetRanks) -> None:
    with pytest.raises(UsageError, match="block by block, and the workload layers names no block"):
        ranks(1).run(final_params, {**BARE, "training.activation_checkpointing": True})


# ------------------------------------------------------------------ compile


def graphs_and_params(world: World, overrides: dict[str, Any]) -> tuple[int, Arrays]:
    """How many graphs became machine code (or were found in Inductor's cache), and the result."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    params = final_params(world, overrides)
    return counters["stats"]["unique_graphs"] if counters["inductor"] else 0, params


DDP = {"strategy.name": "pytorch_ddp", "training.optimizer": "sgd"}
OURS = {**DDP, "strategy.name": "bucket_ddp_async", "training.activation_checkpointing": True}
COMPILED = [
    (DDP, "blocks", 2),  # gpt2's blocks share one; the other is of the head with its loss
    ({**DDP, **BARE}, "blocks", 1),  # a model without blocks is compiled whole
    (OURS, "model", 1),
]


@pytest.mark.deep
@pytest.mark.timeout(400)  # the first compile starts Inductor and the C++ compiler
@pytest.mark.parametrize(("overrides", "what", "expected"), COMPILED)
def test_compile(overrides: dict[str, Any], what: str, expected: int, ranks: GetRanks) -> None:
    graphs, plain = ranks(2).run(graphs_and_params, overrides)[0]
    assert graphs == 0
    compiled = {**overrides, "training.compile": what}
    graphs, fast = ranks(2).run(graphs_and_params, compiled, deadline_s=300)[0]
    assert graphs == expected
    close(fast, plain, 1e-5)


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", deep_unless(lambda name: name == "zero3", PARALLEL))
def test_compile_under_every_strategy(name: str, ranks: GetRanks) -> None:
    """And checkpointed: what the compiled block needs is there when backward calls it again."""
    overrides = {"strategy.name": name, "training.optimizer": "sgd", "model.options.layers": 4}
    plain = ranks(2).run(final_params, overrides)[0]
    overrides |= {"training.compile": "blocks", "training.activation_checkpointing": True}
    fast = ranks(2).run(final_params, overrides, deadline_s=300)[0]
    close(fast, plain, 1e-5)
    assert any((fast[n] != plain[n]).any() for n in plain), "eager and compiled round alike?"


def test_a_model_that_is_compiled_as_one_has_no_blocks(ranks: GetRanks) -> None:
    with pytest.raises(UsageError, match="zero3 works block by block, and a model that is"):
        ranks(2).run(final_params, {"strategy.name": "zero3", "training.compile": "model"})


def test_compile_without_a_compiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import cpp_builder, exc

    def none() -> str:
        raise exc.InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", none)
    workload = builders.build_workload(configs.load(None, {"model.size": "tiny"}))
    with pytest.raises(UsageError, match="needs a C\\+\\+ compiler on a CPU"):
        builders.prepare_blocks(
            workload.make_model(), workload, configs.TrainingConfig(compile="blocks")
        )


# ------------------------------------------------------------------ config


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"training.clip_norm": 0}, "training.clip_norm must be above 0, got 0"),
        ({"training.clip_norm": float("nan")}, "training.clip_norm must be above 0"),
        (
            {"training.schedule": "cosin"},
            "unknown training.schedule 'cosin'; did you mean 'cosine'",
        ),
        ({"training.warmup_steps": -1}, "training.warmup_steps must be at least 0, got -1"),
        (
            {"training.warmup_steps": 9, "training.steps": 8},
            "training.warmup_steps 9 is longer than the run of 8 steps",
        ),
        ({"training.min_rate": 0.1}, "training.min_rate is for the cosine schedule"),
        (
            {"training.schedule": "cosine", "training.min_rate": 2},
            "training.min_rate must be at most 1, got 2",
        ),
        ({"training.compile": "block"}, "unknown training.compile 'block'; did you mean 'blocks'"),
        ({"precision.loss_scale": 8}, "precision.loss_scale is for fp16; gradients in fp32"),
        ({"precision.compute": "fp16", "precision.loss_scale": 0}, "must be above 0, got 0"),
    ],
)
def test_refuses(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        configs.load(None, overrides)
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_the_rule_of_a_config() -> None:
    rule = builders.make_rule(configs.load(None, {"training.clip_norm": 2}))
    assert (rule.clip_norm, rule.loss_scale, rule.schedule(7)) == (2.0, None, 1.0)
    half = configs.load(None, {"precision.compute": "fp16"})
    assert builders.make_rule(half).loss_scale == 65536
    half = half.with_overrides({"precision.loss_scale": 8})
    assert builders.make_rule(half).loss_scale == 8


def test_a_loss_is_cast_only_where_asked() -> None:
    def loss(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        return torch.nn.functional.linear(batch.inputs, next(model.parameters())).sum()

    model = torch.nn.Linear(2, 2, bias=False)
    assert builders.in_precision(loss, "fp32") is loss
    assert builders.in_precision(loss, "fp64") is loss
    for compute, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        batch = Batch(torch.ones(1, 2), None, 1, 1)
        assert builders.in_precision(loss, compute)(model, batch).dtype in (dtype, torch.float32)


def test_fp16_that_never_becomes_finite_ends_the_run() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    update = Update(torch.optim.SGD([parameter]), Rule(loss_scale=1.0))
    bad = [torch.full((2,), torch.nan)]
    assert not any(update(bad) for _ in range(8))  # skipped, the scale halved each time
    with pytest.raises(FloatingPointError, match=r"even with a loss scale of 0\.00390625"):
        update(bad)
    assert parameter.tolist() == [1, 1]
