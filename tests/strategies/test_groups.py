"""Groups of ranks that follow the nodes: zero3's and hybrid sharding's, a hierarchical all-reduce.

The ranks of one machine are taken for two nodes with two ranks each; on real hosts, see
test_wire.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import toys
from conformance import ALL_CASES, REFUSED, SUMS, arrays, conform, make_optimizer
from conftest import GetRanks
from resuming import losses_of, settings, state_at, train
from shardlab import comm, naming, numbers
from shardlab import config as configs
from shardlab.checkpoint import manifest as manifests
from shardlab.errors import Halt, UsageError
from shardlab.guard import drift, sequence
from shardlab.naming import STRATEGIES
from shardlab.proof import evidence
from shardlab.proof.subjects import Subject
from shardlab.run import assemble, loop
from shardlab.strategies.base import Setup
from shardlab.strategies.bucket_ddp_async import BucketDDPAsync
from shardlab.strategies.simple_ddp import SimpleDDP
from shardlab.strategies.zero3 import Zero3
from shardlab.world import World

NODES = {"hierarchical": True, "ranks_per_node": 2}
SMALL = {**NODES, "bucket_mb": 1e-4, "first_bucket_mb": 1e-4}  # many buckets: many chains at once
FEW_CASES = [c for c in ALL_CASES if c.micro == 2 and c.optimizer == "adamw"]


def build(world: World, name: str, toy: str, per_node: int = 0, **options: Any) -> Any:
    make = naming.resolve(name, STRATEGIES, "strategy")
    model, blocks = toys.build(toy, world.rank), toys.BLOCKS[toy]
    adamw = make_optimizer("adamw")
    return make(
        Setup(model, adamw, toys.loss, world.mesh, blocks=blocks, ranks_per_node=per_node),
        **options,
    )


def steps(strategy: Any, world: World, count: int, micro: int = 2) -> None:
    for step in range(count):
        strategy.gradients([toys.batch(step, world.rank, m) for m in range(micro)])
        strategy.step()


# ------------------------------------------------------------------ right, and planted bugs


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("zero3", {"shards": 2}),
        ("zero3", {"shards": 1}),
        ("bucket_ddp_async", NODES),
        ("bucket_ddp_async", SMALL),
        ("pytorch_hsdp", {}),
    ],
)
def test_equals_one_process(name: str, options: dict[str, Any], ranks: GetRanks) -> None:
    cases = [c for c in FEW_CASES if c.toy not in REFUSED.get(name, ())]
    assert conform(ranks(4), name, cases, options) == []


class ForgetsTheOtherGroups(Zero3):
    """Each group trains on its own data alone."""

    def _cross(self, units: Any) -> None: ...


class SumsInsideTheGroup(Zero3):
    """The wrong process group: neighbours add up parts that are not of the same elements."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.between = self.peers


class ForgetsWhatOnlyEarlierMicrobatchesUsed(Zero3):
    """What the last micro-batch does not use stays inside the group."""

    def _cross(self, units: Any) -> None:
        super()._cross(self.scattered if units is self.units else units)


