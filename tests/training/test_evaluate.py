"""Evaluation: every held-out sample once, whatever the world and the strategy."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec import structs
from torch import Tensor, nn
from torch.nn import functional as F

import commands
import toys
from conftest import GetRanks, deep_unless
from shardlab import config as configs
from shardlab.config import TrainingConfig
from shardlab.data.loader import cast
from shardlab.errors import UsageError
from shardlab.files import read_jsonl
from shardlab.naming import STRATEGIES
from shardlab.training import builders, evaluate, loop
from shardlab.training import run as running
from shardlab.training.evaluate import Evaluation
from shardlab.workloads.base import Batch, Workload
from shardlab.world import World

MECHANISMS = ("single", "bucket_ddp_async", "zero2", "zero3", "local_sgd", "pytorch_zero3")


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
    asked = {
        "strategy.name": name,
        "precision.compute": "fp64",
        "training.steps": 3,
        "training.micro_batch": 3,
        "training.global_batch": 12,
        "launch.world": world.size,
        "launch.device": "cpu",
    }
    config = configs.load(None, asked)
    strategy: Any = builders.build_strategy(config, workload, world)
    run = running.make_evaluation(config, workload, world, strategy)
    results = [run()]
    for i, microbatches in enumerate(loop.Batches(workload, config, world)):
        strategy.gradients(microbatches)
        strategy.step()
        if i > 0:
            results.append(run())
    assert isinstance(workload.held_out, Rows)
    assert all(m.training for m in strategy.model.modules())  # as it was
    model = Net().double().eval()
    model.load_state_dict(strategy.full_params(), strict=True)
    with torch.no_grad():
        found = sums(model, cast(workload.held_out.batch(range(held_out)), torch.float64))
    alone = {name: float(value) / held_out for name, value in found.items()}
    return [*results, alone, {"read": workload.held_out.read}]


class _Holder:
    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def infer(self, function: Any, batch: Batch) -> Any:
        with torch.no_grad():
            return function(self.model, batch)

    def as_one(self) -> Any:
        return contextlib.nullcontext()


def _alone() -> Any:
    """A world of one: it has no collectives."""
    return SimpleNamespace(rank=0, size=1, device=torch.device("cpu"), group=None)


@pytest.mark.parametrize("name", deep_unless(lambda name: name in MECHANISMS, STRATEGIES))
def test_every_strategy_evaluates_like_one_process(name: str, ranks: GetRanks) -> None:
    """21 samples in chunks of 6 over 2 ranks: uneven, and at the end one rank has fewer."""
    size = 1 if name == "single" else 2
    answers = ranks(size).run(trained_and_evaluated, name, 21)
    for before, middle, last, alone, _ in answers:
        assert last["samples"] == last["targets"] == 21
        for key, summed in {"loss": "loss", "accuracy": "correct", "logits": "logits"}.items():
            assert last[key] == pytest.approx(alone[summed], abs=1e-10)
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
    run = Evaluation(holder, workload, _alone(), sums, 3)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="evaluated 6 samples of 9"):
        run()


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
    run = Evaluation(_Holder(Net()), workload, _alone(), two_of_each, 4)  # type: ignore[arg-type]
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
    limited = Evaluation(_Holder(Net()), workload, _alone(), two_of_each, 4, samples=6)  # type: ignore[arg-type]
    assert limited()["samples"] == 6
    assert isinstance(workload.held_out, Rows)
    assert workload.held_out.read[8:] == [0, 1, 2, 4, 5, 6]  # spread: files come sorted by label


def test_when_it_evaluates() -> None:
    for every, total, expected in [(2, 5, [2, 4, 5]), (0, 5, [5]), (5, 5, [5]), (9, 4, [4])]:
        due = [n for n in range(1, total + 1) if evaluate.is_due(n, every, total)]
        assert due == expected


def test_when_patience_ends_a_run() -> None:
    """Equal is not lower, nor is NaN; an evaluation at an end that was none does not count."""
    training = TrainingConfig(evaluate_every=5, patience=2)
    nan = math.nan

    def ended(*losses: float | None, patience: int = 2) -> str | None:
        rows = [{"steps": 5 * i, "loss": loss} for i, loss in enumerate(losses, 1)]
        return evaluate.why_ended(rows, structs.replace(training, patience=patience))

    assert ended() is ended(1.0) is ended(3.0, 2.0, 1.0) is ended(1.0, 2.0, 0.5, 0.6) is None
    why = "2 evaluations in a row have not lowered the held-out loss of 1 after 5 steps"
    assert str(ended(1.0, 1.0, 2.0)).startswith(why)
    assert ended(1.0, 1.0, 2.0, patience=3) is None
    assert ended(2.0, 1.0, nan, nan) == ended(2.0, 1.0, None, None)  # as in evaluation.jsonl
    assert "of 1 after 10 steps" in str(ended(2.0, 1.0, nan, nan))
    assert ended(nan, nan) is None is ended(nan, nan, 3.0)
    cut = [{"steps": n, "loss": loss} for n, loss in [(5, 1.0), (7, 2.0), (10, 2.0)]]
    assert evaluate.why_ended(cut, training) is None
    assert evaluate.why_ended([*cut, {"steps": 15, "loss": 2.0}], training) is not None
    assert evaluate.why_ended([*cut, cut[-1]], TrainingConfig()) is None
    with pytest.raises(UsageError, match="evaluate of this workload gives no 'loss'"):
        evaluate.why_ended([{"steps": 5, "accuracy": 0.5}], training)


@pytest.mark.long
def test_a_run_that_evaluates(tmp_path: Path) -> None:
    """The file and the words; and no step's time has the evaluation in it."""
    done = commands.here(
        "train", "--size", "tiny", "--steps", "4", "--set", "training.evaluate_every=2",
        "--out", "run",
        "--data", "synthetic", "--set", "training.evaluate_samples=301", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "(301 samples, after 4 steps)" in done.stdout
    assert "(301 samples, after 2 steps)" in done.stderr
    rows = read_jsonl(tmp_path / "run" / "evaluation.jsonl")
    assert [row["steps"] for row in rows] == [2, 4]
    assert rows[1]["loss"] < rows[0]["loss"]
    steps = read_jsonl(tmp_path / "run" / "rank0.jsonl")
    assert steps[2]["data_ms"] < 1e3 * rows[0]["seconds"] / 2


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
