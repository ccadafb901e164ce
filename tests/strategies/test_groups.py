"""Groups of ranks that follow the nodes: those of hybrid sharding.

The ranks of one machine are taken for two nodes with two ranks each; on real hosts, see
test_wire.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import toys
from conformance import SUMS, build
from conftest import GetRanks, deep_unless
from resuming import losses_of, settings, state_at, train
from shardlab import config as configs
from shardlab import wire
from shardlab.checkpoint import manifest as manifests
from shardlab.errors import Halt, UsageError
from shardlab.guard import drift
from shardlab.ledger import LEDGER
from shardlab.proof import evidence
from shardlab.proof.subjects import Subject
from shardlab.training import builders, loop
from shardlab.world import World


def steps(strategy: Any, world: World, count: int, micro: int = 2) -> None:
    for step in range(count):
        strategy.gradients([toys.batch(step, world.rank, m) for m in range(micro)])
        strategy.step()


# ------------------------------------------------------------------ which groups


def hybrid_groups(world: World, per_node: int, options: dict[str, Any]) -> int:
    size: int = build("pytorch_hsdp", "mlp", world, per_node=per_node, **options).per_group
    return size


@pytest.mark.long
def test_refusals(ranks: GetRanks) -> None:
    words = "pytorch_hsdp: 4 ranks cannot form groups of 3; set its option shards"
    with pytest.raises(UsageError, match=words):
        ranks(4).run(hybrid_groups, 0, {"shards": 3})


@pytest.mark.long
def test_the_default_follows_the_nodes(ranks: GetRanks) -> None:
    assert ranks(6).run(hybrid_groups, 3, {}) == [3] * 6
    assert ranks(6).run(hybrid_groups, 0, {}) == [2] * 6


def test_nodes_from_what_each_rank_knows() -> None:
    two_by_two = [(0, 2), (1, 2), (0, 2), (1, 2)]
    assert wire.ranks_per_node(two_by_two) == 2
    assert wire.ranks_per_node([(0, 1)] * 3) == 1
    assert wire.ranks_per_node([(rank, 4) for rank in range(4)]) == 0  # one node
    assert wire.ranks_per_node([(0, 2), (1, 2), (0, 1)]) == 0  # other numbers
    assert wire.ranks_per_node([(0, 2), (0, 2), (1, 2), (1, 2)]) == 0  # srun's cyclic ranks


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
        by_rank = [wire.link_shares(op, nodes, r, "gloo", ours) for r in range(hosts * ranks)]
        for host in range(hosts):
            sent = sum(between for _, between in by_rank[host * ranks : (host + 1) * ranks])
            assert sent == pytest.approx(tensors, abs=2e-3)


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "reduce_scatter", "broadcast"])
@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_all_that_is_sent_goes_over_a_link(op: str, n: int, backend: str) -> None:
    """The sum over the ranks is what the best algorithm sends: Gloo's, as ours use it, are such."""
    total = sum(sum(wire.link_shares(op, (0,) * n, r, backend)) for r in range(n))
    assert total == pytest.approx(n * wire.wire_bytes(op, 1, n))
    assert wire.link_shares("barrier", (0, 1), 0, backend) == (0.0, 0.0)


def crossing(world: World) -> tuple[int, int]:
    """Bytes of sums in a step between the nodes; and of the model."""
    LEDGER.reset()
    LEDGER.ranks_per_node = 2
    strategy = build("bucket_ddp_async", "mlp", world)
    steps(strategy, world, 2)
    before = LEDGER.sent_between
    LEDGER.take()
    steps(strategy, world, 1)
    rows = [e for e in LEDGER.take() if e["bytes"] > 64]
    LEDGER.ranks_per_node = 0
    between = sum(e["sent_between"] for e in rows)
    assert LEDGER.sent_between - before >= between
    assert any(e["op"] in SUMS for e in rows)
    return between, sum(p.numel() * 8 for p in toys.build("mlp", 0).parameters())


