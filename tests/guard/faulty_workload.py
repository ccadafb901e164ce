"""A small workload, and strategies, that go wrong where a test wants them to."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardlab import comm
from shardlab import config as configs
from shardlab.config import DataConfig, LaunchConfig
from shardlab.launch.ranks import Ranks
from shardlab.ledger import LEDGER
from shardlab.strategies import base, steps
from shardlab.strategies.data_parallel.simple_ddp import SimpleDDP
from shardlab.workloads.base import Batch, Workload

BATCH = 4  # the global batch that the data set counts its steps by, unshuffled
FILE = Path(__file__)
LAUNCH = LaunchConfig(device="cpu", timeout_s=60)


def config_of(root: Path, strategy: str, **more: Any) -> configs.Config:
    """A run of the workload below."""
    return configs.load(
        None,
        {
            "model.workload": f"{FILE}:make",
            "strategy.name": strategy,
            "training.steps": 12,
            "training.global_batch": BATCH,
            "data.shuffle": False,
            "output.root": str(root),
            "launch.device": "cpu",
            **more,
        },
    )


def run(config: configs.Config, size: int = 2) -> Any:
    """On ranks of its own, which may not survive it: what rank 0 returns."""
    with Ranks(LAUNCH, size) as ranks:
        train = "shardlab.training.run:train_rank"
        return ranks.run(train, config, "test", deadline_s=40)[0]


def line_of(text: str) -> str:
    """``file:line`` of a line of this file."""
    lines = FILE.read_text().splitlines()
    (found,) = [i for i, line in enumerate(lines, start=1) if text in line]
    return f"{FILE.name}:{found}"


class Net(nn.Module):
    """Two layers of one shape, so that their gradients can be taken for each other's."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6, bias=False)
        self.second = nn.Linear(6, 6, bias=False)
        self.third = nn.Linear(6, 6, bias=False)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:  # (rows, 6)
        out: Tensor = self.head(torch.tanh(self.third(torch.tanh(self.second(self.first(x))))))
        return out


def strike(kind: str) -> None:
    """What a rank does instead of going on."""
    if kind == "sleep":
        time.sleep(600)
    elif kind == "loop":
        while True:
            pass
    elif kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "hold":  # PyDLL keeps Python's lock: no other thread of this process runs
        ctypes.PyDLL(None).sleep(600)


class Data:
    def __init__(self, length: int, kind: str, step: int) -> None:
        self.length, self.kind, self.step = length, kind, step

    def __len__(self) -> int:
        return self.length

    def batch(self, ids: Sequence[int]) -> Batch:
        if self.kind == "data" and ids and min(ids) // BATCH == self.step:
            strike("sleep")
        rows = [torch.randn(6, generator=torch.Generator().manual_seed(i)) for i in ids]
        x = torch.stack(rows) if rows else torch.zeros(0, 6)
        if self.kind == "input" and ids and min(ids) // BATCH == self.step:
            x[0, 0] = float("nan")
        y = torch.tensor([i % 3 for i in ids], dtype=torch.long)
        return Batch(x, y, len(ids), len(ids))


class StuckBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: str) -> Tensor:
        ctx.kind = kind
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if ctx.kind == "nan":
            return grad * float("nan"), None
        strike(ctx.kind)
        return grad, None


def make(
    _data: DataConfig, *, kind: str = "none", how: str = "sleep", rank: int = 1, step: int = 4,
    length: int = 4000,
) -> Workload:  # fmt: skip
    """``kind``: data, forward, backward, input, layer, length or none; on one rank, in one step."""
    mine = kind if int(os.environ.get("RANK", "-1")) == rank else "none"

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        x = batch.inputs
        is_now = LEDGER.step == step
        if is_now and mine == "forward":
            strike(how)
        hook = None
        if is_now and mine == "layer":
            hook = model.get_submodule("second").register_forward_hook(
                lambda _module, _inputs, out: out * float("nan")
            )
        out = model(x)
        if hook is not None:
            hook.remove()
        if is_now and mine == "backward":
            out = StuckBackward.apply(out, how)
        return F.cross_entropy(out, batch.targets, reduction="sum")

    shorter = 1 if mine == "length" else 0
    return Workload("troubled", Net, loss, Data(length - shorter, mine, step))


class InOrder(SimpleDDP):
    """Each gradient's all-reduce, in an order that a rank may choose."""

    def gradients(self, microbatches: Sequence[Batch]) -> Tensor:
        total = steps.global_count(microbatches, self.device, self.group)
        loss_sum = steps.accumulate(
            self.model, self.loss_fn, microbatches, self.update.divisor(total)
        )
        for name in self.order(list(self.params)):
            grad = self.params[name].grad
            assert grad is not None
            comm.all_reduce(grad, self.group, label=f"grad {name}")
        return steps.global_mean(loss_sum, total, self.group)

    def order(self, names: list[str]) -> list[str]:
        return names


class Skipping(InOrder):
    """Rank 1 leaves out one gradient in step 4; of the next two only the first has its shape."""

    STEP = 4

    def order(self, names: list[str]) -> list[str]:
        is_now = LEDGER.step == self.STEP and self.group.rank() == 1
        return [n for n in names if not (is_now and n == "second.weight")]


class SkippingFirst(Skipping):
    STEP = 1


def is_first_start(marker: str) -> bool:
    """Of a run that starts again, for which this file tells; without one every start is."""
    if marker and Path(marker).exists():
        return False
    if marker:
        Path(marker).touch()
    return True


class Swapping(InOrder):
    """Rank 1 sends two gradients of one shape in another order in step 4: Gloo says nothing."""

    def __init__(self, setup: base.Setup, *, marker: str = "") -> None:
        super().__init__(setup)
        self.marker = marker

    def order(self, names: list[str]) -> list[str]:
        if LEDGER.step == 4 and self.group.rank() == 1 and is_first_start(self.marker):
            names[1:3] = reversed(names[1:3])
        return names


class Drifting(SimpleDDP):
    """Rank 1 changes one weight by its least bit after step 3."""

    def __init__(self, setup: base.Setup, *, marker: str = "") -> None:
        super().__init__(setup)
        self.marker = marker

    def step(self) -> None:
        super().step()
        if LEDGER.step == 3 and self.group.rank() == 1 and is_first_start(self.marker):
            self.drift(self.params["second.weight"])

    @torch.no_grad()
    def drift(self, weight: nn.Parameter) -> None:
        weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(9.0))


class OptimizerDrifting(Drifting):
    """The momentum changes; no weight does."""

    def drift(self, weight: nn.Parameter) -> None:
        self.optimizer.state[weight]["exp_avg"][0, 0] += 0.5


class Waiting(InOrder):
    """Rank 1 sleeps in its second step."""

    def order(self, names: list[str]) -> list[str]:
        if LEDGER.step == 1 and self.group.rank() == 1:
            strike("sleep")
        return names
