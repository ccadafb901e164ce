"""Evaluation: every held-out sample once, whatever the world and the strategy."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import commands
import toys
from conftest import GetRanks
from shardlab import config as configs
from shardlab.errors import UsageError
from shardlab.naming import STRATEGIES
from shardlab.run import assemble, evaluate, loop, rank
from shardlab.run.evaluate import Evaluation
from shardlab.workloads.base import Batch, Workload
from shardlab.world import World


class Rows:
    """Sample i, whatever batch it is in."""

    def __init__(self, length: int, first: int = 0) -> None:
        self.length, self.first = length, first
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.length

    def batch(self, ids: Sequence[int]) -> Batch:
        self.read += [int(i) for i in ids]
        rows = [
            torch.randn(6, generator=torch.Generator().manual_seed(self.first + int(i)))
            for i in ids
        ]
        x = torch.stack(rows) if rows else torch.empty(0, 6)
        return Batch(inputs=x, targets=x[:, :3].argmax(1), count=len(rows), samples=len(rows))


class Net(nn.Module):
    """Blocks, BatchNorm and dropout: whoever forgets eval mode or rank 0's buffers is seen."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.5)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.outlet = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.norm(self.inlet(x)))
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        out: Tensor = self.outlet(x)
        return out


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch.inputs), batch.targets, reduction="sum")


