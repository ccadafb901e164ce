"""The mechanism of each strategy: what it sends and when, and what it refuses."""

from __future__ import annotations

import ast
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
from conformance import AS_ONE, OPTIONS, WORKERS, arrays, build, make_optimizer
from conftest import GetRanks, deep_unless
from schedule_docstring import kind_of, told
from shardlab import config as configs
from shardlab import naming
from shardlab.errors import RankFailure, UsageError
from shardlab.ledger import LEDGER
from shardlab.naming import EVERY_STRATEGY, STRATEGIES
from shardlab.strategies import base
from shardlab.strategies.base import Setup, Strategy
from shardlab.strategies.shards import ModelSpec, as_state_dict
from shardlab.training import builders
from shardlab.workloads.base import Workload
from shardlab.world import World

PARALLEL = [name for name in AS_ONE if name != "single"]


def microbatches(step: int, rank: int, micro: int) -> list[Any]:
    return [toys.batch(step, rank, m) for m in range(micro)]


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_five_minute_read(name: str) -> None:
    """A short file, and the schedule in the docstring."""
    make = naming.resolve(name, STRATEGIES, "strategy")
    path = Path(inspect.getfile(make))
    limit = 260 if path.stem == "pytorch_fsdp" else 230  # three strategies and what they share
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


def rows_of(world: World, name: str) -> list[dict[str, Any]]:
    """The ledger of a strategy's second step, when it has learnt what it learns."""
    of_workers = OPTIONS[name] if name in WORKERS else {}  # they exchange in the second step
    strategy = build(name, "buffers", world, **of_workers)
    for step in range(2):
        LEDGER.reset()
        strategy.gradients(microbatches(step, world.rank, 2))
        strategy.step()
        strategy.settle()
    return LEDGER.take()


FROM_SCRATCH = [*(n for n in PARALLEL if not n.startswith("pytorch_")), *WORKERS]
# Where a rung's collectives are: in its file, and in at most two shared ones.
READ = {
    "simple_ddp": ("simple_ddp", "steps", "base"),
    "bucket_ddp_async": ("bucket_ddp_async", "steps", "buckets"),
    "zero2": ("zero2", "steps", "zero"),
    "zero3": ("zero3", "steps", "zero"),
    "diloco": ("diloco", "steps", "workers"),
}
# What one reads of a rung: its file and all that this imports in strategies/, in files and lines.
CLOSURES = {
    "simple_ddp": (6, 820), "simple_ddp_hook": (7, 1020), "bucket_ddp_async": (8, 1300),
    "zero1": (9, 1420), "zero2": (9, 1410), "zero3": (13, 2210), "local_sgd": (9, 1080),
    "tensor_parallel": (13, 1880), "pipeline_1f1b": (15, 2540), "context_parallel": (10, 1660),
}  # fmt: skip


@pytest.mark.parametrize("name", FROM_SCRATCH)
def test_a_step_is_read_where_it_is_told(name: str, ranks: GetRanks) -> None:
    """The docstring names the collectives in their order, and the strategy's own file makes those
    that grow with the model."""
    docstring = naming.resolve(name, STRATEGIES, "strategy").__doc__
    for rows in ranks(2).run(rows_of, name):
        made = [(row["op"], kind_of(row["label"])) for row in rows]
        assert list(dict.fromkeys(made)) == told(docstring)
        sites = [row["site"].partition(".")[0] for row in rows]
        own = {
            site
            for site, (_, kind) in zip(sites, made, strict=True)
            if kind in ("params", "gradients")
        }
        assert own == {name}
        assert set(sites) <= set(READ.get(name, sites))


@pytest.mark.parametrize("name", ["pytorch_zero2", "pytorch_zero3"])
def test_fsdp_sends_what_its_docstring_says(name: str, ranks: GetRanks) -> None:
    docstring = naming.resolve(name, STRATEGIES, "strategy").__doc__
    for rows in ranks(2).run(rows_of, name):
        made = [(row["op"], kind_of(row["label"])) for row in rows]
        assert list(dict.fromkeys(made)) == told(docstring)


