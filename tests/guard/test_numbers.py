"""A NaN or infinity stops the run with its step, rank and layer, on all ranks alike."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import commands
import troubled
from shardlab import config as configs
from shardlab.config import LaunchConfig
from shardlab.errors import Halt
from shardlab.guard import numbers
from shardlab.run.ranks import Ranks
from shardlab.strategies.simple_ddp import SimpleDDP
from shardlab.strategies.update import NotFinite, Rule, Update

LAUNCH = LaunchConfig(device="cpu", timeout_s=60)
FILE = Path(troubled.__file__)


def run(root: Path, strategy: str, size: int = 2, **more: Any) -> tuple[Any, list[float | None]]:
    """The result or the verdict, and the losses that rank 0 wrote."""
    config = configs.load(
        None,
        {
            "model.workload": f"{FILE}:make",
            "strategy.name": strategy,
            "training.steps": 8,
            "training.global_batch": troubled.BATCH,
            "training.batch_split": "uneven",
            "data.shuffle": False,
            "output.root": str(root),
            "launch.device": "cpu",
            **more,
        },
    )
    result: Any
    with Ranks(LAUNCH, size) as ranks:
        try:
            result = ranks.run(
                "shardlab.run.rank:train_rank", config.to_dict(), "test", deadline_s=40
            )
        except Halt as halt:
            result = halt
    rows = [p.read_text().splitlines() for p in root.glob("*/rank0.jsonl")]
    return result, [json.loads(line)["loss"] for line in (rows[0] if rows else [])]


@pytest.mark.parametrize("strategy", ["simple_ddp", "bucket_ddp_async", "zero3", "pytorch_zero3"])
def test_the_layer_and_the_rank_are_named(tmp_path: Path, strategy: str) -> None:
    halt, losses = run(tmp_path, strategy, **{"model.options.kind": "layer"})
    assert isinstance(halt, Halt)
    assert str(halt) == (
        "the loss of step 4 is nan: it arose on rank 1, first in the output of 'second' (Linear)"
    )
    assert (halt.state, halt.rank, halt.details["was_updated"]) == ("not finite", 1, False)
    assert len(losses) == 4


def test_a_nan_in_the_data(tmp_path: Path) -> None:
    halt, _ = run(
        tmp_path, "zero1", size=3, **{"model.options.kind": "input", "model.options.rank": 0}
    )
    assert str(halt) == (
        "the loss of step 4 is nan: it arose on rank 0, in its input (micro-batch 0)"
    )


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["simple_ddp", "pytorch_ddp", "bucket_ddp_async", "zero2"])
@pytest.mark.parametrize("clip", [None, 1.0], ids=["", "clipped"])
def test_a_gradient_alone(tmp_path: Path, strategy: str, clip: float | None) -> None:
    """The loss is finite: backward made it."""
    halt, losses = run(
        tmp_path,
        strategy,
        **{
            "model.options.kind": "backward",
            "model.options.how": "nan",
            "training.clip_norm": clip,
        },
    )
    assert isinstance(halt, Halt), losses
    assert "the gradient of step 4 is not finite, though the loss is finite:" in str(halt)
    if strategy == "zero2":  # the shard of one rank is all that it knows of
        assert re.search(r"in the shard of rank \d backward met it first at '", str(halt))
    else:
        assert "backward met it first at 'head.bias'" in str(halt)
    if strategy in ("simple_ddp", "pytorch_ddp") or (clip and strategy == "bucket_ddp_async"):
        assert "it arose on rank 1" in str(halt)
    assert len(losses) == 4


@pytest.mark.long
def test_skipping_leaves_the_step_out(tmp_path: Path) -> None:
    """One update is left out, and all others are as if it had not been."""
    result, losses = run(
        tmp_path, "zero1", **{"model.options.kind": "layer", "training.on_nonfinite": "skip"}
    )
    assert result[0]["steps"] == 8
    assert losses[4] is None  # JSON has no NaN
    assert all(loss is not None and math.isfinite(loss) for loss in losses[:4] + losses[5:])


@pytest.mark.long
def test_ignoring_goes_on(tmp_path: Path) -> None:
    _, losses = run(
        tmp_path, "simple_ddp",
        **{"model.options.kind": "layer", "training.on_nonfinite": "ignore", "training.steps": 6},
    )  # fmt: skip
    assert losses[4:] == [None, None]


@pytest.mark.long
def test_the_command_says_it_in_a_line(tmp_path: Path) -> None:
    done = commands.here(
        "train", "--workload", f"{FILE}:make", "--steps", "8", "-b", "4", "--device", "cpu",
        "--set", "data.shuffle=false", "--set", "model.options.kind=layer", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: the loss of step 4 is nan: it arose on")
    (status,) = (tmp_path / "runs").glob("*/status.json")
    assert json.loads(status.read_text())["state"] == "not finite"
    found = json.loads((status.parent / "not-finite.json").read_text())
    assert (found["step"], found["ranks"]) == (4, [1])


class UpdatesItself(SimpleDDP):
    """It would ignore clipping, the schedule and what to do with a gradient that is not finite."""

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.mark.long
def test_a_strategy_must_use_the_update(tmp_path: Path) -> None:
    done = commands.here(
        "train", "--strategy", f"{__file__}:UpdatesItself", "--size", "tiny", "--steps", "2",
        "--world", "2", "--data", "synthetic", "--out", "run", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 2
    (line,) = (n for n in done.stderr.splitlines() if n.startswith("error"))
    assert "UpdatesItself.step() does not call self.update(gradients)" in line


def test_the_update_looks_at_a_hundredth() -> None:
    """A NaN in a bias is seen; the large weight is not even read."""
    model = nn.Sequential(nn.Linear(2000, 2000), nn.Linear(2000, 2000))
    update = Update(torch.optim.SGD(model.parameters(), lr=0.1), Rule(on_nonfinite="stop"))
    grads = [torch.zeros_like(p) for p in model.parameters()]
    assert update(grads)
    assert update.small == 2000
    grads[0][7] = float("nan")
    assert update(grads)
    grads[3][7] = float("inf")
    with pytest.raises(NotFinite) as caught:
        update(grads)
    assert (caught.value.positions, caught.value.was_updated) == ([0, 3], False)


def test_what_is_said_when_nothing_is_found() -> None:
    fine = {"what": None}
    assert numbers.sentence([fine, fine]).startswith("a second forward of the same batch is finite")