class Sometimes(torch.nn.Module):
    """Its second block runs where the data says so."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(3))
        self.head = torch.nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks if len(x) and x[0, 0] > 0 else self.blocks[::2]:
            x = torch.tanh(block(x))
        out: torch.Tensor = self.head(x)
        return out


def only_in_the_first_microbatch(world: World, make: Any, options: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    blocks = [f"blocks.{i}" for i in range(3)]
    setup = Setup(Sometimes().double(), make_optimizer("sgd"), toys.loss, world.mesh, blocks=blocks)
    strategy = make(setup, **options)
    for step in range(3):
        batches = [toys.batch(step, world.rank, micro) for micro in range(3)]
        signs = (1, -1, -1)  # in the second the order is still that of the first
        strategy.gradients(
            [replace(b, inputs=s * b.inputs.abs()) for b, s in zip(batches, signs, strict=True)]
        )
        strategy.step()
    return arrays(strategy.full_params())


def test_a_block_that_the_last_microbatch_does_not_use(ranks: GetRanks) -> None:
    """Its gradient came in an earlier one, and must cross all the same."""
    plain = ranks(4).run(only_in_the_first_microbatch, SimpleDDP, {})[0]
    for make, is_right in ((Zero3, True), (ForgetsWhatOnlyEarlierMicrobatchesUsed, False)):
        for found in ranks(4).run(only_in_the_first_microbatch, make, {"shards": 2}):
            close = [np.allclose(found[n], value, rtol=0, atol=1e-10) for n, value in plain.items()]
            assert all(close) == is_right


class ForgetsTheOtherNodes(BucketDDPAsync):
    """Nothing crosses."""

    def _by_nodes(self, flat: torch.Tensor, label: str) -> Iterator[comm.Pending]:
        mine = flat.view(self.node.size(), -1)[self.node.rank()]
        yield comm.reduce_scatter(mine, flat, self.node, label=label, async_op=True)
        yield comm.all_gather(flat, mine, self.node, label=label, async_op=True)


class GathersTooEarly(BucketDDPAsync):
    """The other parts of the bucket are those before they were summed between the nodes."""

    def _by_nodes(self, flat: torch.Tensor, label: str) -> Iterator[comm.Pending]:
        mine = flat.view(self.node.size(), -1)[self.node.rank()]
        assert self.between is not None
        yield comm.reduce_scatter(mine, flat, self.node, label=label, async_op=True)
        yield comm.all_gather(flat, mine, self.node, label=label, async_op=True)
        yield comm.all_reduce(mine, self.between, label=label, async_op=True)


@pytest.mark.long
@pytest.mark.parametrize(
    ("saboteur", "options"),
    [
        (ForgetsTheOtherGroups, {"shards": 2}),
        (SumsInsideTheGroup, {"shards": 2}),
        (ForgetsTheOtherNodes, NODES),
        (GathersTooEarly, NODES),
    ],
)
def test_catches(saboteur: type, options: dict[str, Any], ranks: GetRanks) -> None:
    assert conform(ranks(4), saboteur, FEW_CASES, options), saboteur.__doc__


def checked_before_each(world: World, name: str, options: dict[str, Any]) -> int:
    """With the guard that waits for the others before each launch, also where ranks use other
    blocks: an order that is not the same everywhere would hang."""
    made = 0
    for toy in ("unused", "branches", "mlp"):
        comm.LEDGER.reset()
        comm.LEDGER.check = sequence.Sequence(world).check
        strategy = build(world, name, toy, **options)
        steps(strategy, world, 3)
        sequence.Sequence(world).compare()
        made += comm.LEDGER.calls
        comm.LEDGER.check = None
    return made


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "options"), [("zero3", {"shards": 2}), ("bucket_ddp_async", SMALL)]
)
def test_one_order_on_all_ranks(name: str, options: dict[str, Any], ranks: GetRanks) -> None:
    assert len(set(ranks(4).run(checked_before_each, name, options, deadline_s=90))) == 1


# ------------------------------------------------------------------ which groups


def refused(world: World, name: str, per_node: int, options: dict[str, Any]) -> None:
    build(world, name, "mlp", per_node, **options)


@pytest.mark.parametrize(
    ("name", "per_node", "options", "words"),
    [
        (
            "zero3",
            0,
            {"shards": 3},
            "zero3: 2 ranks cannot form groups of 3; set its option shards",
        ),
        ("bucket_ddp_async", 0, {"hierarchical": True}, "several nodes with several ranks on each"),
        ("bucket_ddp_async", 1, {"hierarchical": True}, "several nodes with several ranks on each"),
        ("bucket_ddp_async", 0, NODES, "several nodes with several ranks on each"),
    ],
)
def test_refusals(
    name: str, per_node: int, options: dict[str, Any], words: str, ranks: GetRanks
) -> None:
    with pytest.raises(UsageError, match=words):
        ranks(2).run(refused, name, per_node, options)


def hybrid_groups(world: World, per_node: int) -> tuple[int, int]:
    made = (
        build(world, "pytorch_hsdp", "mlp", per_node),
        build(world, "bucket_ddp_async", "mlp", per_node or 2, hierarchical=True),
    )
    return made[0].shards, made[1].node.size()


@pytest.mark.long
def test_the_default_follows_the_nodes(ranks: GetRanks) -> None:
    assert ranks(6).run(hybrid_groups, 3) == [(3, 3)] * 6
    assert ranks(6).run(hybrid_groups, 0) == [(2, 2)] * 6


def test_nodes_from_what_each_rank_knows() -> None:
    two_by_two = [(0, 2), (1, 2), (0, 2), (1, 2)]
    assert numbers.ranks_per_node(two_by_two) == 2
    assert numbers.ranks_per_node([(0, 1)] * 3) == 1
    assert numbers.ranks_per_node([(rank, 4) for rank in range(4)]) == 0  # one node
    assert numbers.ranks_per_node([(0, 2), (1, 2), (0, 1)]) == 0  # other numbers
    assert numbers.ranks_per_node([(0, 2), (0, 2), (1, 2), (1, 2)]) == 0  # srun's cyclic ranks


# ------------------------------------------------------------------ bytes on each link

# Measured with interface counters: bytes that a host sends, in tensors (hosts x ranks on each).
MEASURED = {
    ("all_reduce", True): {(2, 2): 1.5, (2, 1): 1.0, (3, 2): 1.667, (2, 3): 1.667},
    ("reduce_scatter", True): {(2, 2): 1.0, (2, 1): 0.5, (3, 2): 1.333, (2, 3): 1.5},
    ("all_gather", True): {(2, 2): 1.25, (2, 1): 0.5, (3, 2): 1.5, (2, 3): 1.5},
    ("reduce_scatter", False): {(2, 2): 1.5, (2, 1): 1.0, (3, 2): 1.667, (2, 3): 1.667},
    ("all_gather", False): {(2, 2): 0.75, (2, 1): 0.5, (3, 2): 0.833, (2, 3): 0.833},
}


@pytest.mark.parametrize(("op", "ours"), MEASURED)
def test_gloos_bytes_between_hosts(op: str, ours: bool) -> None:
    for (hosts, ranks), tensors in MEASURED[op, ours].items():
        nodes = tuple(rank // ranks for rank in range(hosts * ranks))
        by_rank = [numbers.link_shares(op, nodes, r, "gloo", ours) for r in range(hosts * ranks)]
        for host in range(hosts):
            sent = sum(between for _, between in by_rank[host * ranks : (host + 1) * ranks])
            assert sent == pytest.approx(tensors, abs=2e-3)


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "reduce_scatter", "broadcast"])
@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_all_that_is_sent_goes_over_a_link(op: str, n: int, backend: str) -> None:
    """The sum over the ranks is what the best algorithm sends: Gloo's, as ours use it, are such."""
    total = sum(sum(numbers.link_shares(op, (0,) * n, r, backend)) for r in range(n))
    assert total == pytest.approx(n * numbers.wire_bytes(op, 1, n))
    assert numbers.link_shares("barrier", (0, 1), 0, backend) == (0.0, 0.0)


