"""Ranks: their results, their failures, and that none is ever left behind."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from multiprocessing import connection
from pathlib import Path
from typing import Any

import pytest
import torch

import commands
from conftest import GetRanks, long_unless
from shardlab import comm
from shardlab.config import LaunchConfig
from shardlab.errors import Mistake, RankFailure, UsageError
from shardlab.launch.forking import fork_server
from shardlab.launch.rank_process import Process, Seat
from shardlab.launch.ranks import Ranks
from shardlab.world import World

LAUNCH = LaunchConfig(device="cpu", timeout_s=60)
TRAIN = [*commands.SHARDLAB, "train", "--size", "tiny", "--steps", "100000"]


# Functions that run on the ranks.


def who(world: World) -> tuple[int, int, int, str]:
    return world.rank, world.size, torch.get_num_threads(), str(world.device)


def told(world: World) -> None:
    world.tell({"rank": world.rank})


def fail(world: World, how: str, *ranks: int) -> None:
    """Some ranks end, each in the same way; the others wait for them."""
    if world.rank in ranks:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exits":
            os._exit(3)
        if how == "is refused":
            raise UsageError("not like this")
        if how == "is a mistake":
            raise Mistake("own.py:3: KeyError")
        raise ValueError(f"planted on {world.rank}")
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


def test_each_rank_knows_its_place(ranks: GetRanks) -> None:
    places = [(r, 3, 1, "cpu") for r in range(3)]
    assert ranks(3).run(who) == places
    assert ranks(3).run("test_launch:who") == places  # by name: the parent need not import it


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
        time.sleep(0.2)
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
    ("how", "message"),
    [
        ("raises", "ValueError: planted on 1"),
        ("killed", "the process was killed by SIGKILL"),
        ("exits", "the process left with exit code 3"),
    ],
)
def test_the_cause_is_blamed_not_its_victim(how: str, message: str) -> None:
    """Rank 0 loses its peer and says so first; rank 1 is the one to name."""
    world = Ranks(LAUNCH, 2)
    pids = world.pids
    start = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        world.run(fail, how, 1)
    assert time.monotonic() - start < 8
    assert (caught.value.rank, caught.value.message) == (1, message)
    if how == "raises":
        assert caught.value.traceback is not None
        assert 'raise ValueError(f"planted on {world.rank}")' in caught.value.traceback
    assert commands.wait_until_gone(pids) == []
    assert not world.alive


def test_a_refusal_stays_a_refusal() -> None:
    with pytest.raises(UsageError, match=r"^not like this$"):
        Ranks(LAUNCH, 2).run(fail, "is refused", 1)


@pytest.mark.parametrize(
    ("wrong", "said"),
    long_unless(
        lambda wrong, _: wrong == [1], [([1], "rank 1: "), ([0], "rank 0: "), ([0, 1], "")]
    ),
)
def test_what_is_wrong_on_one_rank_names_it(wrong: list[int], said: str) -> None:
    with pytest.raises(Mistake) as caught:
        Ranks(LAUNCH, 2).run(fail, "is a mistake", *wrong)
    assert str(caught.value) == f"{said}own.py:3: KeyError"


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
    done = commands.here(*TRAIN[3:], "--inject", "kill:rank=1,step=2", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "error: rank 1: the process was killed by SIGKILL"
    status = folder_status(tmp_path / "runs")
    assert (status["state"], status["rank"], status["last_finished_step"]) == ("crashed", 1, 1)
    (crash,) = (tmp_path / "runs").glob("*/crash.txt")
    assert crash.read_text().startswith("rank 1 failed after step 1")


@pytest.mark.long
@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.deep)]
)
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


@pytest.mark.skipif(sys.platform != "linux", reason="the file is in memory")
def test_a_rank_that_starts_after_its_parent_has_left_ends() -> None:
    """It looked for the file for five minutes, and whoever read the command's output waited."""
    ours, theirs = fork_server().Pipe()
    gone = Seat(0, 1, f"/proc/{os.getpid()}/fd/987654")
    said, prints_to = fork_server().Pipe(duplex=False)
    process = Process(theirs, LAUNCH, gone, prints_to)
    theirs.close()
    prints_to.close()
    ours.close()
    try:
        assert process.join(30) == 1
    finally:
        process.kill()
        said.close()


@pytest.mark.deep
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
