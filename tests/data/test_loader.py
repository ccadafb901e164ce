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
from torch import nn

import commands
from conftest import GetRanks
from shardlab.data import loader
from shardlab.files import read_jsonl
from shardlab.ledger import LEDGER
from shardlab.training import loop
from shardlab.training.recorder import Recorder
from shardlab.workloads.base import Batch, Workload
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
    mine = order(len(dataset), **changes)
    return loader.load(dataset, mine, count, ranks=2, rank=1, device=CPU, depth=depth)


def loaders() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("shardlab-data")]


@pytest.mark.parametrize("depth", [1, 2, 50])
def test_the_same_batches_in_the_same_order(depth: int) -> None:
    ahead, plain = Numbers(), Numbers()
    for got, want in zip(steps(ahead, depth), steps(plain, 0), strict=True):
        assert [b.inputs["x"].tolist() for b in got.microbatches] == [
            b.inputs["x"].tolist() for b in want.microbatches
        ]
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


def test_floats_take_the_models_precision() -> None:
    first = order(accumulate=1)
    running = loader.load(Numbers(), first, 1, ranks=1, rank=0, device=CPU, dtype=torch.float64)
    (batch,) = next(running).microbatches
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


def slow_run(world: World, prefetch: int) -> list[float]:
    """The loop with a data set that takes 30 ms and a step that takes 40."""
    slow = Numbers(slow_s=0.03)
    running = loader.load(slow, order(accumulate=1), 6, ranks=1, rank=0, device=CPU, depth=prefetch)

    class Slow:
        def gradients(self, _batches: Any) -> torch.Tensor:
            time.sleep(0.04)
            return torch.zeros(())

        def step(self) -> None: ...

    with Recorder(None, world, LEDGER, 6) as recorder:
        batches = (s.microbatches for s in running)
        loop.train(Slow(), batches, recorder, range(6))  # type: ignore[arg-type]
    return [row["data_ms"] for row in recorder.rows][1:]


def test_data_ms_is_the_wait(ranks: GetRanks) -> None:
    (plain,) = ranks(1).run(slow_run, 0)
    (ahead,) = ranks(1).run(slow_run, 2)
    assert min(plain) >= 29
    assert sorted(ahead)[len(ahead) // 2] < 15


# ------------------------------------------------------------------ epochs of a run


def line() -> Workload:
    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        return (model(batch.inputs["x"][:, None])[:, 0] - batch.targets).square().sum()

    return Workload("line", lambda: nn.Linear(1, 1), loss, Numbers(10))


@pytest.mark.long
def test_epochs_of_a_run(tmp_path: Path) -> None:
    own = ("--workload", f"{__file__}:line")
    command = ("train", *own, "--steps", "3", "--lr", "0.001", "-b", "4")

    def samples(folder: str) -> list[list[int]]:
        rows = [read_jsonl(tmp_path / folder / f"rank{rank}.jsonl") for rank in range(2)]
        return [[row["samples"] for row in of_rank] for of_rank in rows]

    done = commands.here(*command, "--set", "data.epoch=padded", "--out", "padded", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "waiting for data" in done.stdout
    assert samples("padded") == [[2, 2, 2], [2, 2, 2]]
    done = commands.here(
        *command, "--set", "data.epoch=exact", "--out", "exact", "--json", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["data_ms"]["median"] >= 0
    assert samples("exact") == [[2, 2, 1], [2, 2, 1]]  # 10 samples in batches of 4