def crossing(world: World, name: str, options: dict[str, Any]) -> tuple[int, int, int]:
    """Bytes of sums in a step: inside the node, between the nodes; and of the model."""
    comm.LEDGER.reset()
    comm.LEDGER.ranks_per_node = 2
    strategy = build(world, name, "mlp", **options)
    steps(strategy, world, 2)
    before = comm.LEDGER.sent_between
    comm.LEDGER.take()
    steps(strategy, world, 1)
    rows = [e for e in comm.LEDGER.take() if e["bytes"] > 64]
    comm.LEDGER.ranks_per_node = 0
    inside, between = (sum(e[f"sent_{where}"] for e in rows) for where in ("inside", "between"))
    assert comm.LEDGER.sent_between - before >= between
    assert any(e["op"] in SUMS for e in rows)
    return inside, between, sum(p.numel() * 8 for p in toys.build("mlp", 0).parameters())


def test_a_hierarchical_sum_sends_less_between_nodes(ranks: GetRanks) -> None:
    """2Ψ(g-1)/g from each of g nodes, in place of 2Ψ(n-1)/n of the ring of all n ranks."""
    flat = ranks(4).run(crossing, "bucket_ddp_async", {})
    nodes = ranks(4).run(crossing, "bucket_ddp_async", NODES)
    psi = flat[0][2]
    assert flat[0][1] + flat[1][1] == pytest.approx(1.5 * psi, rel=0.02)
    assert nodes[0][1] + nodes[1][1] == pytest.approx(psi, rel=0.02)
    assert sum(inside for inside, _, _ in nodes) == pytest.approx(4 * psi, rel=0.02)


def test_zero3_in_groups_sends_a_shard_between_nodes_once(ranks: GetRanks) -> None:
    """Ψ/s from each rank, though there are two micro-batches; nothing else leaves the node."""
    groups = ranks(4).run(crossing, "zero3", {"shards": 2})
    psi = groups[0][2]
    assert all(between == pytest.approx(psi / 2, rel=0.05) for _, between, _ in groups)


