"""The mechanism of each strategy: what it sends and when, and what it refuses."""

from __future__ import annotations

import inspect
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import toys
from conformance import AS_ONE, OPTIONS, WORKERS, arrays, make_optimizer
from conftest import GetRanks
from shardlab import comm, naming
from shardlab.errors import RankFailure, UsageError
from shardlab.naming import STRATEGIES
from shardlab.strategies import base
from shardlab.strategies.base import Setup, Strategy
from shardlab.world import World
from told import Calls, kind_of, told

PARALLEL = [name for name in AS_ONE if name != "single"]


def build(name: str, toy: str, world: World, seed: int = 0, **options: Any) -> Any:
    make = naming.resolve(name, STRATEGIES, "strategy")
    model, optimizer = toys.build(toy, seed), make_optimizer("adamw")
    setup = Setup(model, optimizer, toys.loss, world.mesh, blocks=toys.BLOCKS[toy])
    return make(setup, **options)


def microbatches(step: int, rank: int, micro: int) -> list[Any]:
    return [toys.batch(step, rank, m) for m in range(micro)]


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_five_minute_read(name: str) -> None:
    """A short file, and the schedule in the docstring."""
    make = naming.resolve(name, STRATEGIES, "strategy")
    path = Path(inspect.getfile(make))
    limit = 350 if name == "zero3" else 230  # it meets every way in which a model may read a weight
    assert len(path.read_text().splitlines()) < limit
    assert "Schedule" in (make.__doc__ or "")
    assert issubclass(make, Strategy)


def test_the_contract_is_written_down() -> None:
    """Nothing is looked up on a strategy at run time: what the lab calls stands in Strategy."""
    source = Path(inspect.getfile(Strategy)).parent.parent
    lookup = re.compile(r"(get|has|set)attr\((self\.)?strategy\b")
    found = [path for path in source.rglob("*.py") if lookup.search(path.read_text())]
    assert found == []
    public = [name for name in vars(Strategy) if not name.startswith("_")]
    methods = [getattr(Strategy, name) for name in public if callable(getattr(Strategy, name))]
    assert all(method.__doc__ for method in methods)


# ------------------------------------------------------------------ the schedule, as it is told


def rows_of(world: World, name: str, **options: Any) -> list[dict[str, Any]]:
    """The ledger of a strategy's second step, when it has learnt what it learns."""
    of_workers = OPTIONS[name] if name in WORKERS else {}  # they exchange in the second step
    strategy = build(name, "buffers", world, **of_workers, **options)
    for step in range(2):
        comm.LEDGER.reset()
        strategy.gradients(microbatches(step, world.rank, 2))
        strategy.step()
        strategy.settle()
    return comm.LEDGER.take()


def made(world: World, name: str) -> Calls:
    """The collectives that a strategy makes in a step, in their order, each once."""
    rows = rows_of(world, name)
    return list(dict.fromkeys((row["op"], kind_of(row["label"])) for row in rows))


FROM_SCRATCH = [*(n for n in PARALLEL if not n.startswith("pytorch_")), *WORKERS]


@pytest.mark.parametrize("name", FROM_SCRATCH)
def test_its_own_file_sends_what_grows_with_the_model(name: str, ranks: GetRanks) -> None:
    """Whoever reads the file sees the collectives of gradients and parameters, and their order."""
    rows = ranks(2).run(rows_of, name)[0]
    sent = [row for row in rows if kind_of(row["label"]) in ("params", "gradients")]
    assert sent
    assert {row["site"].partition(":")[0] for row in sent} == {f"{name}.py"}


# What one reads for a rung, all of it in strategies/: its file, and at most two shared ones.
READ = {
    "simple_ddp": ("simple_ddp", "steps", "base"),
    "bucket_ddp_async": ("bucket_ddp_async", "steps", "overlap"),
    "zero2": ("zero2", "steps", "sharded"),
    "zero3": ("zero3", "steps", "sharded"),
    "diloco": ("diloco", "steps", "workers"),
}


