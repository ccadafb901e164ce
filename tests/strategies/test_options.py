"""What every strategy takes: clipping, schedule, precision, checkpointing, compile."""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

import toys
from conformance import AS_ONE, Arrays, arrays
from conftest import GetRanks, long_unless
from shardlab import config as configs
from shardlab import naming
from shardlab.errors import UsageError
from shardlab.naming import STRATEGIES
from shardlab.optim import factory
from shardlab.optim.schedule import SCHEDULES, learning_rate_factor
from shardlab.run import assemble, loop
from shardlab.strategies.base import Setup
from shardlab.strategies.update import Rule, Update
from shardlab.workloads.base import Batch, LossFn
from shardlab.world import World

STEPS = 4
RATE = 0.1
COSINE = functools.partial(learning_rate_factor, total=STEPS, warmup=2, kind="cosine", floor=0.1)
WORLDS = [(name, world) for name in AS_ONE for world in ((1,) if name == "single" else (2, 3))]
WORLDS.append(("pytorch_hsdp", 4))  # two copies of the shards: their squares count once
PARALLEL = [name for name in AS_ONE if name != "single"]
QUICK = ("bucket_ddp_async", "zero3")


def build(
    name: str,
    toy: str,
    world: World,
    rule: Rule,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    loss: LossFn = toys.loss,
) -> Any:
    """SGD: an error in the gradient's size shows, where Adam would hide it."""
    make = naming.resolve(name, STRATEGIES, "strategy")
    parameters = inspect.signature(make).parameters
    options: dict[str, Any] = {}
    if "shards" in parameters and world.size % 2:
        options["shards"] = world.size  # groups of two cannot be formed
    optimizer = factory.of_class(torch.optim.SGD, lr=RATE)
    model = toys.build(toy, seed).to(dtype)
    return make(Setup(model, optimizer, loss, world.mesh, rule, toys.BLOCKS[toy]), **options)


def close(actual: Arrays, expected: Arrays, tolerance: float) -> None:
    assert actual.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(
            actual[name], expected[name], rtol=0, atol=tolerance, err_msg=name
        )


# ------------------------------------------------------------------ clipping and schedule

TOYS = ("mlp", "tied_frozen", "odd")


def train_toys(world: World, name: str, rule: Rule) -> list[Arrays]:
    results = []
    for toy in TOYS:
        strategy = build(name, toy, world, rule)
        for step in range(STEPS):
            strategy.gradients([toys.batch(step, world.rank, m) for m in range(2)])
            strategy.step()
        results.append(arrays(strategy.full_params()))
    return results


def plain_process(toy: str, world: int, clip: float) -> tuple[Arrays, list[float]]:
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
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip)))
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return arrays(dict(model.named_parameters())), norms


@pytest.mark.parametrize(("name", "world"), long_unless(lambda _, n: n == 2, WORLDS))
def test_clipping_and_schedule_are_pytorchs_own(name: str, world: int, ranks: GetRanks) -> None:
    """The norm is that of the whole gradient, however it is sharded."""
    clip = 0.4
    expected = [plain_process(toy, world, clip) for toy in TOYS]
    clipped = [norm > clip for _, norms in expected for norm in norms]
    assert any(clipped)
    assert not all(clipped)
    for results in ranks(world).run(train_toys, name, Rule(clip_norm=clip, schedule=COSINE)):
        for got, (want, _) in zip(results, expected, strict=True):
            close(got, want, 1e-12)


class ClipsItsOwnShard(Update):
    """A planted bug: each rank clips by the norm of what it has."""

    def __call__(self, gradients: Any, sharded_over: Any = None) -> bool:
        del sharded_over
        return super().__call__(gradients)


def test_the_norm_of_shards_adds_up(ranks: GetRanks) -> None:
    right = ranks(2).run(sharded_step, Update)
    assert right[0] + right[1] == pytest.approx(1.0)
    assert right[0] != right[1]
    wrong = ranks(2).run(sharded_step, ClipsItsOwnShard)
    assert wrong[0] + wrong[1] == pytest.approx(2.0), "nobody noticed"


def sharded_step(world: World, make: type[Update]) -> float:
    """Gradient (3, 4) over two ranks, clipped to 1: the squares of this rank's part."""
    shard = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    shard.grad = torch.tensor([3.0 + world.rank], dtype=torch.float64)
    update = make(torch.optim.SGD([shard], lr=1.0), Rule(clip_norm=1.0))
    update([shard.grad], world.group)
    return float(shard.detach().square())


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


