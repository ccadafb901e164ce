"""A run from the command to its folder, and what the folder says."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import commands
from conftest import GetRanks
from shardlab import config as configs
from shardlab import numbers
from shardlab.errors import UsageError
from shardlab.files import read_jsonl
from shardlab.report import console
from shardlab.run import assemble, loop
from shardlab.runfolder import mark_crashed, new_folder
from shardlab.world import World


def train(tmp_path: Path, *args: str) -> tuple[dict[str, Any], Path]:
    done = commands.here("train", "--size", "tiny", "--json", *args, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    return result, tmp_path / result["folder"]


@pytest.mark.long
def test_a_run_leaves_a_folder_that_explains_itself(tmp_path: Path) -> None:
    result, folder = train(
        tmp_path, "--steps", "6", "--strategy", "simple_ddp_ga", "--accumulate", "2"
    )
    assert folder.parent == tmp_path / "runs"
    assert folder.name.endswith("-gpt2-tiny-simple_ddp_ga-w2")
    names = {p.name for p in folder.iterdir()}
    assert names == {
        "README.md", "config.yaml", "env.json", "run.lock", "status.json",
        "rank0.jsonl", "rank1.jsonl", "ledger.rank0.jsonl", "ledger.rank1.jsonl",
    }  # fmt: skip
    readme = (folder / "README.md").read_text()
    for name in ("config.yaml", "env.json", "status.json", "rank<r>.jsonl", "ledger.rank<r>.jsonl"):
        assert f"`{name}`" in readme

    env = json.loads((folder / "env.json").read_text())
    assert env["command"].startswith("shardlab train --size tiny")
    assert env["torch"] == torch.__version__
    assert {"python", "cpu", "cores", "gpus", "git"} <= env.keys()
    assert json.loads((folder / "status.json").read_text())["state"] == "finished"

    ranks = [read_jsonl(folder / f"rank{r}.jsonl") for r in (0, 1)]
    for rows in ranks:
        assert [row["step"] for row in rows] == list(range(6))
        assert all(row["step_ms"] > 0 and row["data_ms"] >= 0 for row in rows)
        assert all(row["samples"] == 4 and row["targets"] == 4 * 64 for row in rows)
        assert all(row["rss_bytes"] > 50 << 20 for row in rows)
        assert [row["learning_rate"] for row in rows] == [1e-3] * 6
    assert result["seconds"] > sum(row["step_ms"] for row in ranks[0]) / 1e3
    assert [r["loss"] for r in ranks[0]] == [r["loss"] for r in ranks[1]]
    assert result["loss"] == ranks[0][-1]["loss"] < result["first_loss"]
    assert result["first_loss"] == pytest.approx(math.log(256), rel=0.1)

    ledgers = [read_jsonl(folder / f"ledger.rank{r}.jsonl") for r in (0, 1)]
    for rows, steps in zip(ledgers, ranks, strict=True):
        assert [e["seq"] for e in rows] == list(range(len(rows)))
        for step in steps:
            mine = [e for e in rows if e["step"] == step["step"]]
            assert len(mine) == step["collectives"] > 0
            assert sum(e["bytes"] for e in mine) == step["collective_bytes"]
    calls = [[(e["op"], e["bytes"], e["label"], e["site"]) for e in rows] for rows in ledgers]
    assert calls[0] == calls[1]


@pytest.mark.long
def test_the_folders_config_runs_again(tmp_path: Path) -> None:
    first, folder = train(tmp_path, "--steps", "3", "--seed", "7")
    saved = yaml.safe_load((folder / "config.yaml").read_text())
    assert (saved["launch"]["world"], saved["training"]["seed"]) == (2, 7)
    done = commands.here(
        "train", "--config", str(folder / "config.yaml"), "--json", "--out", "again", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    second = json.loads(done.stdout)
    assert second["folder"] == "again"
    assert second["loss"] == first["loss"]  # bit for bit


def losses(world: World, overrides: dict[str, Any]) -> list[float]:
    """A run of the loop itself, in memory."""
    from shardlab.comm import LEDGER
    from shardlab.run.recorder import Recorder

    config = configs.load(None, {"model.size": "tiny", "training.steps": 4, **overrides})
    workload = assemble.build_workload(config)
    strategy = assemble.build_strategy(config, workload, world)
    with Recorder(None, world, LEDGER, 4) as recorder:
        steps = range(config.training.steps)
        loop.train(strategy, loop.Batches(workload, config, world), recorder, steps)
    return [row["loss"] for row in recorder.rows]


@pytest.mark.long
def test_one_global_batch_whatever_the_world(ranks: GetRanks) -> None:
    """The same samples in the same order: ranks, micro-batches and evenness do not matter."""
    common = {
        "training.global_batch": 5,
        "training.batch_split": "uneven",
        "precision.compute": "fp64",
    }
    (reference,) = ranks(1).run(losses, {**common, "strategy.name": "single"})
    for world, strategy, micro in (
        (2, "simple_ddp", 2),
        (3, "pytorch_ddp", 1),
        (4, "simple_ddp_ga", 2),
    ):
        overrides = {**common, "strategy.name": strategy, "training.accumulate": micro}
        for got in ranks(world).run(losses, overrides):
            assert got == pytest.approx(reference, abs=1e-12)


def told(world: World, steps: int, every: int | None) -> list[dict[str, Any]]:
    """What rank 0 tells of steps that are too quick to be told one by one."""
    from shardlab.comm import LEDGER
    from shardlab.run.recorder import Recorder

    events: list[Any] = []
    world = replace(world, tell=events.append)
    with Recorder(None, world, LEDGER, steps, rate=lambda: 0.25, log_every=every) as recorder:
        for step in range(steps):
            with recorder.step(step, []):
                pass
            recorder.loss(step, torch.zeros(()))
    return [event for event in events if event["logged"]]


@pytest.mark.parametrize(
    ("steps", "every", "logged"),
    [
        (250, None, [0, *range(24, 250, 25)]),
        (2000, None, [0, *range(99, 2000, 100)]),
        (7, None, list(range(7))),
        (25, 10, [0, 9, 19, 24]),
        (1, None, [0]),
    ],
)
def test_a_log_has_regular_steps(
    steps: int, every: int | None, logged: list[int], ranks: GetRanks
) -> None:
    """However quick they are; progress is told ten times a second at most."""
    (events,) = ranks(1).run(told, steps, every)
    assert [event["step"] for event in events] == logged
    assert all(event["learning_rate"] == 0.25 and event["seconds"] >= 0 for event in events)


def test_a_line_of_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    event = {"step": 9, "steps": 20, "loss": 7.9564, "learning_rate": 1.44e-4, "step_ms": 5612.34}
    with console.training_progress(enabled=True) as on_event:
        on_event({**event, "logged": True, "seconds": 62.6})
        on_event({**event, "logged": False, "seconds": 62.6})
    line = "step 10/20  loss 7.9564  lr 0.000144  5612.3 ms  after 1 min 3 s\n"
    assert capsys.readouterr().err == line


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (59.9, "59.9 s"), (59.97, "1 min 0 s"), (119.7, "2 min 0 s"),
     (7325, "2 h 2 min"), (200_000, "2 d 7 h")],
)  # fmt: skip
def test_a_duration(seconds: float, text: str) -> None:
    assert numbers.duration(seconds) == text


@pytest.mark.parametrize("optimizer", ["adamw", "adam", "sgd"])
def test_optimizers(optimizer: str, ranks: GetRanks) -> None:
    rate = 0.1 if optimizer == "sgd" else 1e-2
    overrides = {"training.optimizer": optimizer, "training.learning_rate": rate}
    (values,) = ranks(1).run(losses, overrides)
    assert values[-1] < values[0]


def test_bf16_autocast_is_near_fp32_and_not_it(ranks: GetRanks) -> None:
    (exact,) = ranks(1).run(losses, {})
    (rounded,) = ranks(1).run(losses, {"precision.compute": "bf16"})
    assert rounded != exact
    assert rounded == pytest.approx(exact, rel=0.02)


# ------------------------------------------------------------------ a user's own


OWN = """
import torch
from torch import nn
from shardlab.workloads.base import Batch, Workload