@pytest.mark.parametrize("name", READ)
def test_a_rung_is_read_in_one_sitting(name: str, ranks: GetRanks) -> None:
    """Every collective of a step is called in these files, which have at most 500 lines."""
    folder = Path(base.__file__).parent
    lines = [len((folder / f"{file}.py").read_text().splitlines()) for file in READ[name]]
    assert len(lines) <= 3
    assert sum(lines) <= 500
    sites = {row["site"].partition(".")[0] for row in ranks(2).run(rows_of, name)[0]}
    assert sites <= set(READ[name])


@pytest.mark.parametrize("name", FROM_SCRATCH)
def test_the_docstring_names_the_calls_in_their_order(name: str, ranks: GetRanks) -> None:
    docstring = naming.resolve(name, STRATEGIES, "strategy").__doc__
    assert ranks(2).run(made, name) == [told(docstring)] * 2


# With groups of ranks: what the docstring says of them replaces a part of the rest, or adds to it.
GROUPED = {"bucket_ddp_async": {"hierarchical": True, "ranks_per_node": 2}, "zero3": {"shards": 2}}


def rows_in_groups(world: World, name: str) -> list[dict[str, Any]]:
    return rows_of(world, name, **GROUPED[name])


@pytest.mark.parametrize("name", GROUPED)
def test_groups_are_told_in_the_docstring_too(name: str, ranks: GetRanks) -> None:
    docstring = naming.resolve(name, STRATEGIES, "strategy").__doc__ or ""
    of_groups = told("Schedule" + docstring.partition("\n    With ``")[2])
    assert of_groups
    plain = [call for call in told(docstring) if call not in of_groups]
    for rows in ranks(4).run(rows_in_groups, name):
        made = list(dict.fromkeys((row["op"], kind_of(row["label"])) for row in rows))
        assert [call for call in made if call in of_groups] == of_groups
        assert [call for call in made if call not in of_groups] == plain
        sent = [row for row in rows if kind_of(row["label"]) in ("params", "gradients")]
        assert {row["site"].partition(":")[0] for row in sent} == {f"{name}.py"}


def test_a_schedule_that_is_told_wrongly_is_noticed() -> None:
    docstring = naming.resolve("zero1", STRATEGIES, "strategy").__doc__
    calls = told(docstring)
    assert len(calls) == 6
    assert told(docstring.replace("reduce_scatter the bucket", "all_reduce the bucket")) != calls
    moved = docstring.replace("all_reduce the number of targets", "-")
    assert told(moved) != calls


# ------------------------------------------------------------------ what is sent


def step_ledger(world: World, name: str, toy: str, micro: int) -> list[dict[str, Any]]:
    strategy = build(name, toy, world)
    comm.LEDGER.reset()
    strategy.gradients(microbatches(0, world.rank, micro))
    strategy.step()
    return comm.LEDGER.take()


@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize(("name", "syncs"), [("simple_ddp", "each"), ("simple_ddp_ga", "once")])
def test_what_a_step_sends(name: str, syncs: str, micro: int, ranks: GetRanks) -> None:
    """Ψ per micro-batch or per step, one call per parameter, and two words besides."""
    size = sum(p.numel() * 8 for p in toys.build("mlp", 0).parameters())
    rounds = micro if syncs == "each" else 1
    for rows in ranks(2).run(step_ledger, name, "mlp", micro):
        assert {r["op"] for r in rows} == {"all_reduce"}
        kinds = Counter(r["label"].split()[0] for r in rows)
        assert kinds == {"target": 1, "used": rounds, "grad": 4 * rounds, "loss": 1}
        gradients = [r for r in rows if r["label"].startswith("grad")]
        assert sum(r["bytes"] for r in gradients) == size * rounds


def test_single_sends_nothing(ranks: GetRanks) -> None:
    (rows,) = ranks(1).run(step_ledger, "single", "mlp", 2)
    assert rows == []


def test_every_rank_sends_the_same(ranks: GetRanks) -> None:
    """Though they use different parameters: a difference would pair wrong tensors, or hang."""
    for toy in toys.TOYS:
        runs = ranks(2).run(step_ledger, "simple_ddp_ga", toy, 1)
        first, second = ([(r["op"], r["bytes"], r["label"]) for r in rows] for rows in runs)
        assert first == second


# ------------------------------------------------------------------ parameters without gradient


