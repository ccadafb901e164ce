"""A rank without rows, where the model cannot run a batch of none: equal to one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from conftest import GetRanks
from shardlab import config as configs
from shardlab.batch import NeverEmpty
from shardlab.training import builders, loop
from shardlab.training import run as running
from shardlab.workloads.base import Batch, Workload
from shardlab.workloads.no_rows import with_stand_ins
from shardlab.world import World

WIDTH, CLASSES = 6, 3


class Headed(nn.Module):
    """As Hugging Face's attention: heads of a size that zero rows do not tell. A part runs for some
    rows only, such as the first sample, and a buffer and a dropout must not see what stands in."""

    drift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.rare = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("drift", torch.zeros(WIDTH))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            heads = block(x).view(len(x), 2, -1)
            x = x + torch.tanh(heads).flatten(1)
        large = x[:, :1] > 50
        if bool(large.any()):
            x = x + large * self.rare(x)
        with torch.no_grad():
            self.drift += x.sum(0)
        out: Tensor = self.head(x)
        return out


class Rows:
    def __len__(self) -> int:
        return 61

    def batch(self, ids: Sequence[int]) -> Batch:
        rows = [torch.randn(WIDTH, generator=torch.Generator().manual_seed(int(i))) for i in ids]
        x = torch.stack(rows) if rows else torch.zeros(0, WIDTH)
        x[[i for i, number in enumerate(ids) if number == 0], 0] = 100
        return Batch(x, x[:, :CLASSES].argmax(1), len(rows), len(rows))


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch.inputs), batch.targets, reduction="sum")


def headed() -> Workload:
    blocks = ("blocks.0", "blocks.1")
    return Workload("headed", Headed, loss, Rows(), blocks=blocks, held_out=Rows())


def trained_and_evaluated(world: World, name: str) -> dict[str, Any]:
    """On a rank: steps of three samples, in which a rank of two has a micro-batch of none."""
    asked = {
        "model.workload": f"{__file__}:headed",
        "strategy.name": name,
        "strategy.options": {"find_unused_parameters": True} if name == "pytorch_ddp" else None,
        "precision.compute": "fp64",
        "training.steps": 3,
        "training.micro_batch": 1,
        "training.global_batch": 3,
        "launch.world": world.size,
        "training.optimizer": "adamw",
        "training.learning_rate": 0.05,
        "training.weight_decay": 0.1,
        "launch.device": "cpu",
    }
    config = configs.load(None, asked)
    workload = builders.build_workload(config)
    strategy = builders.build_strategy(config, workload, world)
    losses, empty = [], 0
    for microbatches in loop.Batches(workload, config, world):
        empty += sum(batch.samples == 0 for batch in microbatches)
        losses.append(float(strategy.gradients(microbatches)))
        strategy.step()
    result = running.make_evaluation(config, workload, world, strategy)()
    params = {name: p.tolist() for name, p in strategy.full_params().items() if name != "drift"}
    return {"losses": losses, "empty": empty, "evaluated": result["loss"], "params": params}


@pytest.mark.parametrize("name", ["simple_ddp", "zero3", "pytorch_ddp", "pytorch_zero3"])
def test_a_rank_without_rows_trains_and_evaluates_as_one_process(
    name: str, ranks: GetRanks
) -> None:
    """Also what no sample of a step uses (the part for the first sample) is left as it is."""
    alone = ranks(1).run(trained_and_evaluated, "single")[0]
    both = ranks(2).run(trained_and_evaluated, name)
    assert [found["empty"] for found in both] == [0, 3]
    for found in both:
        assert found["losses"] == pytest.approx(alone["losses"], abs=1e-12)
        assert found["evaluated"] == pytest.approx(alone["evaluated"], abs=1e-12)
        for key, value in alone["params"].items():
            difference = torch.tensor(found["params"][key]) - torch.tensor(value)
            assert float(difference.abs().max()) < 1e-6, key


def test_a_row_that_stands_in_leaves_no_trace() -> None:
    """Not even if its loss is NaN; the loss is told the row's own count."""
    model, seen = Headed(), []

    def divided(model: nn.Module, batch: Batch) -> Tensor:
        seen.append((batch.count, batch.samples))
        return loss(model, batch) / batch.count + torch.log(torch.tensor(-1.0)) * batch.count

    workload = with_stand_ins(Workload("headed", Headed, divided, Rows()))
    assert isinstance(workload.dataset, NeverEmpty)
    batch = workload.dataset.batch([])
    before = torch.get_rng_state()
    value = workload.loss(model, batch)
    value.backward()
    assert (batch.count, batch.samples, seen) == (0, 0, [(1, 1)])
    assert float(value.detach()) == 0
    assert all(bool((p.grad == 0).all()) for p in model.parameters() if p.grad is not None)
    assert model.head.weight.grad is not None
    assert bool((model.drift == 0).all())
    assert torch.equal(torch.get_rng_state(), before)
