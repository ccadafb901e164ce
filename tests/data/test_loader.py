"""Batches prepared ahead: the same ones, in order; errors where they belong; no thread left."""

from __future__ import annotations

import json
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import commands
from conftest import GetRanks
from shardlab import config as configs
from shardlab.comm import LEDGER
from shardlab.data import audit, loader, sampler
from shardlab.errors import UsageError
from shardlab.report.audit import sentences
from shardlab.run import assemble, loop
from shardlab.run.recorder import Recorder
from shardlab.workloads.base import Batch
from shardlab.world import World

CPU = torch.device("cpu")


class Numbers:
    """Sample i is the number i."""

    def __init__(self, length: int = 50, broken: int | None = None, slow_s: float = 0.0) -> None:
        self.length, self.broken, self.slow_s = length, broken, slow_s
        self.threads: set[str] = set()

    def __len__(self) -> int:
        return self.length

    def batch(self, ids: Sequence[int]) -> Batch:
        self.threads.add(threading.current_thread().name)
        time.sleep(self.slow_s)
        if self.broken in ids:
            raise ValueError(f"planted in sample {self.broken}")
        x = torch.tensor(ids, dtype=torch.float32)
        return Batch({"x": x, "ids": [torch.tensor(ids)]}, x, len(ids), len(ids))


def order(length: int = 50, batch: int = 8, **changes: Any) -> loader.Order:
    values = {"accumulate": 2, "seed": 1, "shuffle": True, "mode": "continuous", **changes}
    return loader.Order(length, batch, **values)


def steps(dataset: Any, depth: int, count: int = 10, **changes: Any) -> Any:
    return loader.load(
        dataset,
        order(len(dataset), **changes),
        count,
        ranks=2,
        rank=1,
        device=CPU,
        depth=depth,
    )


def loaders() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("shardlab-data")]


@pytest.mark.parametrize("depth", [1, 2, 50])
def test_the_same_batches_in_the_same_order(depth: int) -> None:
    ahead, plain = Numbers(), Numbers()
    for got, want in zip(steps(ahead, depth), steps(plain, 0), strict=True):
        assert [b.inputs["x"].tolist() for b in got.microbatches] == [
            b.inputs["x"].tolist() for b in want.microbatches
        ]
        assert [part.ids.tolist() for part in got.read] == [p.ids.tolist() for p in want.read]
    assert all(name.startswith("shardlab-data") for name in ahead.threads)
    assert plain.threads == {threading.current_thread().name}
    assert loaders() == []


def test_an_error_comes_where_its_batch_would_have_with_its_traceback() -> None:
    dataset = Numbers(broken=7)
    bad = next(s for s in range(99) if 7 in np.concatenate([p.ids for p in order().share(s, 2, 1)]))
    running = steps(dataset, depth=3, count=99)
    for _ in range(bad):
        next(running)
    with pytest.raises(ValueError, match="planted in sample 7") as caught:
        next(running)
    assert "in batch\n" in "".join(traceback.format_exception(caught.value))
    assert loaders() == []


def test_a_loop_that_stops_leaves_no_thread() -> None:
    running = steps(Numbers(slow_s=0.01), depth=4, count=1000)
    next(running)
    assert len(loaders()) == 1
    running.close()
    assert loaders() == []


@pytest.mark.alone
def test_preparing_ahead_hides_the_time_it_takes() -> None:
    """While the loop is busy for 20 ms, the next batch, which takes 2 x 5 ms, is made."""

    def waits(depth: int) -> float:
        waited = 0.0
        running = steps(Numbers(slow_s=0.005), depth, count=8)
        next(running)
        while True:
            time.sleep(0.02)
            start = time.perf_counter()
            if next(running, None) is None:
                return waited
            waited += time.perf_counter() - start

    assert waits(2) < 0.5 * waits(0)


