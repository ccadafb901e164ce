"""PyTorch's own strategies as the zoo does not run them.

Without a search for unused parameters, in an older PyTorch, and with a rank that leaves the course.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

import commands
import zookeeper
from conformance import Trajectory
from conftest import GetRanks, deep_unless
from shardlab.errors import UsageError
from shardlab.naming import STRATEGIES
from shardlab.strategies import lockstep
from shardlab.world import World
from zoo import ZOO, Sample, score
from zookeeper import Verdict

# ------------------------------------------------------------------ FSDP2


def skips_later(model: nn.Module, batch: Sample) -> Tensor:
    """Rank 0 leaves block 1 out in the last step."""
    return score(model(batch.inputs, 1 if batch.step < 2 else batch.rank), batch)


def impatient(world: World, strategy: str) -> Trajectory:
    animal = replace(ZOO["block_on_one_rank"], loss=skips_later)
    with mock.patch.object(lockstep, "PATIENCE_S", 0.5):
        return zookeeper.train(animal, strategy, world, [0])


@pytest.mark.long
@pytest.mark.parametrize(
    "strategy", deep_unless(lambda name: "zero3" in name, ["pytorch_zero2", "pytorch_zero3"])
)
def test_a_block_that_one_rank_skips_in_a_later_step(strategy: str, ranks: GetRanks) -> None:
    """The other ranks are in a collective that will never end: they must be ended too."""
    with pytest.raises(UsageError, match=r"rank 0 came to '.*' where the others did not"):
        ranks(2).run(impatient, strategy, deadline_s=30)


def as_in_2_11(world: World, names: Any) -> list[Trajectory]:
    """Where FSDP itself has no way to send zeros for a missing gradient."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(FSDPModule, "set_reduce_scatter_unused_params", raising=False)
        return [zookeeper.train(ZOO[name], "pytorch_zero3", world, [0]) for name in names]


@pytest.mark.deep
def test_missing_gradients_in_torch_2_11(ranks: GetRanks) -> None:
    names = (
        "output_unused",
        "part_on_one_rank_later",
        "part_on_one_rank",
        "layer_drop",
        "frozen_later",
    )
    for rank, courses in enumerate(ranks(2).run(as_in_2_11, names, deadline_s=60)):
        for name, course in zip(names, courses, strict=True):
            want = zookeeper.refer(ZOO[name], 2)
            assert isinstance(want, Trajectory)
            assert zookeeper.first_difference(course, want, rank, ZOO[name].tolerance) is None, name


# ------------------------------------------------------------------ DDP and ZeroRedundancyOptimizer

# Every parameter of these has a gradient in every step.
ALL_USED = (
    "all_complex", "attention", "called_twice_with_a_buffer", "collected_losses",
    "data_dependent_order", "dataclass_of_the_model", "expanded_buffer", "frozen_numbers",
    "functional_call", "in_place_on_views", "integer_parameter", "kept_references",
    "loss_and_a_part", "lstm", "only_the_head_trains", "opaque_output_of_the_model",
    "penalty_in_loss", "reentrant_blocks", "scalars", "shared_thrice", "tied_across_blocks",
    "users_backward_hooks", "weight_norm_old", "zero_elements",
)  # fmt: skip
# ZeroRedundancyOptimizer refuses these.
WITH_DDP = ("complex_parameter", "mixed_dtypes", "mixed_in_a_block", "non_contiguous")

SOME_UNUSED = {
    "output_unused": "'blocks.0.linear.bias' got no gradient",
    "part_unused_later": "'blocks.0.extra.bias' got no gradient",
    "part_on_one_rank_later": "'blocks.0.extra.bias' got no gradient on rank 1",
    "block_on_one_rank": "'blocks.1.linear.bias' got no gradient on rank 0",
    "frozen_later": "'blocks.0.linear.bias' got no gradient",
    "reentrant_twice": "the gradient of parameter 'blocks.0.linear.bias' came twice",
    "loss_of_parts": "the loss calls parts of the model",
}


def without_a_search(ranks: GetRanks, size: int, strategy: str, names: Any) -> list[Verdict]:
    """By its full name a strategy has its own options, not those of the zoo."""
    cells = [(name, STRATEGIES[strategy]) for name in names]
    return zookeeper.run(ranks, size, zookeeper.of_the_zoo, cells)


@pytest.mark.deep
@pytest.mark.parametrize(
    ("strategy", "size"), [("pytorch_ddp", 2), ("pytorch_ddp", 3), ("pytorch_zero1", 3)]
)
def test_ddp_is_right(strategy: str, size: int, ranks: GetRanks) -> None:
    names = (*ALL_USED, *(WITH_DDP if strategy == "pytorch_ddp" else ()))
    verdicts = without_a_search(ranks, size, strategy, names)
    found = dict(zip(names, verdicts, strict=True))
    assert {name: str(v) for name, v in found.items() if v.kind != "equal"} == {}


@pytest.mark.long
def test_ddp_refuses(ranks: GetRanks) -> None:
    verdicts = without_a_search(ranks, 2, "pytorch_ddp", SOME_UNUSED)
    for words, verdict in zip(SOME_UNUSED.values(), verdicts, strict=True):
        assert verdict.kind == "refused", verdict
        assert words in verdict.text
        assert ("find_unused_parameters: true" in verdict.text) == ("no gradient" in words)
        assert "\n" not in verdict.text


def test_a_looked_at_gradient_is_not_looked_at_again() -> None:
    """The check of each parameter's first gradient costs the steps after nothing."""
    from shardlab.strategies.model_checks import refuse_sparse_gradients

    layer = nn.Linear(2, 2)
    refuse_sparse_gradients(dict(layer.named_parameters()))
    assert layer.weight._backward_hooks
    layer(torch.ones(1, 2)).sum().backward()
    assert not layer.weight._backward_hooks


# ------------------------------------------------------------------ as a user sees it

OWN = """
import torch
from torch import nn
from torch.nn import functional as F
from shardlab.workloads.base import Batch, Workload

class Data:
    def __len__(self):
        return 64
    def batch(self, ids):
        x = torch.zeros(len(ids), 6)
        if len(ids):
            x[0, 1] = ids[0] % 2  # the batches of one rank begin with an odd number
        return Batch(x, torch.zeros(len(ids), dtype=torch.long), len(ids), len(ids))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
    def forward(self, x):
        return self.head(self.block(x) if len(x) and x[0, 1] == 0 else x)

def loss(model, batch):
    return F.cross_entropy(model(batch.inputs), batch.targets, reduction="sum")

workload = Workload("mine", Model, loss, Data(), blocks=("block",), couples_samples=True)
"""


@pytest.mark.long
def test_a_rank_that_refuses_alone_is_heard(tmp_path: Path) -> None:
    """Not the others, whose connection it closes: one line, and exit code 2."""
    (tmp_path / "own.py").write_text(OWN)
    done = commands.shardlab(
        "train", "--workload", "own.py:workload", "--strategy", "pytorch_ddp", "--world", "2",
        "--steps", "3", "--set", "data.shuffle=false", "--set", "training.global_batch=2",
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "'block.bias' got no gradient on rank 1" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
