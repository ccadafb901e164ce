"""A rank is killed in mid-run: the world starts again and ends as if nothing had happened."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import commands
from conftest import GetRanks
from resuming import losses_of, state_at, train
from shardlab import config as configs
from shardlab.errors import UsageError
from shardlab.files import read_jsonl
from shardlab.run import restart

STEPS, EVERY = 24, 4
RUN = [
    "train", "--size", "tiny", "--data", "synthetic", "--steps", str(STEPS), "--global-batch", "8",
    "--checkpoint-every", str(EVERY), "--set", "training.clip_norm=0.5",
    "--set", "training.schedule=cosine", "--set", "checkpoint.keep_last=20",
]  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, ranks: GetRanks) -> Path:
    values = {
        "model.size": "tiny",
        "data.source": "synthetic",
        "training.steps": STEPS,
        "training.global_batch": 8,
        "training.clip_norm": 0.5,
        "training.schedule": "cosine",
        "strategy.name": "zero2",
        "checkpoint.every": EVERY,
        "output.root": str(tmp_path_factory.mktemp("undisturbed")),
    }
    return train(ranks, 2, configs.load(None, values).to_dict())[1]


def kill_a_rank(process: subprocess.Popen[str], root: Path, after: int) -> tuple[str, str]:
    """End rank 1 once it has made some steps, and wait for the command."""
    status = commands.wait_for_steps(root, after)
    os.kill(status["pids"][1], signal.SIGKILL)
    try:
        out, err = process.communicate(timeout=90)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    return out, err


def assert_same(run: Path, undisturbed: Path, bitwise: bool = True) -> None:
    want, got = state_at(undisturbed, STEPS), state_at(run, STEPS)
    assert want.keys() == got.keys()
    for name, value in want.items():
        if bitwise:
            assert torch.equal(value, got[name]), name
        else:
            torch.testing.assert_close(got[name], value, rtol=1e-3, atol=1e-4)
    losses = losses_of(run)
    assert list(losses) == list(range(STEPS))
    if bitwise:
        assert losses == losses_of(undisturbed)
    assert json.loads((run / "status.json").read_text())["state"] == "finished"
    assert list((run / "checkpoints").glob(".*")) == []


def resumes_of(run: Path) -> list[dict[str, Any]]:
    return read_jsonl(run / "resumes.jsonl")


@pytest.mark.long
def test_our_launcher_starts_again(undisturbed: Path, tmp_path: Path) -> None:
    command = [*commands.SHARDLAB, *RUN, "--strategy", "zero2", "--max-restarts", "2"]
    process = commands.start(*command, cwd=tmp_path)
    _, err = kill_a_rank(process, tmp_path / "runs", EVERY + 2)
    assert process.returncode == 0, err
    (run,) = (tmp_path / "runs").iterdir()
    assert_same(run, undisturbed)
    (row,) = resumes_of(run)
    assert row["step"] >= EVERY  # not from the beginning
    assert "rank 1: the process was killed by SIGKILL; restart 1 of 2 with 2 ranks" in err


@pytest.mark.long
def test_with_fewer_ranks(undisturbed: Path, tmp_path: Path) -> None:
    command = [*commands.SHARDLAB, *RUN, "--strategy", "zero2", "--max-restarts", "1",
               "--min-world", "1"]  # fmt: skip
    process = commands.start(*command, cwd=tmp_path)
    _, err = kill_a_rank(process, tmp_path / "runs", EVERY + 2)
    assert process.returncode == 0, err
    (run,) = (tmp_path / "runs").iterdir()
    assert_same(run, undisturbed, bitwise=False)
    assert resumes_of(run)[0]["world"] == 1


@pytest.mark.long
def test_torchruns_agent_starts_again(undisturbed: Path, tmp_path: Path) -> None:
    """Nothing but torchrun's own flag is needed: a restarted rank goes on."""
    agent = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2",
             "--max-restarts=2", "--monitor-interval=0.2", "--rdzv-backend=c10d",
             "--rdzv-endpoint=localhost:0", "-m", "shardlab"]  # fmt: skip
    process = commands.start(*agent, *RUN, "--strategy", "zero2", cwd=tmp_path)
    _, err = kill_a_rank(process, tmp_path / "runs", EVERY + 2)
    assert process.returncode == 0, err
    (run,) = (tmp_path / "runs").iterdir()
    assert_same(run, undisturbed)
    (row,) = resumes_of(run)
    assert row["step"] >= EVERY


@pytest.mark.long
def test_a_run_that_was_killed_whole(undisturbed: Path, tmp_path: Path) -> None:
    """The parent too: `--resume auto` finds the run, and a new one begins where there is none."""
    command = [*commands.SHARDLAB, *RUN, "--strategy", "zero2", "--resume", "auto"]
    process = commands.start(*command, cwd=tmp_path)
    status = commands.wait_for_steps(tmp_path / "runs", EVERY + 2)
    process.kill()
    process.communicate()
    assert commands.wait_until_gone(status["pids"]) == []
    done = commands.run(*command, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    assert_same(run, undisturbed)


def resolved(**changes: Any) -> configs.Config:
    values = {"checkpoint.every": 2, "launch.max_restarts": 1, "training.global_batch": 12}
    return configs.load(None, values | changes)


def test_the_next_world() -> None:
    assert restart.next_world(resolved(**{"launch.world": 4})) == 4
    assert restart.next_world(resolved(**{"launch.world": 4, "launch.min_world": 2})) == 3
    # 5 ranks cannot share a batch of 12
    assert restart.next_world(resolved(**{"launch.world": 6, "launch.min_world": 2})) == 4
    assert restart.next_world(resolved(**{"launch.world": 6, "launch.min_world": 5})) == 6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"checkpoint.every": None}, "set checkpoint.every"),
        ({"launch.max_restarts": 0, "launch.min_world": 1}, "set launch.max_restarts"),
        ({"launch.world": 2, "launch.min_world": 3}, "1 to launch.world"),
    ],
)
def test_what_makes_no_sense_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        resolved(**changes)