class Rows:
    def __len__(self):
        return 100
    def batch(self, ids):
        x = torch.tensor(ids, dtype=torch.float32).reshape(-1, 1) / 100
        return Batch(inputs=x, targets=3 * x, count=len(ids), samples=len(ids))

def loss(model, batch):
    return (model(batch.inputs) - batch.targets).square().sum()

workload = Workload("line", lambda: nn.Linear(1, 1), loss, Rows())
def sized(data, *, width: int = 1):
    return Workload(f"line{width}", lambda: nn.Linear(1, width), loss, Rows())
def wrong(data):
    return 3
frozen = Workload("frozen", lambda: nn.Linear(1, 1).requires_grad_(False), loss, Rows())
number = 3
"""


@pytest.mark.long
def test_a_workload_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    done = commands.here(
        "train", "--workload", "own.py:workload", "--steps", "3", "--lr", "0.1", "--json",
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["loss"] < result["first_loss"]
    assert result["tokens_per_s"] is None
    assert "-line-simple_ddp-w2" in result["folder"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"model.workload": "own.py:workloat"}, "unknown name in own.py 'workloat'; did you mean"),
        ({"model.workload": "nope.py:workload"}, "no file nope.py"),
        ({"model.workload": "no.such.module:workload"}, "no module named 'no'"),
        ({"model.workload": "own.py:number"}, "neither a Workload nor a function"),
        ({"model.workload": "own.py:wrong"}, "returned a int, not a Workload"),
        ({"model.workload": "own.py:workload", "model.size": "big"}, "takes no options"),
        ({"model.workload": "own.py:sized", "model.options.widht": 2}, "did you mean 'width'?"),
    ],
)
def test_a_workload_that_is_not_one(
    overrides: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as caught:
        assemble.build_workload(configs.load(None, overrides))
    assert message in str(caught.value)


@pytest.mark.long
def test_a_crash_shows_its_traceback_once(tmp_path: Path) -> None:
    """And the folder keeps it."""
    planted = "if 7 in ids: raise ValueError('planted in sample 7')\n        x = torch"
    crashing = OWN.replace("x = torch", planted)
    assert crashing != OWN
    (tmp_path / "own.py").write_text(crashing)
    done = commands.here("train", "--workload", "own.py:workload", "--steps", "100", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.splitlines()[-1].endswith("ValueError: planted in sample 7")
    (crash,) = (tmp_path / "runs").glob("*/crash.txt")
    assert "planted in sample 7" in crash.read_text()
    assert json.loads((crash.parent / "status.json").read_text())["state"] == "crashed"


# ------------------------------------------------------------------ files


def test_two_folders_in_one_second(tmp_path: Path) -> None:
    first, second = new_folder(tmp_path, "x"), new_folder(tmp_path, "x")
    assert first != second


def test_a_line_cut_off_by_a_crash_is_no_obstacle(tmp_path: Path) -> None:
    from shardlab.errors import RankFailure

    (tmp_path / "rank0.jsonl").write_text('{"step": 0}\n{"step": 1}\n{"st')
    mark_crashed(tmp_path, RankFailure(0, "out of luck"))
    status = json.loads((tmp_path / "status.json").read_text())
    assert status["last_finished_step"] == 1