def closure(name: str) -> dict[str, int]:
    """The lines of every module of strategies/ that a strategy's file imports, its own included."""
    folder = Path(base.__file__).parent
    dotted = {
        path: path.relative_to(folder.parents[1]).with_suffix("") for path in folder.rglob("*.py")
    }
    modules = {".".join(d.parts).removesuffix(".__init__"): path for path, d in dotted.items()}
    found: dict[str, int] = {}
    todo = [naming.resolve(name, EVERY_STRATEGY, "strategy").__module__]
    while todo:
        module = todo.pop()
        if module in found or module not in modules:
            continue
        source = modules[module].read_text()
        found[module] = len(source.splitlines())
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                todo += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            elif isinstance(node, ast.Import):
                todo += [alias.name for alias in node.names]
    return found


@pytest.mark.parametrize("name", CLOSURES)
def test_a_rung_does_not_grow(name: str) -> None:
    found = closure(name)
    files, lines = CLOSURES[name]
    assert len(found) <= files, sorted(found)
    assert sum(found.values()) <= lines, found


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
    LEDGER.reset()
    strategy.gradients(microbatches(0, world.rank, micro))
    strategy.step()
    return LEDGER.take()


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


# ------------------------------------------------------------------ parameters without gradient


class FullBatchesOnly(torch.nn.Module):
    """``extra`` is used where a batch has all its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(6, 3)
        self.extra = torch.nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)
        return out + self.extra(x) if len(x) == toys.ROWS else out


def unused_in_the_last_microbatch(world: World) -> None:
    """``extra`` has a gradient, from the first micro-batch: that must not hide the problem."""
    from shardlab.strategies.data_parallel.pytorch_ddp import PyTorchDDP
    from shardlab.workloads.base import Batch

    strategy = PyTorchDDP(Setup(FullBatchesOnly(), make_optimizer("sgd"), toys.loss, world.mesh))
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


def three_steps(
    world: World, strategy: Any, micro: int, uncounted: int | None = None
) -> tuple[list[float], Any]:
    """The losses and the tensors, of two ranks' batches. In one step nothing may count."""
    losses = []
    for step in range(3):
        batches = [b for r in range(2) for b in microbatches(step, r, micro)]
        if step == uncounted:
            batches = [replace(b, targets=b.targets * 0 - 100, count=0) for b in batches]
        share = batches if world.size == 1 else batches[micro * world.rank :][:micro]
        losses.append(float(strategy.gradients(share)))
        strategy.step()
    return losses, arrays(strategy.full_tensors())


def two_parts(world: World, name: str, blocks: Sequence[str] = ()) -> tuple[list[float], Any]:
    torch.manual_seed(0)
    make = naming.resolve(name, STRATEGIES, "strategy")
    optimizer = make_optimizer("adamw")
    setup = Setup(Again().double(), optimizer, toys.loss, world.mesh, blocks=blocks)
    return three_steps(world, make(setup), 2)


def same(found: tuple[list[float], Any], wanted: tuple[list[float], Any]) -> None:
    assert found[0] == pytest.approx(wanted[0], abs=1e-12)
    for name, value in wanted[1].items():
        np.testing.assert_allclose(found[1][name], value, atol=1e-10, err_msg=name)


SENT_AT_ONCE = ("simple_ddp_hook", "simple_ddp_async", "bucket_ddp_async", "zero1", "zero2")


@pytest.mark.parametrize("name", SENT_AT_ONCE)
def test_a_gradient_that_comes_twice_is_refused(name: str, ranks: GetRanks) -> None:
    """The first part has been sent when the second comes."""
    words = "gradient of 'layer.(weight|bias)' came twice in one backward .*use_reentrant=False"
    with pytest.raises(UsageError, match=words):
        ranks(2).run(two_parts, name, deadline_s=60)


