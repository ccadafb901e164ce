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
from conftest import deep_unless, long_unless
from faulty_workload import FILE, config_of
from faulty_workload import run as run_ranks
from shardlab.errors import Halt
from shardlab.guard import nonfinite
from shardlab.strategies.data_parallel.simple_ddp import SimpleDDP
from shardlab.strategies.update import NotFinite, Rule, Update


def run(root: Path, strategy: str, size: int = 2, **more: Any) -> tuple[Any, list[float | None]]:
    """The result or the verdict, and the losses that rank 0 wrote."""
    config = config_of(root, strategy, **{"training.steps": 8, **more})
    result: Any
    try:
        result = run_ranks(config, size)
    except Halt as halt:
        result = halt
    rows = [p.read_text().splitlines() for p in root.glob("*/rank0.jsonl")]
    return result, [json.loads(line)["loss"] for line in (rows[0] if rows else [])]


IN_LAYER = {"model.options.kind": "layer"}
IN_DATA = {"model.options.kind": "input", "model.options.rank": 0}
# The loss is finite: backward made it.
IN_BACKWARD = {"model.options.kind": "backward", "model.options.how": "nan"}
CLIPPED = IN_BACKWARD | {"training.clip_norm": 1.0}
LOSS = "the loss of step 4 is nan: it arose on rank"
GRADIENT = "the gradient of step 4 is not finite, though the loss is finite: .*"
SECOND = rf"{LOSS} 1, first in the output of 'second' \(Linear\)$"
HEAD = f"{GRADIENT}backward met it first at 'head.bias'"
FROM_RANK_1 = rf"(?=.*it arose on rank 1){HEAD}"
# The shard of one rank is all that it knows of.
IN_SHARD = rf"{GRADIENT}in the shard of rank \d backward met it first at '"
STOPS = [
    ("simple_ddp", 2, IN_LAYER, SECOND),
    ("zero3", 2, IN_LAYER, SECOND),
    ("zero1", 3, IN_DATA, rf"{LOSS} 0, in its input \(micro-batch 0\)$"),
    ("simple_ddp", 2, CLIPPED, FROM_RANK_1),
    ("bucket_ddp_async", 2, IN_BACKWARD, FROM_RANK_1),
    ("bucket_ddp_async", 2, CLIPPED, FROM_RANK_1),
    ("zero2", 2, IN_BACKWARD, IN_SHARD),
]
OTHERS = [
    ("bucket_ddp_async", 2, IN_LAYER, SECOND),
    ("pytorch_zero3", 2, IN_LAYER, SECOND),
    ("simple_ddp", 2, IN_BACKWARD, FROM_RANK_1),
    ("pytorch_ddp", 2, IN_BACKWARD, FROM_RANK_1),
    ("pytorch_ddp", 2, CLIPPED, FROM_RANK_1),
    ("zero2", 2, CLIPPED, IN_SHARD),
]


@pytest.mark.parametrize(
    ("strategy", "size", "more", "said"),
    [
        *long_unless(lambda *case: case == STOPS[0], STOPS),
        *deep_unless(lambda *_: False, OTHERS),
    ],
)
def test_what_is_not_finite_stops_the_run_and_is_named(
    strategy: str, size: int, more: dict[str, Any], said: str, tmp_path: Path
) -> None:
    halt, losses = run(tmp_path, strategy, size, **more)
    assert isinstance(halt, Halt), losses
    assert re.match(said, str(halt)), str(halt)
    assert halt.state == "not finite"
    if said.startswith(LOSS):
        assert halt.details["was_updated"] is False
    assert len(losses) == 4


@pytest.mark.long
def test_skipping_leaves_the_step_out(tmp_path: Path) -> None:
    """One update is left out, and all others are as if it had not been."""
    result, losses = run(tmp_path, "zero1", **IN_LAYER, **{"training.on_nonfinite": "skip"})
    assert result["steps"] == 8
    assert losses[4] is None  # JSON has no NaN
    assert all(loss is not None and math.isfinite(loss) for loss in losses[:4] + losses[5:])


@pytest.mark.long
def test_ignoring_goes_on(tmp_path: Path) -> None:
    _, losses = run(
        tmp_path, "simple_ddp",
        **IN_LAYER, **{"training.on_nonfinite": "ignore", "training.steps": 6},
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
    (path,) = (tmp_path / "runs").glob("*/status.json")
    status = json.loads(path.read_text())
    assert (status["state"], status["rank"]) == ("not finite", 1)
    found = json.loads((path.parent / "not-finite.json").read_text())
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


def test_the_update_looks_at_every_gradient() -> None:
    model = nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 20))
    update = Update(torch.optim.SGD(model.parameters(), lr=0.1), Rule(on_nonfinite="stop"))
    grads = [torch.zeros_like(p) for p in model.parameters()]
    for p, gradient in zip(model.parameters(), grads, strict=True):
        p.grad = gradient
    assert update(grads)
    before = [p.detach().clone() for p in model.parameters()]
    grads[0][7] = float("nan")
    grads[3][7] = float("inf")
    with pytest.raises(NotFinite) as caught:
        update(grads)
    assert caught.value.positions == [0, 3]
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_what_is_said_when_nothing_is_found() -> None:
    fine = {"what": None}
    said = nonfinite.sentence([fine, fine])
    assert said.startswith("a second forward of the same batch is finite")
