"""Ranks: their results, their failures, and that none is ever left behind."""

from __future__ import annotations

import json
import os
import platform
import resource
import signal
import sys
import time
from multiprocessing import connection
from pathlib import Path
from typing import Any

import pytest
import torch

import commands
from conftest import GetRanks
from shardlab import comm
from shardlab.config import LaunchConfig
from shardlab.errors import RankFailure, UsageError
from shardlab.run.ranks import Ranks
from shardlab.world import World

LAUNCH = LaunchConfig(device="cpu", timeout_s=60)
TRAIN = [*commands.SHARDLAB, "train", "--size", "tiny", "--steps", "100000"]


# Functions that run on the ranks.


def who(world: World) -> tuple[int, int, int, str]:
    return world.rank, world.size, torch.get_num_threads(), str(world.device)


def told(world: World) -> None:
    world.tell({"rank": world.rank})


def raise_on(world: World, rank: int) -> None:
    if world.rank == rank:
        raise ValueError(f"planted on {rank}")
    comm.all_reduce(torch.ones(1), world.group)  # the others wait for it


def kill_self_on(world: World, rank: int) -> None:
    if world.rank == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.all_reduce(torch.ones(1), world.group)


def exit_on(world: World, rank: int) -> None:
    if world.rank == rank:
        os._exit(3)
    comm.all_reduce(torch.ones(1), world.group)


def refuse_on(world: World, rank: int) -> None:
    if world.rank == rank:
        raise UsageError("not like this")
    comm.all_reduce(torch.ones(1), world.group)


def sleep_on(world: World, rank: int) -> None:
    time.sleep(60 if world.rank == rank else 0)


def first_of(world: World, size: int) -> tuple[int, float] | None:
    member = world.first(size)
    if member is None:
        return None
    tensor = torch.ones(1)
    comm.all_reduce(tensor, member.group)
    return member.size, float(tensor)


def shared(world: World) -> tuple[Any, list[int]]:
    return world.share(f"from {world.rank}"), world.gather(world.rank * 10)


def faults_of_a_step(_world: World) -> int:
    """The fewest pages that the system had to give again in a step of 64 MiB in tensors, once two
    steps are over. (A thread beside this one may take a tensor's place in one of the steps.)"""
    faults = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        tensors = [torch.ones(2**21) for _ in range(8)]
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
        del tensors
    return min(faults[2:])


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc's malloc")
def test_what_a_step_frees_is_there_for_the_next(ranks: GetRanks) -> None:
    """64 MiB are 16,384 pages; as glibc comes, all are taken anew."""
    assert max(ranks(2).run(faults_of_a_step)) < 1000


def test_each_rank_knows_its_place(ranks: GetRanks) -> None:
    assert ranks(3).run(who) == [(r, 3, 1, "cpu") for r in range(3)]


def test_a_function_can_be_named(ranks: GetRanks) -> None:
    """So that the parent need not import it."""
    assert ranks(2).run("test_launch:who")[1][0] == 1


def test_events_arrive(ranks: GetRanks) -> None:
    events: list[Any] = []
    ranks(2).run(told, on_event=events.append)
    assert sorted(e["rank"] for e in events) == [0, 1]


def test_share_and_gather(ranks: GetRanks) -> None:
    assert ranks(3).run(shared) == [("from 0", [0, 10, 20])] * 3