@pytest.mark.long
@pytest.mark.parametrize("blocks", [(), ("layer",)], ids=["in the root", "in a block"])
def test_a_gradient_that_comes_twice_is_added_up(blocks: Any, ranks: GetRanks) -> None:
    """zero3 sends the second part by itself."""
    (wanted,) = ranks(1).run(two_parts, "single")
    for found in ranks(2).run(two_parts, "zero3", blocks, deadline_s=60):
        same(found, wanted)


# ------------------------------------------------------------------ a step without targets


def nothing_counts_in_step_1(world: World, name: str) -> tuple[list[float], Any]:
    return three_steps(world, build(name, "mlp", world), 1, uncounted=1)


def test_a_step_without_targets_is_no_nan_in_one_process_either(ranks: GetRanks) -> None:
    (wanted,) = ranks(1).run(nothing_counts_in_step_1, "single")
    assert wanted[0][1] == 0.0
    for found in ranks(2).run(nothing_counts_in_step_1, "simple_ddp"):
        same(found, wanted)


def unequal_microbatches(world: World) -> None:
    """One rank is told of one micro-batch more: it must end, not hang."""
    strategy = build("simple_ddp", "mlp", world)
    strategy.gradients(microbatches(0, world.rank, 1 + world.rank))
    strategy.step()


@pytest.mark.long
def test_a_rank_with_more_to_do_does_not_hang_for_ever(ranks: GetRanks) -> None:
    with pytest.raises(RankFailure):
        ranks(2).run(unequal_microbatches, deadline_s=3)


# ------------------------------------------------------------------ names of whole tensors


def with_tables(workload: Workload) -> Workload:
    """Its model has a tied head; here it also has buffers that are not persistent."""

    def make_model() -> torch.nn.Module:
        model = workload.make_model()
        for module in (model, model.get_submodule("blocks.0")):
            module.register_buffer("table", torch.randn(3), persistent=False)
        model.register_buffer("kept", torch.randn(3))
        return model

    return replace(workload, make_model=make_model)


def loaded_into_one_process(world: World, name: str) -> tuple[Any, Any]:
    """A strategy's tensors, and those of a model that has loaded its ``full_params()``."""
    shape = {"layers": 4, "heads": 2, "dim": 8, "context": 8, "vocab": 16}
    values = {"strategy.name": name, "model.options": shape, "data.source": "synthetic"}
    run = {"training.global_batch": 4, "launch.world": world.size, "launch.device": "cpu"}
    config = configs.load(None, {**values, **run})
    workload = with_tables(builders.build_workload(config))
    strategy = builders.build_strategy(config, workload, world)
    torch.manual_seed(99)
    model = workload.make_model()
    model.load_state_dict(strategy.full_params(), strict=True)
    return arrays(strategy.full_tensors()), arrays(model.state_dict())


WAYS = ("zero2", "zero3", "pytorch_zero3", "diloco", "tensor_parallel", "pipeline_1f1b")


@pytest.mark.parametrize("name", deep_unless(lambda name: name in WAYS, EVERY_STRATEGY))
def test_one_process_loads_whole_tensors_strictly(name: str, ranks: GetRanks) -> None:
    """Tied tensors under every name; what is not persistent is whole, too, but not among them."""
    for held, loaded in ranks(1 if name == "single" else 2).run(loaded_into_one_process, name):
        tables = {"table", "blocks.0.table"}
        assert loaded.keys() == (held.keys() - tables) | {"head.weight"}
        assert tables < held.keys()
        for key in held.keys() - tables:
            assert np.array_equal(loaded[key], held[key]), key


def test_a_buffer_that_one_of_two_modules_keeps_has_the_name_that_is_kept() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    for name, first_keeps in (("a", True), ("b", False)):
        buffer = torch.ones(1)
        for module, keeps in zip(model, (first_keeps, not first_keeps), strict=True):
            module.register_buffer(name, buffer, persistent=keeps)
    whole = ModelSpec.of(model)
    found = as_state_dict(whole.tensors, whole.tied, whole.unsaved)
    assert found.keys() == model.state_dict().keys()