def told_by_compare(world: World, strategy: str, options: dict[str, Any]) -> dict[str, Any]:
    """As compare asks a rank of a cell; here two ranks are taken for a node."""
    config = configs.load(
        None,
        {
            "strategy.name": strategy, "strategy.options": options, "model.size": "tiny",
            "training.global_batch": 4, "data.source": "synthetic", "launch.device": "cpu",
        },
    )  # fmt: skip
    nodes = replace(world, ranks_per_node=2)
    comm.LEDGER.reset()
    workload = assemble.build_workload(config)
    made = assemble.build_strategy(config, workload, nodes)
    batches = loop.Batches(workload, config, world)
    for _ in range(2):
        made.gradients(next(batches))
        made.step()
    subject = Subject(workload, 0, [[next(batches)] * world.size], ranks_per_node=2)
    found = evidence.sent_per_step(made, subject, config, nodes)
    comm.LEDGER.ranks_per_node = 0
    psi = subject.job(config).psi
    return {**found, "per_psi": found["between_nodes"] / psi * 8 / 4}  # of float32, not float64


@pytest.mark.long
@pytest.mark.parametrize(
    ("strategy", "options", "source", "share"),
    [
        ("bucket_ddp_async", {}, "ledger", 1.5),
        ("bucket_ddp_async", {"hierarchical": True}, "ledger", 1.0),
        ("pytorch_ddp", {}, "profiler", 1.5),
        ("pytorch_hsdp", {}, "profiler", 1.0),
        ("zero3", {"shards": 2}, "ledger", 1.0),
    ],
)
def test_compare_says_what_a_node_sends(
    strategy: str, options: dict[str, Any], source: str, share: float, ranks: GetRanks
) -> None:
    for told in ranks(4).run(told_by_compare, strategy, options, deadline_s=90):
        assert told["source"] == source
        assert told["per_psi"] == pytest.approx(share, rel=0.03)


# ------------------------------------------------------------------ checkpoints and guards


@pytest.mark.long
def test_checkpoints_and_guards(ranks: GetRanks, tmp_path: Path) -> None:
    """A run with groups goes on bit for bit, and elsewhere; replicas are saved once."""
    common: dict[str, Any] = {
        "precision.compute": "fp64", "training.schedule": "constant", "training.warmup_steps": 0,
        "guard.check_steps": 3, "guard.check_every": 1, "guard.drift_every": 1,
    }  # fmt: skip
    _, plain = train(ranks, 1, settings(tmp_path / "one", **common, **{"strategy.name": "single"}))
    grouped = {"strategy.name": "zero3", "strategy.options": {"shards": 2}}
    values = settings(tmp_path / "groups", **common, **grouped)
    _, whole = train(ranks, 4, values)
    want = state_at(plain, 6)
    close(state_at(whole, 6), want)
    path = whole / "checkpoints" / "step-000003"
    for name, tensor in manifests.read(path).tensors.items():
        assert sum(chunk.length for chunk in tensor.chunks) == tensor.size, name
    size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    one = plain / "checkpoints" / "step-000003"
    assert size < 1.5 * sum(file.stat().st_size for file in one.glob("*.safetensors"))
    values["checkpoint"]["resume"] = str(path)
    _, again = train(ranks, 4, values)
    assert losses_of(again) == {s: loss for s, loss in losses_of(whole).items() if s >= 3}
    same = state_at(whole, 6)
    assert all(torch.equal(value, same[name]) for name, value in state_at(again, 6).items())
    for size, strategy, options in ((2, "zero3", {}), (2, "pytorch_ddp", {})):
        values["strategy"] |= {"name": strategy, "options": options}
        _, elsewhere = train(ranks, size, values)
        close(state_at(elsewhere, 6), want)


def close(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, rtol=0, atol=1e-8, err_msg=name)


def drifting(world: World) -> str:
    strategy = build(world, "zero3", "mlp", shards=2)
    steps(strategy, world, 1)
    drift.check(strategy, world, 0)
    if world.rank == 3:
        strategy.units[0].shard[0] += 1e-12
    try:
        drift.check(strategy, world, 1)
    except Halt as halt:
        return str(halt)
    return ""


def test_a_group_that_drifts_is_found(ranks: GetRanks) -> None:
    messages = ranks(4).run(drifting)
    assert len(set(messages)) == 1
    assert "replicas have drifted apart" in messages[0]
    assert "rank" in messages[0]
    assert "3" in messages[0]


def whole_and_back(world: World) -> list[bool]:
    """state_dict of one, into another."""
    first, second = (build(world, "zero3", "buffers", shards=2) for _ in range(2))
    steps(first, world, 2)
    second.load_state_dict(first.state_dict())
    steps(first, world, 1)
    steps(second, world, 1)
    ours, theirs = first.full_params(), second.full_params()
    return [torch.equal(value, theirs[name]) for name, value in ours.items()]


def test_state_as_whole_tensors(ranks: GetRanks) -> None:
    assert all(all(same) for same in ranks(4).run(whole_and_back))