def test_floats_take_the_models_precision() -> None:
    (batch,) = next(
        loader.load(
            Numbers(), order(accumulate=1), 1, ranks=1, rank=0, device=CPU, dtype=torch.float64
        )
    ).microbatches
    assert batch.inputs["x"].dtype == batch.targets.dtype == torch.float64
    assert batch.inputs["ids"][0].dtype == torch.int64


def test_an_augmented_data_set_is_told_the_epoch() -> None:
    class Told(Numbers):
        def batch_in(self, ids: Sequence[int], epochs: Sequence[int]) -> Batch:
            seen.extend(epochs)
            return self.batch(ids)

    seen: list[int] = []
    for _ in steps(Told(length=8), depth=1, count=3):
        pass
    assert seen == [0] * 4 + [1] * 4 + [2] * 4


# ------------------------------------------------------------------ in the loop


def run(world: World, overrides: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Losses and waits of a run in memory; its thread is gone when it ends."""
    config = configs.load(
        None, {"model.size": "tiny", "training.steps": 4, "training.global_batch": 4, **overrides}
    )
    workload = assemble.build_workload(config)
    strategy = assemble.build_strategy(config, workload, world)
    with Recorder(None, world, LEDGER, 4) as recorder:
        steps = range(config.training.steps)
        loop.train(strategy, loop.Batches(workload, config, world), recorder, steps)
    assert loaders() == []
    return [r["loss"] for r in recorder.rows], [r["data_ms"] for r in recorder.rows]


def test_prefetching_changes_no_bit(ranks: GetRanks) -> None:
    results = [ranks(2).run(run, {"data.prefetch": depth}) for depth in (0, 2)]
    assert results[0][0][0] == results[1][0][0]  # rank 0's losses
    assert all(wait >= 0 for wait in results[1][0][1])


def slow_run(world: World, prefetch: int) -> list[float]:
    """The loop with a data set that takes 30 ms and a step that takes 40."""
    waits = []
    running = loader.load(
        Numbers(slow_s=0.03),
        order(accumulate=1),
        6,
        ranks=world.size,
        rank=world.rank,
        device=world.device,
        depth=prefetch,
    )

    class Slow:
        def gradients(self, _batches: Any) -> torch.Tensor:
            time.sleep(0.04)
            return torch.zeros(())

        def step(self) -> None: ...

    with Recorder(None, world, LEDGER, 6) as recorder:
        batches = (s.microbatches for s in running)
        loop.train(Slow(), batches, recorder, range(6))  # type: ignore[arg-type]
    waits = [row["data_ms"] for row in recorder.rows]
    return waits[1:]


def test_data_ms_is_the_wait(ranks: GetRanks) -> None:
    (plain,) = ranks(1).run(slow_run, 0)
    (ahead,) = ranks(1).run(slow_run, 2)
    assert min(plain) >= 29
    assert sorted(ahead)[len(ahead) // 2] < 15


def test_fp64_of_a_workload_with_floats(ranks: GetRanks) -> None:
    path = Path(__file__).parents[2] / "examples" / "your_model.py"
    overrides = {
        "model.workload": f"{path}:workload", "model.size": None, "precision.compute": "fp64",
    }  # fmt: skip
    (losses, _), _ = ranks(2).run(run, overrides)
    assert len(losses) == 4


# ------------------------------------------------------------------ the audit


def fed(length: int, batch: int, steps: int, mode: str, ranks: int = 3) -> dict[str, Any]:
    notes = []
    for rank in range(ranks):
        mine = audit.Audit()
        running = loader.load(
            Numbers(length), order(length, batch, mode=mode), steps, ranks=ranks, rank=rank,
            device=CPU,
        )  # fmt: skip
        for step in running:
            mine.note(step.read, sum(b.count for b in step.microbatches))
        notes.append(mine.notes())
    return audit.judge(notes, length=length, global_batch=batch, mode=mode)


def test_the_audit_of_each_mode() -> None:
    result = fed(10, 4, 5, "continuous")
    assert (result["samples"], result["targets"], result["finished_epochs"]) == (20, 20, 2)
    assert result["exactly_once"]
    assert sentences(result)[1:] == [
        "  epoch 0: each of 10 samples exactly once",
        "  epoch 1: each of 10 samples exactly once",
    ]
    result = fed(10, 4, 6, "exact")
    assert result["exactly_once"]
    assert result["samples_of_ranks"] == [10, 6, 4]  # batches of 4, 4 and 2 over 3 ranks

    result = fed(10, 4, 3, "padded")
    start = sampler.epoch_order(10, 1, 0, True)[:2].tolist()
    (epoch,) = result["epochs"]
    assert not result["exactly_once"]
    assert epoch["repeated_ids"] == {str(i): 2 for i in sorted(start)}
    assert epoch["missed"] == 0
    assert "2 repeated" in sentences(result)[1]

    result = fed(10, 4, 2, "dropped")
    (epoch,) = result["epochs"]
    assert epoch["missed_ids"] == sorted(sampler.epoch_order(10, 1, 0, True)[8:].tolist())
    assert "2 missed" in sentences(result)[1]


def test_an_epoch_under_way_is_no_claim() -> None:
    result = fed(10, 4, 2, "continuous")
    assert not result["exactly_once"]
    assert sentences(result)[1] == "  epoch 0, not finished: 8 of 10 samples so far; none twice"


def test_the_audit_sees_what_was_fed_not_what_should_have_been() -> None:
    """A rank that reads another's samples, as with the local rank on a second host."""
    notes = []
    for rank in (0, 0):
        mine = audit.Audit()
        for step in range(2):
            mine.note(order(16, 8).share(step, 2, rank), 4)
        notes.append(mine.notes())
    result = audit.judge(notes, length=16, global_batch=8, mode="continuous")
    (epoch,) = result["epochs"]
    assert (epoch["finished"], epoch["exactly_once"]) == (True, False)
    assert (epoch["repeated"], epoch["missed"]) == (8, 8)


OWN = """
import torch
from torch import nn
from shardlab.workloads.base import Batch, Workload

class Rows:
    def __len__(self):
        return 10
    def batch(self, ids):
        x = torch.tensor(ids, dtype=torch.float32).reshape(-1, 1)
        return Batch(inputs=x, targets=x, count=len(ids), samples=len(ids))

def loss(model, batch):
    return (model(batch.inputs) - batch.targets).square().sum()

workload = Workload("line", lambda: nn.Linear(1, 1), loss, Rows())
"""


@pytest.mark.long
def test_audit_data_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    command = ("train", "--workload", "own.py:workload", "--steps", "3", "--lr", "0.001")
    done = commands.here(
        *command, "--epoch", "padded", "--global-batch", "4", "--audit-data", "--out", "run",
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "epoch 0: each of 10 samples at least once; 2 repeated" in done.stdout
    assert "waiting for data" in done.stdout
    result = json.loads((tmp_path / "run" / "audit.json").read_text())
    assert result["samples_of_ranks"] == [6, 6]
    assert "`audit.json`" in (tmp_path / "run" / "README.md").read_text()

    done = commands.here(
        *command, "--epoch", "exact", "-b", "4", "--audit-data", "--json", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["audit"]["exactly_once"]
    assert result["data_ms"]["median"] >= 0
    assert [e["samples"] for e in result["audit"]["epochs"]] == [10]

    done = commands.here(*command, "--epoch", "dropped", "-b", "12", cwd=tmp_path)
    assert done.returncode == 2
    assert "dropped leaves nothing of 10 samples" in done.stderr
    assert len(list((tmp_path / "runs").iterdir())) == 1  # a refusal leaves no folder


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"data.epoch": "exakt"}, "did you mean 'exact'"),
        ({"data.prefetch": -1}, "data.prefetch must be 0 or more"),
        ({"data.audit": "yes"}, "data.audit must be a true or false"),
    ],
)
def test_wrong_settings(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        configs.load(None, overrides)