@given(run=RUNS, floor=FLOORS, step=st.integers(0, 499))
def test_half_a_cosine(run: tuple[int, int], floor: float, step: int) -> None:
    """Symmetric about its middle: what one end has lost, the other has left."""
    total, warmup = run
    down = learning_rate_factor(warmup + step, total, warmup, "cosine", floor)
    up = learning_rate_factor(max(total - step, warmup), total, warmup, "cosine", floor)
    if warmup + step <= total and warmup < total:
        assert down + up == pytest.approx(1 + floor)


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
    assert ranks(1).run("shardlab.measure.compare:weigh_cell", config.to_dict())[0]


def rates_of_a_run(world: World, overrides: dict[str, Any]) -> list[float]:
    return [s.optimizer.param_groups[0]["lr"] for s in steps_of(world, overrides)]


def steps_of(world: World, overrides: dict[str, Any]) -> Iterator[Any]:
    """The strategy after each step of a run that the config describes."""
    config = configs.load(None, {"model.size": "tiny", "training.steps": 3, **overrides})
    workload = assemble.build_workload(config)
    strategy: Any = assemble.build_strategy(config, workload, world)
    for microbatches in loop.Batches(workload, config, world):
        strategy.gradients(microbatches)
        strategy.step()
        yield strategy


# ------------------------------------------------------------------ loss scaling


def overflow_on_rank_1(world: World, name: str) -> list[tuple[dict[str, Any], Arrays]]:
    """In step 1, rank 1's inputs are larger than any fp16. State and parameters of each step."""
    rule = Rule(loss_scale=2.0**16, clip_norm=1.0)
    loss = assemble.in_precision(toys.loss, "fp16")
    strategy = build(name, "mlp", world, rule, dtype=torch.float32, loss=loss)
    history = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(10 * step + world.rank)
        x = torch.randn(4, 6, generator=generator)
        if (step, world.rank) == (1, 1):
            x *= 1e9
        strategy.gradients([Batch(x, torch.arange(4) % 3, 4, 4)])
        strategy.step()
        history.append((strategy.state_dict()["update"], arrays(strategy.full_params())))
    return history


@pytest.mark.parametrize("name", PARALLEL)
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


@pytest.mark.parametrize(("name", "world"), long_unless(lambda name, _: name in QUICK, WORLDS))
def test_a_power_of_two_scales_exactly(name: str, world: int, ranks: GetRanks) -> None:
    """Nothing overflows in float64, and then scaling is nothing, to the last bit."""
    plain = ranks(world).run(train_toys, name, Rule())[0]
    scaled = ranks(world).run(train_toys, name, Rule(loss_scale=2.0**16))[0]
    for got, want in zip(scaled, plain, strict=True):
        close(got, want, 0)


def full_grads(world: World, name: str, rule: Rule) -> Arrays:
    strategy = build(name, "mlp", world, rule)
    strategy.gradients([toys.batch(0, world.rank, 0)])
    return arrays(strategy.full_grads())


@pytest.mark.parametrize("name", PARALLEL)
def test_the_gradients_shown_are_not_scaled(name: str, ranks: GetRanks) -> None:
    plain = ranks(2).run(full_grads, name, Rule())[0]
    close(ranks(2).run(full_grads, name, Rule(loss_scale=2.0**16))[0], plain, 0)


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
    whole, part, rest = (
        build(name, "mlp", world, rule, seed=seed)
        for name, seed in ((first, 0), (first, 0), (second, 99))
    )
    for step in range(STEPS):
        if step == 2:
            rest.load_state_dict(part.state_dict())
        for strategy in (whole, part if step < 2 else rest):
            strategy.gradients([toys.batch(step, world.rank, 0)])
            strategy.step()
    state = rest.state_dict()["update"]
    return state, arrays(whole.full_params()), arrays(rest.full_params())


@pytest.mark.parametrize(("first", "second"), list(itertools.pairwise([*PARALLEL, PARALLEL[0]])))
def test_the_state_carries_schedule_and_scale(first: str, second: str, ranks: GetRanks) -> None:
    for state, whole, rest in ranks(2).run(hand_over, first, second):
        assert state == {"steps": 4, "scale": 2.0**16, "good_steps": 4}
        close(rest, whole, 1e-12)


