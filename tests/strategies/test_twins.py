"""PyTorch's own strategies on odd models: equal to one process in every step, or refused in a line.

And what every strategy refuses: lazy modules, sparse gradients. The models are in ``odd.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

import commands
import odd
from conftest import GetRanks
from shardlab import config as configs
from shardlab.errors import UsageError
from shardlab.naming import STRATEGIES
from shardlab.run import assemble
from shardlab.strategies import lockstep
from shardlab.workloads.base import Workload
from shardlab.world import World

FIND = {"find_unused_parameters": True}

# What runs the same on every rank, or misses gradients only.
FSDP_IS_RIGHT = (
    "no_blocks",
    "frozen_integers",
    "frozen_complex",
    "mixed",
    "nested",
    "no_parameters",
    "tied_outside",
    "twice",
    "same_module",
    "output_unused",
    "passed_through",
    "late_unused",
    "late_unused_one",
    "unused_one",
    "late_skip",
    "unfreezing",
    "old_weight_norm",
    "weight_norm",
    "attention",
    "recurrent",
    "expanded_buffer",
    "in_place",
    "two_forwards",
    *(("dataclass",) if hasattr(FSDPModule, "set_reduce_scatter_unused_params") else ()),
)

FSDP_REFUSES = {
    "zero_elements": "'blocks.0.extra' has no elements",
    "not_contiguous": "'blocks.0.extra' is not contiguous",
    "scalar": "doesn't support scalar parameters. Change extra",
    "complex": "'blocks.0.extra' is complex",
    "mixed_inside": "expects uniform original parameter dtype",
    "tied": "'blocks.1.0.weight' and 'blocks.0.0.weight' are one parameter",
    "hidden_output": "returns a Box, in which FSDP finds no tensor",
    "writes_into_dict": "blocks.0 writes into a dict that it is given",
    "collects_losses": "blocks.0 writes into a list that it is given",
    "other_values": "blocks.1 is called with another tensor as its 'weight'",
    "skip_one": "the same blocks in the same order",
    "swapped_one": "where the others came to 'gather blocks.",
    "keeps_references": "'blocks.0.0.weight' by a reference of its own",
    "gradient_hook": "'stem.weight' has a hook on its gradient",
    "reentrant": "gets its gradient in two parts",
    "view_in_place": "its output was changed in place",
    "parts": "used outside the forward of its block",
    "and_part": "used outside the forward of its block",
    "penalty": "used outside the forward of its block",
}

DDP_IS_RIGHT = (
    "zero_elements",
    "not_contiguous",
    "scalar",
    "frozen_integers",
    "frozen_complex",
    "tied",
    "twice",
    "dataclass",
    "collects_losses",
    "other_values",
    "swapped_one",
    "old_weight_norm",
    "attention",
    "recurrent",
    "keeps_references",
    "gradient_hook",
    "expanded_buffer",
    "view_in_place",
    "and_part",
    "penalty",
    "two_forwards",
    "all_complex",
    "one_parameter",
)
OF_SEVERAL_KINDS = ("complex", "mixed", "mixed_inside")  # of numbers: pytorch_ddp alone takes them
WITH_FIND = ("output_unused", "late_unused", "late_unused_one", "unused_one", "late_skip")
WITH_FIND += ("skip_one", "late_skip_one", "unfreezing", "dataclass", "penalty")

DDP_REFUSES = {
    "output_unused": ("'blocks.1.0.bias' got no gradient", {}),
    "late_unused": ("'blocks.0.extra.bias' got no gradient", {}),
    "late_unused_one": ("'blocks.0.extra.bias' got no gradient on rank 1", {}),
    "skip_one": ("'blocks.1.0.bias' got no gradient on rank 1", {}),
    "unfreezing": ("'blocks.0.0.bias' got no gradient", {}),
    "reentrant": ("the gradient of parameter 'blocks.1.0.bias' came twice", {}),
    "parts": ("the loss calls parts of the model", {}),
    "hidden_output": ("or an output that it cannot look into", FIND),
}

ALL_REFUSE = {
    "lazy": "'blocks.0.weight' has no shape yet (a lazy module)",
    "lazy_buffer": "'blocks.0.running_mean' has no shape yet (a lazy module)",
    "sparse": "module 'table' has sparse=True",
    "sparse_bag": "module 'table' has sparse=True",
    "max_norm": "module 'table' has max_norm",
}


def run_all(world: World, strategy: str, names: Any, options: dict[str, Any]) -> list[odd.Course]:
    return [odd.run(world, strategy, name, options) for name in names]


def complaints(
    ranks: GetRanks, size: int, strategy: str, names: Any, options: Any = None
) -> list[str]:
    by_rank = ranks(size).run(run_all, strategy, names, options or {}, deadline_s=100)
    found = []
    for i, name in enumerate(names):
        tolerance = 1e-6 if "mixed" in name else 1e-10  # the mixed ones compute in float32
        want = odd.plain(name, size)
        said = {odd.difference(courses[i], want, tolerance) for courses in by_rank}
        found += [f"{name}: {what}" for what in said if what]
    return found


# ------------------------------------------------------------------ FSDP2


@pytest.mark.long
@pytest.mark.parametrize(
    ("strategy", "size"),
    [("pytorch_zero2", 2), ("pytorch_zero3", 2), ("pytorch_zero3", 3), ("pytorch_hsdp", 2)],
)
def test_fsdp_is_right(strategy: str, size: int, ranks: GetRanks) -> None:
    assert complaints(ranks, size, strategy, FSDP_IS_RIGHT) == []


@pytest.mark.long
@pytest.mark.parametrize("name", FSDP_REFUSES)
def test_fsdp_refuses(name: str, ranks: GetRanks) -> None:
    with pytest.raises(UsageError) as caught:
        ranks(2).run(odd.run, "pytorch_zero3", name, {}, deadline_s=30)
    assert FSDP_REFUSES[name] in str(caught.value)
    assert "\n" not in str(caught.value)


def impatient(world: World, strategy: str, name: str) -> odd.Course:
    with mock.patch.object(lockstep, "PATIENCE_S", 0.5):
        return odd.run(world, strategy, name, {})


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["pytorch_zero2", "pytorch_zero3"])
def test_a_block_that_one_rank_skips_in_a_later_step(strategy: str, ranks: GetRanks) -> None:
    """The other ranks are in a collective that will never end: they must be ended too."""
    with pytest.raises(UsageError, match=r"rank 1 came to '.*' where the others did not"):
        ranks(2).run(impatient, strategy, "late_skip_one", deadline_s=30)


def as_in_2_11(world: World, names: Any) -> list[odd.Course]:
    """Where FSDP itself has no way to send zeros for a missing gradient."""
    public = vars(FSDPModule).get("set_reduce_scatter_unused_params")
    if public is None:
        return run_all(world, "pytorch_zero3", names, {})
    del FSDPModule.set_reduce_scatter_unused_params
    try:
        return run_all(world, "pytorch_zero3", names, {})
    finally:
        FSDPModule.set_reduce_scatter_unused_params = public  # type: ignore[method-assign]


@pytest.mark.long
def test_missing_gradients_in_torch_2_11(ranks: GetRanks) -> None:
    names = ("output_unused", "late_unused_one", "unused_one", "late_skip", "unfreezing")
    for courses in ranks(2).run(as_in_2_11, names, deadline_s=60):
        for name, course in zip(names, courses, strict=True):
            assert odd.difference(course, odd.plain(name, 2), 1e-10) is None, name


# ------------------------------------------------------------------ DDP and ZeroRedundancyOptimizer


@pytest.mark.long
@pytest.mark.parametrize(
    ("strategy", "size"), [("pytorch_ddp", 2), ("pytorch_ddp", 3), ("pytorch_zero1", 3)]
)
def test_ddp_is_right(strategy: str, size: int, ranks: GetRanks) -> None:
    names = (*DDP_IS_RIGHT, *(OF_SEVERAL_KINDS if strategy == "pytorch_ddp" else ()))
    assert complaints(ranks, size, strategy, names) == []


@pytest.mark.parametrize("strategy", ["pytorch_ddp", "pytorch_zero1"])
def test_ddp_that_looks_for_unused_parameters_is_right(strategy: str, ranks: GetRanks) -> None:
    assert complaints(ranks, 2, strategy, WITH_FIND, FIND) == []


@pytest.mark.long
@pytest.mark.parametrize("name", DDP_REFUSES)
def test_ddp_refuses(name: str, ranks: GetRanks) -> None:
    words, options = DDP_REFUSES[name]
    with pytest.raises(UsageError) as caught:
        ranks(2).run(odd.run, "pytorch_ddp", name, options, deadline_s=30)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_zero1_refuses_gaps(ranks: GetRanks) -> None:
    """It would broadcast the memory between the elements, and train something else."""
    assert complaints(ranks, 2, "pytorch_ddp", ("gaps",)) == []
    with pytest.raises(UsageError, match=r"'blocks.0.extra' has gaps in memory"):
        ranks(2).run(odd.run, "pytorch_zero1", "gaps", {}, deadline_s=30)


@pytest.mark.parametrize("name", OF_SEVERAL_KINDS)
def test_zero1_refuses_numbers_of_several_kinds(name: str, ranks: GetRanks) -> None:
    with pytest.raises(UsageError, match=r"^pytorch_zero1: .*same dense type"):
        ranks(2).run(odd.run, "pytorch_zero1", name, {}, deadline_s=30)


# ------------------------------------------------------------------ what every strategy refuses


def build(world: World, strategy: str, name: str) -> None:
    config = configs.load(None, {"strategy.name": strategy, "precision.compute": "fp64"})
    data: Any = ()
    workload = Workload(name, odd.CASES[name].make, odd.plain_loss, data)
    assemble.build_strategy(config, workload, world)


@pytest.mark.long
@pytest.mark.parametrize("strategy", [s for s in STRATEGIES if s != "single"])
def test_every_strategy_refuses(strategy: str, ranks: GetRanks) -> None:
    for name, words in ALL_REFUSE.items():
        said = ranks(2).run(refusal, strategy, name, deadline_s=30)
        assert all(words in text for text in said), said


def refusal(world: World, strategy: str, name: str) -> str:
    """On every rank, before anything is sent."""
    with pytest.raises(UsageError) as caught:
        build(world, strategy, name)
    return str(caught.value)


def test_one_process_refuses_them_too(ranks: GetRanks) -> None:
    """But not max_norm, which one process gets right."""
    for name, words in ALL_REFUSE.items():
        if name != "max_norm":
            assert words in ranks(1).run(refusal, "single", name)[0]
    ranks(1).run(build, "single", "max_norm")


@pytest.mark.parametrize(
    "strategy", ["simple_ddp_ga", "bucket_ddp_async", "pytorch_ddp", "pytorch_zero3"]
)
def test_a_sparse_gradient_is_refused_when_it_comes(strategy: str, ranks: GetRanks) -> None:
    with pytest.raises(UsageError, match="'table' got a sparse gradient"):
        ranks(2).run(odd.run, strategy, "sparse_function", {}, deadline_s=30)


@pytest.mark.parametrize("strategy", ["simple_ddp", "zero1", "pytorch_ddp", "pytorch_zero3"])
def test_a_step_in_which_nothing_trains(strategy: str, ranks: GetRanks) -> None:
    with pytest.raises(UsageError, match="depends on no parameter that requires a gradient"):
        ranks(2).run(odd.run, strategy, "nothing_trains", {}, deadline_s=30)


def test_a_looked_at_gradient_is_not_looked_at_again() -> None:
    """The check of each parameter's first gradient costs the steps after nothing."""
    from shardlab.strategies.refusals import refuse_sparse_gradients

    layer = nn.Linear(2, 2)
    refuse_sparse_gradients(dict(layer.named_parameters()))
    assert layer.weight._backward_hooks
    layer(torch.ones(1, 2)).sum().backward()
    assert not layer.weight._backward_hooks