@pytest.mark.long
def test_the_ledger_says_what_crosses(ranks: GetRanks) -> None:
    """The ring of all n ranks sends 2Ψ(n-1)/n from each node."""
    (first, psi), (second, _), *_ = ranks(4).run(crossing)
    assert first + second == pytest.approx(1.5 * psi, rel=0.02)


def told_by_compare(world: World, strategy: str) -> dict[str, Any]:
    """As compare asks a rank of a cell; here two ranks are taken for a node."""
    config = configs.load(
        None,
        {
            "strategy.name": strategy, "model.size": "tiny", "training.global_batch": 4,
            "data.source": "synthetic", "launch.device": "cpu",
        },
    )  # fmt: skip
    nodes = replace(world, ranks_per_node=2)
    LEDGER.reset()
    workload = builders.build_workload(config)
    made = builders.build_strategy(config, workload, nodes)
    batches = loop.Batches(workload, config, world)
    for _ in range(2):
        made.gradients(next(batches))
        made.step()
    subject = Subject(workload, 0, [[next(batches)] * world.size], ranks_per_node=2)
    found = evidence.sent_per_step(made, subject, config, nodes)
    LEDGER.ranks_per_node = 0
    psi = subject.job(config).psi
    return {**found, "per_psi": found["between_nodes"] / psi * 8 / 4}  # of float32, not float64


TOLD = [
    ("pytorch_hsdp", "profiler", 1.0),
    ("bucket_ddp_async", "ledger", 1.5),
    ("pytorch_ddp", "profiler", 1.5),
]


@pytest.mark.long
@pytest.mark.parametrize(
    ("strategy", "source", "share"), deep_unless(lambda name, *_: name == "pytorch_hsdp", TOLD)
)
def test_compare_says_what_a_node_sends(
    strategy: str, source: str, share: float, ranks: GetRanks
) -> None:
    for told in ranks(4).run(told_by_compare, strategy, deadline_s=90):
        assert told["source"] == source
        assert told["per_psi"] == pytest.approx(share, rel=0.03)


# ------------------------------------------------------------------ checkpoints and guards


@pytest.mark.long
def test_checkpoints_and_guards(ranks: GetRanks, tmp_path: Path) -> None:
    """A run with groups goes on bit for bit; replicas are saved once."""
    values = settings(tmp_path, **{
        "strategy.name": "pytorch_hsdp", "strategy.options": {"shards": 2},
        "precision.compute": "fp64", "guard.check_steps": 3, "guard.drift_every": 1,
    })  # fmt: skip
    _, whole = train(ranks, 4, values)
    path = whole / "checkpoints" / "step-000003"
    tensors = manifests.read(path).tensors
    for name, tensor in tensors.items():
        assert sum(chunk.length for chunk in tensor.chunks) == tensor.size, name
    size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    assert size < 1.5 * 8 * sum(tensor.size for tensor in tensors.values())
    values["checkpoint"]["resume"] = str(path)
    _, again = train(ranks, 4, values)
    assert losses_of(again) == {s: loss for s, loss in losses_of(whole).items() if s >= 3}
    wanted, found = state_at(whole, 6), state_at(again, 6)
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


def drifting(world: World) -> str:
    strategy = build("pytorch_hsdp", "mlp", world, shards=2)
    steps(strategy, world, 1)
    drift.check(strategy, world, 0)
    if world.rank == 3:
        with torch.no_grad():
            next(iter(strategy.params.values())).to_local().add_(1e-12)
    try:
        drift.check(strategy, world, 1)
    except Halt as halt:
        return str(halt)
    return ""


@pytest.mark.long
def test_a_group_that_drifts_is_found(ranks: GetRanks) -> None:
    messages = ranks(4).run(drifting)
    assert len(set(messages)) == 1
    assert "replicas have drifted apart" in messages[0]
    assert "rank" in messages[0]
    assert "3" in messages[0]