# ------------------------------------------------------------------ precision


def losses(world: World, overrides: dict[str, Any]) -> list[float]:
    config = configs.load(None, {"model.size": "tiny", "training.steps": 4, **overrides})
    workload = assemble.build_workload(config)
    strategy = assemble.build_strategy(config, workload, world)
    values = []
    for microbatches in loop.Batches(workload, config, world):
        values.append(float(strategy.gradients(microbatches)))
        strategy.step()
    return values


@pytest.mark.long
@pytest.mark.parametrize("compute", ["bf16", "fp16"])
@pytest.mark.parametrize("name", PARALLEL)
def test_mixed_precision_is_near_fp32_and_not_it(name: str, compute: str, ranks: GetRanks) -> None:
    exact = ranks(2).run(losses, {"strategy.name": name})[0]
    rounded = ranks(2).run(losses, {"strategy.name": name, "precision.compute": compute})[0]
    assert rounded != exact
    assert rounded == pytest.approx(exact, rel=1e-3)
    assert rounded[-1] < rounded[0] - 0.1


def small_gradients(world: World, scale: float) -> float:
    """The share of gradients that are exactly zero, of a loss that is very small."""
    loss = assemble.in_precision(lambda m, b: toys.loss(m, b) * 1e-7, "fp16")
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
    *_, strategy = steps_of(world, overrides)
    return arrays(strategy.full_params())


@pytest.mark.long
@pytest.mark.parametrize(("name", "world"), [(n, w) for n, w in WORLDS if w < 3])
def test_checkpointing_changes_no_result(name: str, world: int, ranks: GetRanks) -> None:
    overrides = {
        "strategy.name": name, "precision.compute": "fp64", "training.optimizer": "sgd",
        "training.accumulate": 2,
    }  # fmt: skip
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


NO_BLOCKS = """
import torch
from torch import nn
from shardlab.workloads.base import Batch, Workload
from shardlab.strategies.base import Setup

class Rows:
    def __len__(self):
        return 64
    def batch(self, ids):
        x = torch.tensor(ids, dtype=torch.float32).reshape(-1, 1) / 64
        return Batch(inputs=x, targets=3 * x, count=len(ids), samples=len(ids))

def loss(model, batch):
    return (model(batch.inputs) - batch.targets).square().sum()

def make():
    return nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))

workload = Workload("line", make, loss, Rows(), blocks=())
"""


@pytest.fixture
def no_blocks(tmp_path: Path) -> str:
    path = tmp_path / "no_blocks.py"
    path.write_text(NO_BLOCKS)
    return f"{path}:workload"


def test_checkpointing_without_blocks_is_refused(no_blocks: str, ranks: GetRanks) -> None:
    overrides = {"model.workload": no_blocks, "model.size": None}
    with pytest.raises(UsageError, match="block by block, and the workload line names no blocks"):
        ranks(1).run(final_params, {**overrides, "training.activation_checkpointing": True})


# ------------------------------------------------------------------ compile