# ------------------------------------------------------------------ as a user sees it

OWN = """
import torch
from torch.nn import functional as F
import odd
from shardlab.workloads.base import Batch, Workload

class Data:
    def __len__(self):
        return 64
    def batch(self, ids):
        x = torch.zeros(len(ids), 6)
        if len(ids):
            x[0, 1] = ids[0] % 2  # the batches of one rank begin with an odd number
        return Batch(x, torch.zeros(len(ids), dtype=torch.long), len(ids), len(ids))

class Model(odd.SkipsOnOneRank):
    def forward(self, x):
        return super().forward(x) if len(x) else self.head(self.stem(x))

workload = Workload(
    "mine", Model, odd.plain_loss, Data(), blocks=("blocks.0", "blocks.1"), couples_samples=True
)
"""


@pytest.mark.long
def test_a_rank_that_refuses_alone_is_heard(tmp_path: Path) -> None:
    """Not the others, whose connection it closes: one line, and exit code 2."""
    (tmp_path / "own.py").write_text(OWN)
    done = commands.shardlab(
        "train", "--workload", "own.py:workload", "--strategy", "pytorch_ddp", "--world", "2",
        "--steps", "3", "--set", "data.shuffle=false", "--set", "training.global_batch=2",
        cwd=tmp_path,
        PYTHONPATH=f"{Path(odd.__file__).parent}:{Path(assemble.__file__).parents[2]}",
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "'blocks.1.0.bias' got no gradient on rank 1" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
