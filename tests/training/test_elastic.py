"""A rank is killed in mid-run: the world starts again and ends as if nothing had happened."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import commands
from resuming import losses_of, state_at
from shardlab import config as configs
from shardlab.files import read_jsonl
from shardlab.training import restart

STEPS, EVERY = 24, 4
ZERO2 = [
    "train", "--size", "tiny", "--data", "synthetic", "--steps", str(STEPS), "--global-batch", "8",
    "--checkpoint-every", str(EVERY), "--set", "training.clip_norm=0.5",
    "--set", "training.schedule=cosine", "--set", "checkpoint.keep_last=20", "--strategy", "zero2",
]  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    done = commands.here(*ZERO2, "--out", "run", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "run"


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


KILL = ("--inject", f"kill:rank=1,step={EVERY + 2},where=collective")
KILL_FIRST = ("--inject", f"kill:rank=0,step={EVERY + 2}")
TORCHRUN = [
    sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=2",
    "--monitor-interval=0.2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "-m",
    "shardlab",
]  # fmt: skip


def the_run_of(folder: Path) -> tuple[Path, dict[str, Any]]:
    """The only run in a folder, and how it was resumed: once, and not from the beginning."""
    (run,) = (folder / "runs").iterdir()
    (resumed,) = read_jsonl(run / "resumes.jsonl")
    assert resumed["step"] >= EVERY
    return run, resumed


@pytest.mark.long
@pytest.mark.parametrize(("kill", "least"), [(KILL, 2), (KILL_FIRST, 1)], ids=["all", "fewer"])
def test_our_launcher_starts_again(
    kill: tuple[str, ...], least: int, undisturbed: Path, tmp_path: Path
) -> None:
    """With as many ranks as before, or with one fewer if it may: then the numbers are close."""
    more = ("--max-restarts", "2", "--set", f"launch.min_world={least}")
    done = commands.here(*ZERO2, *kill, *more, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run, resumed = the_run_of(tmp_path)
    assert resumed["world"] == least
    assert_same(run, undisturbed, bitwise=least == 2)
    how = "killed by SIGKILL; restart 1 of 2 with"
    said = f"rank 1: the process was {how} 2 ranks", f"rank 0: the process was {how} 1 rank"
    assert said[2 - least] in done.stderr


@pytest.mark.long
@pytest.mark.parametrize(
    "out", [(), pytest.param(("--out", "runs/mine"), marks=pytest.mark.deep)], ids=["own", "--out"]
)
def test_torchruns_agent_starts_again(
    out: tuple[str, ...], undisturbed: Path, tmp_path: Path
) -> None:
    """Nothing but torchrun's own flag is needed: a restarted rank continues its own run.

    There is one folder, of a world of two, and one summary: rank 0 alone prints.
    """
    done = commands.run(*TORCHRUN, *ZERO2, *KILL, *out, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run, resumed = the_run_of(tmp_path)
    assert resumed["world"] == 2
    assert_same(run, undisturbed)
    assert json.loads(done.stdout)["folder"] == str(run.relative_to(tmp_path))


@pytest.mark.deep
def test_a_run_that_was_killed_whole(undisturbed: Path, tmp_path: Path) -> None:
    """The parent too: `--resume auto` finds the run, and a new one begins where there is none."""
    command = [*commands.SHARDLAB, *ZERO2, "--resume", "auto"]
    process = commands.start(*command, cwd=tmp_path)
    status = commands.wait_for_steps(tmp_path / "runs", EVERY + 2)
    process.kill()
    process.communicate()
    assert commands.wait_until_gone(status["pids"]) == []
    done = commands.here(*command[3:], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert_same(the_run_of(tmp_path)[0], undisturbed)


def resolved(**changes: Any) -> configs.Config:
    values = {"checkpoint.every": 2, "launch.max_restarts": 1, "training.global_batch": 12}
    return configs.load(None, values | changes)


def test_the_next_world() -> None:
    assert restart.next_world(resolved(**{"launch.world": 4})) == 4
    assert restart.next_world(resolved(**{"launch.world": 4, "launch.min_world": 2})) == 3
    # Two ranks hold a model together: the number of ranks stays even.
    cut = {"strategy.name": "zero1", "strategy.options.tensor": 2, "launch.world": 6}
    assert restart.next_world(resolved(**cut, **{"launch.min_world": 2})) == 4
    assert restart.next_world(resolved(**cut, **{"launch.min_world": 5})) == 6
