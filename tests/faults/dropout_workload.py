"""A small workload with dropout, whose every mask a test can see, and whose steps can be slow."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardlab import runlock
from shardlab.config import DataConfig
from shardlab.workloads.base import Batch, Workload

MASKS: list[list[float]] = []  # one for each forward of this process, the newest last
BEGINNINGS: list[float] = []  # a weight of each model, as it was initialised


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.second = nn.Linear(16, 3)
        BEGINNINGS.append(self.second.weight[2, 15].item())

    def forward(self, x: Tensor) -> Tensor:  # (rows, 6)
        hidden = torch.tanh(self.first(x))
        mask = F.dropout(torch.ones(16, dtype=x.dtype), 0.5, self.training)  # (16,)
        if self.training and len(x):  # not in the trial of a batch without rows
            MASKS.append(mask.tolist())
        out: Tensor = self.second(hidden * mask)  # (rows, 3)
        return out


class Rows:
    def __init__(self, length: int, slow_ms: float, waits_for: str = "") -> None:
        self.length, self.slow_ms, self.waits_for = length, slow_ms, waits_for

    def __len__(self) -> int:
        return self.length

    def batch(self, ids: Sequence[int]) -> Batch:
        if len(ids):  # a trial of a batch without rows, while the run is built, is not slow
            time.sleep(self.slow_ms / 1000)
            while self.waits_for and has_the_folder() and not Path(self.waits_for).exists():
                time.sleep(0.02)
        rows = [torch.randn(6, generator=torch.Generator().manual_seed(i)) for i in ids]
        x = torch.stack(rows) if rows else torch.zeros(0, 6)
        y = torch.tensor([i % 3 for i in ids], dtype=torch.long)
        return Batch(x, y, len(ids), len(ids))


def has_the_folder() -> bool:
    return runlock.table_in(Path("out") / runlock.NAME).get("pid") == os.getpid()


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch.inputs), batch.targets, reduction="sum")


def make(
    _data: DataConfig,
    *,
    slow_ms: float = 0.0,  # each batch
    slow_evaluation_ms: float = 0.0,
    waits_for: str = "",  # a file: a run that has its folder, out, gets no batch before it exists
    meeting: str = "",  # a folder at which so many processes meet before one goes on
    expected: int = 0,
) -> Workload:
    if meeting:
        (Path(meeting) / str(os.getpid())).touch()
        while len(list(Path(meeting).iterdir())) < expected:
            time.sleep(0.05)
    held_out = Rows(8, slow_evaluation_ms)
    return Workload("dropping", Net, loss, Rows(400, slow_ms, waits_for), held_out=held_out)