@pytest.mark.long
def test_a_slow_parent_mixes_no_answers_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank alone names its port and is ready at once: two answers wait, to two questions."""
    wait = connection.wait

    def late(*args: Any) -> Any:
        time.sleep(1)
        return wait(*args)

    monkeypatch.setattr(connection, "wait", late)
    with Ranks(LAUNCH, 1) as alone:
        assert alone.run(who, deadline_s=20)[0][:2] == (0, 1)


def test_a_smaller_world_inside(ranks: GetRanks) -> None:
    for _ in range(2):  # the group is made once and used again
        assert ranks(3).run(first_of, 2) == [(2, 2.0), (2, 2.0), None]
    assert ranks(3).run(first_of, 1) == [(1, 1.0), None, None]


@pytest.mark.long
@pytest.mark.parametrize(
    ("crash", "message"),
    [
        (raise_on, "ValueError: planted on 1"),
        (kill_self_on, "the process was killed by SIGKILL"),
        (exit_on, "the process left with exit code 3"),
    ],
    ids=["raises", "killed", "exits"],
)
def test_the_cause_is_blamed_not_its_victim(crash: Any, message: str) -> None:
    """Rank 0 loses its peer and says so first; rank 1 is the one to name."""
    world = Ranks(LAUNCH, 2)
    pids = world.pids
    start = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        world.run(crash, 1)
    assert time.monotonic() - start < 8
    assert (caught.value.rank, caught.value.message) == (1, message)
    if crash is raise_on:
        assert caught.value.traceback is not None
        assert 'raise ValueError(f"planted on {rank}")' in caught.value.traceback
    assert commands.wait_until_gone(pids) == []
    assert not world.alive


def test_a_refusal_stays_a_refusal() -> None:
    world = Ranks(LAUNCH, 2)
    with pytest.raises(UsageError, match=r"^not like this$"):
        world.run(refuse_on, 1)


@pytest.mark.long
def test_a_deadline_names_who_is_late() -> None:
    world = Ranks(LAUNCH, 2)
    pids = world.pids
    with pytest.raises(RankFailure, match=r"rank 1: no answer within 2 s \(waiting for 1\)"):
        world.run(sleep_on, 1, deadline_s=2)
    assert commands.wait_until_gone(pids) == []


def test_closing_ends_the_ranks() -> None:
    with Ranks(LAUNCH, 2) as world:
        pids = world.pids
        assert world.alive
    assert commands.wait_until_gone(pids) == []


# As a user sees it.


def folder_status(root: Path) -> dict[str, Any]:
    (status,) = root.glob("*/status.json")
    content: dict[str, Any] = json.loads(status.read_text())
    return content


@pytest.mark.long
def test_a_killed_rank_ends_the_command(tmp_path: Path) -> None:
    process = commands.start(*TRAIN, cwd=tmp_path)
    pids = commands.wait_for_steps(tmp_path / "runs", 2)["pids"]
    others = commands.descendants(process.pid)
    assert set(pids) <= set(others)
    os.kill(pids[1], signal.SIGKILL)
    start = time.monotonic()
    _, errors = process.communicate(timeout=10)
    assert time.monotonic() - start < 10
    assert process.returncode == 1
    assert errors.splitlines()[-1] == "error: rank 1: the process was killed by SIGKILL"
    assert commands.wait_until_gone(others) == []
    status = folder_status(tmp_path / "runs")
    assert (status["state"], status["rank"]) == ("crashed", 1)
    assert status["last_finished_step"] >= 1
    (crash,) = (tmp_path / "runs").glob("*/crash.txt")
    assert crash.read_text().startswith("rank 1 failed after step")


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_an_interruption_leaves_no_process(number: int, tmp_path: Path) -> None:
    """Without checkpoints there is nothing to save: the run ends at once."""
    process = commands.start(*TRAIN, cwd=tmp_path)
    commands.wait_for_steps(tmp_path / "runs", 2)
    others = commands.descendants(process.pid)
    os.kill(process.pid, number)
    _, errors = process.communicate(timeout=10)
    assert process.returncode == 128 + number
    assert "Traceback" not in errors
    assert errors.splitlines()[-1] == "interrupted: every rank was ended"
    assert commands.wait_until_gone(others) == []
    assert folder_status(tmp_path / "runs")["state"] == "interrupted"


@pytest.mark.long
def test_ranks_die_with_their_parent(tmp_path: Path) -> None:
    process = commands.start(*TRAIN, cwd=tmp_path)
    commands.wait_for_steps(tmp_path / "runs", 2)
    others = commands.descendants(process.pid)
    process.kill()
    process.communicate(timeout=10)
    assert commands.wait_until_gone(others) == []


@pytest.mark.long
def test_torchrun(tmp_path: Path) -> None:
    """The ranks of torchrun join each other; one folder, one summary."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    done = commands.run(
        *torchrun, "-m", "shardlab", "train", "--size", "tiny", "--steps", "3", "--json",
        cwd=tmp_path, OMP_NUM_THREADS="1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] == 3
    assert folder_status(tmp_path / "runs")["state"] == "finished"
    (config,) = (tmp_path / "runs").glob("*-gpt2-tiny-simple_ddp-w2/config.yaml")
    assert "world: 2" in config.read_text()


@pytest.mark.long
def test_torchrun_crash(tmp_path: Path) -> None:
    """A killed rank of torchrun's: the folder says so, though we did not start the ranks."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    process = commands.start(*torchrun, "-m", "shardlab", *TRAIN[3:], cwd=tmp_path)
    pids = commands.wait_for_steps(tmp_path / "runs", 2)["pids"]
    os.kill(pids[1], signal.SIGKILL)
    process.communicate(timeout=30)
    assert process.returncode == 1
    assert commands.wait_until_gone(pids) == []
    assert folder_status(tmp_path / "runs")["state"] == "crashed"


@pytest.mark.long
def test_torchrun_refuses_another_world(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    done = commands.run(
        *torchrun, "-m", "shardlab", "train", "--world", "4", cwd=tmp_path, OMP_NUM_THREADS="1"
    )
    assert done.returncode == 1  # torchrun's own
    lines = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert lines[0].startswith("error: launch.world is 4, but torchrun has started 2 ranks")
    assert not (tmp_path / "runs").exists()