class OneRankOnly(torch.nn.Module):
    """``extra`` is used on the ranks whose data says so."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(6, 3)
        self.extra = torch.nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)
        return out + self.extra(x) if len(x) == toys.ROWS else out


def unused_on_rank_1(world: World, options: dict[str, Any]) -> dict[str, Any]:
    from shardlab.strategies.pytorch_ddp import PyTorchDDP
    from shardlab.workloads.base import Batch

    torch.manual_seed(0)
    model = OneRankOnly().double()
    setup = Setup(model, make_optimizer("adamw"), toys.loss, world.mesh)
    strategy = PyTorchDDP(setup, **options)
    rows = toys.ROWS - world.rank
    x = torch.ones(rows, 6, dtype=torch.float64)
    strategy.gradients([Batch(x, torch.zeros(rows, dtype=torch.long), rows, rows)])
    return arrays(strategy.full_grads())


def test_ddp_names_the_parameter_it_would_wait_for(ranks: GetRanks) -> None:
    """Plain DDP hangs here: rank 0 waits for a bucket that rank 1 will never fill."""
    with pytest.raises(UsageError) as caught:
        ranks(2).run(unused_on_rank_1, {}, deadline_s=30)
    assert "'extra.bias' got no gradient on rank 1" in str(caught.value)
    assert "find_unused_parameters: true" in str(caught.value)


def test_ddp_that_looks_for_unused_parameters_is_right(ranks: GetRanks) -> None:
    first, second = ranks(2).run(unused_on_rank_1, {"find_unused_parameters": True}, deadline_s=30)
    assert all(np.array_equal(first[n], second[n]) for n in first)
    assert first["extra.weight"].any()


def unused_in_the_last_microbatch(world: World) -> None:
    """``extra`` has a gradient, from the first micro-batch: that must not hide the problem."""
    from shardlab.strategies.pytorch_ddp import PyTorchDDP
    from shardlab.workloads.base import Batch

    strategy = PyTorchDDP(Setup(OneRankOnly(), make_optimizer("sgd"), toys.loss, world.mesh))
    for _ in range(2):
        strategy.gradients(
            [
                Batch(torch.ones(rows, 6), torch.zeros(rows, dtype=torch.long), rows, rows)
                for rows in (toys.ROWS, toys.ROWS - 1)
            ]
        )


def test_ddp_sees_through_accumulation(ranks: GetRanks) -> None:
    with pytest.raises(UsageError, match="got no gradient"):
        ranks(2).run(unused_in_the_last_microbatch, deadline_s=30)


def bad_bucket(world: World) -> None:
    build("pytorch_ddp", "mlp", world, bucket_mb=0)


def single_on_two(world: World) -> None:
    build("single", "mlp", world)


def test_refusals(ranks: GetRanks) -> None:
    with pytest.raises(UsageError, match="bucket_mb must be above 0"):
        ranks(1).run(bad_bucket)
    with pytest.raises(UsageError, match="this world has 2"):
        ranks(2).run(single_on_two)


# ------------------------------------------------------------------ gradients that come twice


class Slow(torch.autograd.Function):
    """Gives what was launched before it the time to be done."""

    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(0.05)
        return gradient


class Again(torch.nn.Module):
    """One layer used twice under re-entrant checkpointing: its gradient comes in two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = torch.nn.Linear(6, 6), torch.nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        once = Slow.apply(checkpoint(self.layer, x, use_reentrant=True))
        out: torch.Tensor = self.head(checkpoint(self.layer, once, use_reentrant=True))
        return out


def two_parts(
    world: World, name: str, blocks: Sequence[str] = (), **options: Any
) -> tuple[list[float], Any]:
    torch.manual_seed(0)
    make = naming.resolve(name, STRATEGIES, "strategy")
    model = Again().double()
    setup = Setup(model, make_optimizer("adamw"), toys.loss, world.mesh, blocks=blocks)
    strategy = make(setup, **options)
    losses = []
    for step in range(3):
        batches = [b for r in range(2) for b in microbatches(step, r, 2)]
        mine = batches if world.size == 1 else batches[2 * world.rank : 2 * world.rank + 2]
        losses.append(float(strategy.gradients(mine)))
        strategy.step()
    return losses, arrays(strategy.full_params())


def two_parts_in_groups(world: World, name: str, blocks: Sequence[str]) -> Any:
    """Each rank is a group."""
    return two_parts(world, name, blocks, shards=1)


