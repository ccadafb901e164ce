"""A run from the command to its folder, and what the folder says."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

import commands
from conftest import GetRanks
from shardlab import runfolder
from shardlab import text as fmt
from shardlab.errors import RankFailure, UsageError
from shardlab.files import read_jsonl
from shardlab.ledger import LEDGER
from shardlab.training.recorder import Recorder
from shardlab.workloads.base import Batch, Workload
from shardlab.world import World


def train(tmp_path: Path, *args: str) -> tuple[dict[str, Any], Path]:
    done = commands.here("train", "--json", *args, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    return result, tmp_path / result["folder"]


@pytest.mark.long
def test_a_run_leaves_a_folder_that_explains_itself(tmp_path: Path) -> None:
    """And from which it runs again."""
    ga = ("--strategy", "simple_ddp_ga", "--global-batch", "8", "--micro-batch", "2")
    result, folder = train(tmp_path, "--size", "tiny", "--steps", "6", "--seed", "7", *ga)
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
    assert env["command"].startswith("shardlab train --json --size tiny")
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

    saved = yaml.safe_load((folder / "config.yaml").read_text())
    assert (saved["launch"]["world"], saved["training"]["seed"]) == (2, 7)
    again, _ = train(tmp_path, "--config", str(folder / "config.yaml"), "--out", "again")
    assert again["folder"] == "again"
    assert again["loss"] == result["loss"]  # bit for bit


def told(world: World, steps: int, every: int | None) -> list[dict[str, Any]]:
    """What rank 0 tells of steps that are too quick to be told one by one."""
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


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (59.9, "59.9 s"), (59.97, "1 min 0 s"), (119.7, "2 min 0 s"),
     (7325, "2 h 2 min"), (200_000, "2 d 7 h")],
)  # fmt: skip
def test_a_duration(seconds: float, text: str) -> None:
    assert fmt.duration(seconds) == text


# ------------------------------------------------------------------ a user's own


class Rows:
    def __len__(self) -> int:
        return 100

    def batch(self, ids: Sequence[int]) -> Batch:
        if 7 in ids:
            raise ValueError("planted in sample 7")
        x = torch.zeros(len(ids), 1)
        return Batch(x, x, len(ids), len(ids))


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return (model(batch.inputs) - batch.targets).square().sum()


crashing = Workload("crashing", lambda: nn.Linear(1, 1), loss, Rows())


@pytest.mark.long
def test_ones_own_code_that_crashes(tmp_path: Path) -> None:
    """Its traceback is shown once and kept."""
    own = ("train", "--workload", f"{__file__}:crashing", "--steps", "100")
    done = commands.here(*own, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.splitlines()[-1].endswith("ValueError: planted in sample 7")
    (crash,) = (tmp_path / "runs").glob("*/crash.txt")
    assert "planted in sample 7" in crash.read_text()
    assert json.loads((crash.parent / "status.json").read_text())["state"] == "crashed"


# ------------------------------------------------------------------ files


def test_two_folders_in_one_second(tmp_path: Path) -> None:
    first, second = runfolder.new_folder(tmp_path, "x"), runfolder.new_folder(tmp_path, "x")
    assert first != second


def test_a_line_cut_off_by_a_crash_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "rank0.jsonl").write_text('{"step": 0}\n{"step": 1}\n{"st')
    runfolder.mark_failed(tmp_path, RankFailure(0, "out of luck"))
    status = json.loads((tmp_path / "status.json").read_text())
    assert status["last_finished_step"] == 1


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is not a folder to write to"):
        runfolder.refuse_unwritable(tmp_path / "file" / "x")


def test_a_folder_that_is_yet_to_be_made(tmp_path: Path) -> None:
    runfolder.refuse_unwritable(tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []
    assert runfolder.new_folder(tmp_path, "plan", tmp_path / "a" / "b").is_dir()