def sums(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    logits = model(batch.inputs)
    return {
        "loss": F.cross_entropy(logits, batch.targets, reduction="sum"),
        "correct": (logits.argmax(1) == batch.targets).sum(),
        "logits": logits.sum(),
    }


def make_workload(held_out: int = 21) -> Workload:
    blocks = ("blocks.0", "blocks.1", "blocks.2")
    rows = Rows(64), Rows(held_out, first=1000)
    return Workload("net", Net, loss, rows[0], blocks=blocks, held_out=rows[1], evaluate=sums)


def trained_and_evaluated(world: World, name: str, held_out: int) -> list[dict[str, Any]]:
    """On a rank: evaluate, two steps, evaluate, a step, evaluate; then one process on the result.

    Once before the first step: a strategy that looks at its first steps must not be misled.
    """
    workload = make_workload(held_out)
    config = configs.load(
        None,
        {
            "strategy.name": name,
            "precision.compute": "fp64",
            "training.steps": 3,
            "training.accumulate": 2,
            "training.global_batch": 12,
            "launch.device": "cpu",
        },
    )
    strategy: Any = assemble.build_strategy(config, workload, world)
    run = rank.make_evaluation(config, workload, world, strategy)
    results = [run()]
    for i, microbatches in enumerate(loop.Batches(workload, config, world)):
        strategy.gradients(microbatches)
        strategy.step()
        if i > 0:
            results.append(run())
    assert isinstance(workload.held_out, Rows)
    full = strategy.full_params()
    model = Net().double()
    with torch.no_grad():
        for key, tensor in (*model.named_parameters(), *model.named_buffers()):
            tensor.copy_(full[key])
    assert all(m.training for m in strategy.model.modules())  # as it was
    alone = Evaluation(_Holder(model), workload, _Alone(world), sums, 5, dtype=torch.float64)  # type: ignore[arg-type]
    return [*results, alone(), {"read": workload.held_out.read}]


class _Holder:
    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def infer(self, function: Any, batch: Batch) -> Any:
        with torch.no_grad():
            return function(self.model, batch)

    def as_one(self) -> Any:
        return contextlib.nullcontext()


class _Alone:
    """A world of one beside the others: the collectives of one process are none."""

    def __init__(self, world: World) -> None:
        import torch.distributed as dist

        groups = [dist.new_group([r]) for r in range(world.size)]
        self.rank, self.size, self.device = 0, 1, world.device
        self.group = groups[world.rank]


@pytest.mark.parametrize("name", list(STRATEGIES))
def test_every_strategy_evaluates_like_one_process(name: str, ranks: GetRanks) -> None:
    """21 samples in chunks of 6 over 2 ranks: uneven, and at the end one rank has fewer."""
    size = 1 if name == "single" else 2
    answers = ranks(size).run(trained_and_evaluated, name, 21)
    for before, middle, last, alone, _ in answers:
        assert last["samples"] == last["targets"] == alone["samples"] == 21
        for key in ("loss", "accuracy", "logits"):
            assert last[key] == pytest.approx(alone[key], abs=1e-10)
            assert last[key] == answers[0][2][key]  # the same on every rank, to the bit
        assert before["loss"] != middle["loss"] != last["loss"]


def test_each_sample_is_read_once_and_a_rank_may_have_none(ranks: GetRanks) -> None:
    """7 samples in chunks of 6: the second chunk has one sample for two ranks."""
    answers = ranks(2).run(trained_and_evaluated, "zero3", 7)
    by_rank = [answer[-1]["read"] for answer in answers]
    first = [read[: len(read) - 7][: (len(read) - 7) // 3] for read in by_rank]
    assert sorted(first[0] + first[1]) == list(range(7))
    assert first[0][-1] == 6  # and the other had zero rows then
    assert answers[0][2]["loss"] == pytest.approx(answers[0][3]["loss"], abs=1e-10)


def test_a_saboteur_that_skips_empty_batches_would_be_noticed() -> None:
    """Samples that are lost are not passed over in silence."""

    class Lossy(Rows):
        def batch(self, ids: Sequence[int]) -> Batch:
            return super().batch(list(ids)[:2])

    workload = replace(make_workload(), held_out=Lossy(9))
    holder = _Holder(Net())
    run = Evaluation(holder, workload, _here(), sums, 3)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="evaluated 6 samples of 9"):
        run()


def _here() -> Any:
    class Here:
        rank, size, device, group = 0, 1, torch.device("cpu"), None

    return Here()


@pytest.fixture(autouse=True)
def _without_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process there is no group: what is evaluated here is one rank's."""
    monkeypatch.setattr(evaluate.comm, "all_reduce", lambda *_args, **_options: None)


def test_means_and_perplexity() -> None:
    """The loss per target, the rest per sample; a loss beyond all bounds is no crash."""

    def two_of_each(_model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        return {
            "loss": torch.tensor(3.0 * batch.count),
            "correct": torch.tensor(batch.samples // 2),
            "words": torch.tensor(5 * batch.samples),
        }

    workload = replace(make_workload(8), tokens_per_sample=4)
    run = Evaluation(_Holder(Net()), workload, _here(), two_of_each, 4)  # type: ignore[arg-type]
    result = run()
    assert result.pop("seconds") > 0
    assert result == {
        "samples": 8,
        "targets": 8,
        "loss": 3.0,
        "perplexity": pytest.approx(math.exp(3)),
        "accuracy": 0.5,
        "words": 5.0,
    }
    limited = Evaluation(_Holder(Net()), workload, _here(), two_of_each, 4, samples=6)  # type: ignore[arg-type]
    assert limited()["samples"] == 6
    assert isinstance(workload.held_out, Rows)
    assert workload.held_out.read[8:] == [0, 1, 2, 4, 5, 6]  # spread: files come sorted by label


def test_when_it_evaluates() -> None:
    for every, total, expected in [(2, 5, [2, 4, 5]), (0, 5, [5]), (5, 5, [5]), (9, 4, [4])]:
        due = [n for n in range(1, total + 1) if evaluate.is_due(n, every, total)]
        assert due == expected


@pytest.mark.long
def test_a_run_that_evaluates(tmp_path: Path) -> None:
    """The file, the summary, the words; and no step's time has the evaluation in it."""
    done = commands.here(
        "train", "--size", "tiny", "--steps", "4", "--evaluate-every", "2", "--out", "run",
        "--data", "synthetic", "--set", "training.evaluate_samples=301", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "held out: loss" in done.stdout
    assert "(301 samples, after 4 steps)" in done.stdout
    assert "(301 samples, after 2 steps)" in done.stderr
    lines = (tmp_path / "run" / "evaluation.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["steps"] for row in rows] == [2, 4]
    assert rows[1]["perplexity"] == pytest.approx(math.exp(rows[1]["loss"]))
    assert rows[1]["loss"] < rows[0]["loss"]
    assert "evaluation.jsonl" in (tmp_path / "run" / "README.md").read_text()
    steps = [json.loads(s) for s in (tmp_path / "run" / "rank0.jsonl").read_text().splitlines()]
    assert steps[2]["data_ms"] < 1e3 * rows[0]["seconds"] / 2


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"training.evaluate_every": -1}, "evaluate_every must be 0 or more"),
        ({"training.evaluate_every": 1, "training.evaluate_samples": 0}, "must be at least 1"),
        ({"training.evaluate_samples": 5}, "set training.evaluate_every"),
        (
            {"training.evaluate_every": 2, "profile.enabled": True, "training.steps": 9},
            "would be in the profile",
        ),
    ],
)
def test_refuses(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        configs.load(None, overrides)


def test_a_workload_without_held_out_samples_is_refused() -> None:
    with pytest.raises(UsageError, match="the workload toy holds no samples out"):
        evaluate.held_out_of(Workload("toy", toys.MLP, loss, Rows(4)))


def test_without_an_evaluation_of_its_own_the_loss_is_told() -> None:
    workload = Workload("toy", toys.MLP, loss, Rows(4))
    batch = workload.dataset.batch([0, 1])
    model = toys.MLP()
    (told,) = evaluate.sums_of(workload)(model, batch).items()
    assert told[0] == "loss"
    assert torch.equal(told[1], loss(model, batch))