@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        ("simple_ddp_hook", ()),
        ("simple_ddp_async", ()),
        ("bucket_ddp_async", ()),
        ("zero1", ()),
        ("zero2", ()),
        ("zero3", ()),  # the layer is in the root
        pytest.param("zero3", ("layer",), id="zero3-as-a-block"),
    ],
)
def test_a_gradient_that_comes_twice(name: str, blocks: Any, ranks: GetRanks) -> None:
    """The first part must not travel, or not alone, before the second is there."""
    ((losses, params),) = ranks(1).run(two_parts, "single")
    for found, held in ranks(2).run(two_parts, name, blocks, deadline_s=60):
        assert found == pytest.approx(losses, abs=1e-12)
        for parameter, value in params.items():
            np.testing.assert_allclose(held[parameter], value, atol=1e-10, err_msg=parameter)
    if name == "zero3":
        for _, held in ranks(2).run(two_parts_in_groups, name, blocks, deadline_s=60):
            for parameter, value in params.items():
                np.testing.assert_allclose(held[parameter], value, atol=1e-10, err_msg=parameter)


# ------------------------------------------------------------------ a step without targets


def nothing_counts_in_step_1(world: World, name: str) -> tuple[list[float], Any]:
    strategy = build(name, "mlp", world)
    losses = []
    for step in range(3):
        batches = [b for r in range(2) for b in microbatches(step, r, 1)]
        if step == 1:
            batches = [replace(b, targets=b.targets * 0 - 100, count=0) for b in batches]
        mine = batches if world.size == 1 else batches[world.rank : world.rank + 1]
        losses.append(float(strategy.gradients(mine)))
        strategy.step()
    return losses, arrays(strategy.full_params())


def test_a_step_without_targets_is_no_nan_in_one_process_either(ranks: GetRanks) -> None:
    ((losses, params),) = ranks(1).run(nothing_counts_in_step_1, "single")
    assert losses[1] == 0.0
    for found, held in ranks(2).run(nothing_counts_in_step_1, "simple_ddp"):
        assert found == pytest.approx(losses, abs=1e-12)
        for parameter, value in params.items():
            np.testing.assert_allclose(held[parameter], value, atol=1e-10, err_msg=parameter)


# ------------------------------------------------------------------ state


def train_then_hand_over(world: World, first: str, second: str) -> tuple[Any, Any]:
    """Two steps under one strategy and two under another, beside four under the first."""
    whole = build(first, "buffers", world)
    for step in range(4):
        whole.gradients(microbatches(step, world.rank, 2))
        whole.step()
    part = build(first, "buffers", world)
    for step in range(2):
        part.gradients(microbatches(step, world.rank, 2))
        part.step()
    state = part.state_dict()
    rest = build(second, "buffers", world, seed=99)  # every tensor must come from the state
    rest.load_state_dict(state)
    for step in range(2, 4):
        rest.gradients(microbatches(step, world.rank, 2))
        rest.step()
    part.step()  # the state was a copy: what becomes of its source does not matter
    return arrays(whole.full_params()), arrays(rest.full_params())


# Each to its neighbour, both ways round: together every strategy's state has gone everywhere.
HANDOVERS = [(a, b) for a, b in zip(PARALLEL, [*PARALLEL[1:], PARALLEL[0]], strict=True)]


@pytest.mark.parametrize(("first", "second"), [*HANDOVERS, *(pair[::-1] for pair in HANDOVERS)])
def test_state_moves_between_strategies(first: str, second: str, ranks: GetRanks) -> None:
    for whole, handed in ranks(2).run(train_then_hand_over, first, second):
        for name in whole:
            np.testing.assert_allclose(handed[name], whole[name], rtol=0, atol=1e-12, err_msg=name)


def unequal_microbatches(world: World) -> None:
    """One rank is told of one micro-batch more: it must end, not hang."""
    strategy = build("simple_ddp", "mlp", world)
    strategy.gradients(microbatches(0, world.rank, 1 + world.rank))
    strategy.step()


def test_a_rank_with_more_to_do_does_not_hang_for_ever(ranks: GetRanks) -> None:
    with pytest.raises(RankFailure):
        ranks(2).run(unequal_microbatches, deadline_s=3)