def graphs_and_params(world: World, overrides: dict[str, Any]) -> tuple[int, Arrays]:
    """How many graphs became machine code (or were found in Inductor's cache), and the result."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    params = final_params(world, overrides)
    return counters["stats"]["unique_graphs"] if counters["inductor"] else 0, params


@pytest.mark.long
@pytest.mark.timeout(400)  # the first compile starts Inductor and the C++ compiler
def test_compile(no_blocks: str, ranks: GetRanks) -> None:
    """Blocks of one kind share one graph; a model without blocks is compiled whole."""
    gpt2 = {"strategy.name": "pytorch_ddp", "training.optimizer": "sgd"}
    bare = {**gpt2, "model.workload": no_blocks, "model.size": None}
    for overrides, expected in ((gpt2, 2), (bare, 1)):  # gpt2: a block, and the head with its loss
        graphs, plain = ranks(2).run(graphs_and_params, overrides)[0]
        assert graphs == 0
        compiled = {**overrides, "training.compile": "blocks"}
        graphs, fast = ranks(2).run(graphs_and_params, compiled, deadline_s=300)[0]
        assert graphs == expected
        close(fast, plain, 1e-5)


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", PARALLEL)
def test_compile_under_every_strategy(name: str, ranks: GetRanks) -> None:
    """And checkpointed: what the compiled block needs is there when backward calls it again."""
    overrides = {"strategy.name": name, "training.optimizer": "sgd", "model.options.layers": 4}
    plain = ranks(2).run(final_params, overrides)[0]
    overrides |= {"training.compile": "blocks", "training.activation_checkpointing": True}
    fast = ranks(2).run(final_params, overrides, deadline_s=300)[0]
    close(fast, plain, 1e-5)
    assert any((fast[n] != plain[n]).any() for n in plain), "eager and compiled round alike?"


@pytest.mark.long
@pytest.mark.timeout(400)
def test_compile_as_one(ranks: GetRanks) -> None:
    overrides = {"strategy.name": "bucket_ddp_async", "training.optimizer": "sgd"}
    plain = ranks(2).run(final_params, overrides)[0]
    overrides |= {"training.compile": "model", "training.activation_checkpointing": True}
    graphs, fast = ranks(2).run(graphs_and_params, overrides, deadline_s=300)[0]
    assert graphs == 1
    close(fast, plain, 1e-5)
    with pytest.raises(UsageError, match="zero3 works block by block, and a model that is"):
        ranks(2).run(final_params, {**overrides, "strategy.name": "zero3"})


def test_compile_without_a_compiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import cpp_builder, exc

    def none() -> str:
        raise exc.InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", none)
    workload = assemble.build_workload(configs.load(None, {"model.size": "tiny"}))
    with pytest.raises(UsageError, match="needs a C\\+\\+ compiler on a CPU"):
        assemble.prepare_blocks(
            workload.make_model(), workload, configs.TrainingConfig(compile="blocks")
        )


# ------------------------------------------------------------------ config


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"training.clip_norm": 0}, "training.clip_norm must be above 0, got 0.0"),
        ({"training.clip_norm": float("nan")}, "training.clip_norm must be above 0"),
        (
            {"training.schedule": "cosin"},
            "unknown training.schedule 'cosin'; did you mean 'cosine'",
        ),
        ({"training.warmup_steps": -1}, "training.warmup_steps must be 0 or more"),
        (
            {"training.warmup_steps": 9, "training.steps": 8},
            "training.warmup_steps 9 is longer than the run of 8 steps",
        ),
        ({"training.min_rate": 0.1}, "training.min_rate is for the cosine schedule"),
        ({"training.schedule": "cosine", "training.min_rate": 2}, "0 to 1, got 2.0"),
        ({"training.compile": "block"}, "unknown training.compile 'block'; did you mean 'blocks'"),
        ({"precision.loss_scale": 8}, "precision.loss_scale is for fp16; gradients in fp32"),
        ({"precision.compute": "fp16", "precision.loss_scale": 0}, "must be above 0, got 0.0"),
    ],
)
def test_refuses(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        configs.load(None, overrides)
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_the_rule_of_a_config() -> None:
    rule = assemble.make_rule(configs.load(None, {"training.clip_norm": 2}))
    assert (rule.clip_norm, rule.loss_scale, rule.schedule(7)) == (2.0, None, 1.0)
    half = configs.load(None, {"precision.compute": "fp16"})
    assert assemble.make_rule(half).loss_scale == 65536
    half = half.with_overrides({"precision.loss_scale": 8})
    assert assemble.make_rule(half).loss_scale == 8


def test_a_loss_is_cast_only_where_asked() -> None:
    def loss(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        return F.linear(batch.inputs, next(model.parameters())).sum()

    model = torch.nn.Linear(2, 2, bias=False)
    assert assemble.in_precision(loss, "fp32") is loss
    assert assemble.in_precision(loss, "fp64") is loss
    for compute, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        batch = Batch(torch.ones(1, 2), None, 1, 1)
        assert assemble.in_precision(loss, compute)(model, batch).dtype in (dtype, torch.float32)


def test_fp16_that_never_becomes_finite_ends_the_run() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    update = Update(torch.optim.SGD([parameter]), Rule(loss_scale=1.0))
    bad = [torch.full((2,), torch.nan)]
    assert not any(update(bad) for _ in range(8))  # skipped, the scale halved each time
    with pytest.raises(FloatingPointError, match=r"even with a loss scale of 0\.00390625"):
        update(bad)
    assert parameter.tolist() == [1, 1]
