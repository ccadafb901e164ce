"""Ranks on two hosts that are set up wrongly: what they say, and how soon."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import commands
import hosts
import preloaded_hosts
from conftest import deep_unless
from preloaded_hosts import Started, Warm, by_hand

pytestmark = pytest.mark.long

WITHIN_S = 10.0  # of the moment when the processes are there
ports = itertools.count(29500)
TINY = ("train", "--size", "tiny", "--steps", "2")


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warm]:
    with hosts.made(2) as two, preloaded_hosts.on(two, tmp_path_factory.mktemp("hosts")) as both:
        yield both


def start(
    both: Warm, *more: str, at: int = 1, argv: tuple[str, ...] = (), plant: str = "", **env: str
) -> list[Started]:
    """Two ranks, one on each host; the rank at host ``at`` is given something else."""
    port = next(ports)
    return [
        both.start(
            host, *TINY, *more, *(argv if host == at else ()), plant=plant if host == at else "",
            **by_hand(host, port, **(env if host == at else {})),
        )
        for host in range(2)
    ]  # fmt: skip


def refused(both: Warm, started: list[Started], words: str) -> None:
    """All of them end, and each host has one line about it, the same and soon."""
    for host in {one.host for one in started}:
        both.heard_of_any([one for one in started if one.host == host], f"error: {words}", WITHIN_S)
    assert [one.wait(15) for one in started] == [2] * len(started)
    lines = [(one.host, *one.errors) for one in started if one.errors]
    assert len({host for host, *_ in lines}) == len(lines)
    assert len({tuple(said) for _, *said in lines}) == 1
    assert "\n" not in lines[0][1]


def test_a_run_that_is_right(both: Warm, tmp_path: Path) -> None:
    started = start(both, "--out", str(tmp_path / "run"))
    assert [one.wait(60) for one in started] == [0, 0], started[0].err + started[1].err
    assert "waiting" not in started[0].err + started[1].err


def test_a_command_that_starts_ranks_on_both(both: Warm, tmp_path: Path) -> None:
    """The others are in `test_several_nodes.py`."""
    port, out = next(ports), str(tmp_path / "out")
    words = ("throughput", "--size", "tiny", "--micro-batch", "1", "--steps", "2", "--out", out)
    started = [both.start(host, *words, **by_hand(host, port)) for host in range(2)]
    assert [one.wait(60) for one in started] == [0, 0], started[0].err + started[1].err
    record = json.loads((tmp_path / "out" / "throughput.json").read_text())
    assert record["world"] == 2
    assert [node["ranks"] for node in record["env"]["nodes"]] == [[0], [1]]


# ------------------------------------------------------------------ planted misconfigurations


# What host 1 is given, and what both say.
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "loopback": ({"GLOO_SOCKET_IFNAME": "lo"},
        r"rank 1 on n2 would listen at 127\.0\.0\.1, where no other node reaches it: name the"),
    "the first host": ({"GLOO_SOCKET_IFNAME": "lo", "at": 0},
        r"rank 0 on n1 would listen at 127\.0\.0\.1, where no other node"),
    "no such interface": ({"GLOO_SOCKET_IFNAME": "ib0"},
        "rank 1 on n2: GLOO_SOCKET_IFNAME is ib0, and this host has lo, eth0"),
    "world": ({"WORLD_SIZE": "3"},
        "rank 0 on n1 is in a world of 2 ranks, and rank 1 on n2 in one of 3: start every node"),
    "torch": ({"plant": "import torch; torch.__version__ = '2.0.1'"},
        r"torch is 2\.1\S+ for rank 0 on n1, and 2\.0\.1 for rank 1 on n2: install one version"),
    "shardlab": ({"plant": "import shardlab; shardlab.__version__ = '0.0.1'"},
        r"shardlab is \S+ for rank 0 on n1, and 0\.0\.1 for rank 1 on n2: install one version"),
    "config": ({"argv": ("--learning-rate", "0.5")},
        r"training.learning_rate is 0\.001 for rank 0 on n1, and 0\.5 for rank 1 on n2: give all"),
    "data": ({"argv": ("--data", "/no/such")}, "rank 1 on n2: no such data: /no/such"),
}  # fmt: skip
FAST = ("loopback", "config")  # one before the ranks meet, one after


@pytest.mark.parametrize("what", deep_unless(lambda what: what in FAST, WRONG))
def test_what_is_wrong_on_one_host(both: Warm, what: str) -> None:
    given, words = WRONG[what]
    refused(both, start(both, **given), words)


@pytest.mark.deep
def test_nobody_at_the_endpoint(both: Warm, tmp_path: Path) -> None:
    """It is said early, and the rank waits on: rank 0 may come later."""
    port = next(ports)
    argv = (*TINY, "--out", str(tmp_path / "run"))
    second = both.start(1, *argv, **by_hand(1, port))
    words = "Connection refused; it tries for 300 s"
    both.heard([second], f"waiting: rank 1 on n2 does not reach .*, port {port}: {words}", WITHIN_S)
    first = both.start(0, *argv, **by_hand(0, port))
    assert [one.wait(60) for one in (first, second)] == [0, 0]


def lost(both: Warm, address: str, why: str, limit_s: int = 2) -> Callable[[], None]:
    """A rank that finds no rank 0 there; call what is returned to see that it says so."""
    port, limit = next(ports), ("--set", f"launch.timeout_s={limit_s}")
    one = both.start(1, *TINY, *limit, **by_hand(1, port, MASTER_ADDR=address))

    def see() -> None:
        place = f"rank 0 at {address}, port {port}"
        both.heard([one], f"waiting: rank 1 on n2 does not reach {place}: ({why})", WITHIN_S)
        within = rf"within {limit_s} s \(launch.timeout_s\)"
        both.heard([one], f"error: rank 1 on n2 did not reach {place}, {within}: ({why})", WITHIN_S)
        assert one.wait(5) == 2

    return see


@pytest.mark.deep
def test_an_endpoint_that_is_not_reached(both: Warm) -> None:
    both.hosts.call(0, "ip", "address", "add", "10.98.0.1/32", "dev", hosts.DEVICE)
    for see in [
        lost(both, "10.77.0.1", "Connection refused"),
        lost(both, "10.98.0.1", "Network is unreachable"),
        lost(both, "n1.invalid", "Name or service not known|Temporary failure in name resolution"),
    ]:
        see()
    both.hosts.cut(0)
    try:
        lost(both, "10.77.0.1", "No route to host|no answer", limit_s=4)()
    finally:
        both.hosts.mend(0)


@pytest.mark.deep
def test_a_port_in_use(both: Warm) -> None:
    """Rank 0 cannot listen there. The other rank finds something, which is no store."""
    port = next(ports)
    serve = ["-m", "http.server", str(port), "--bind", "10.77.0.1"]
    web = both.hosts.start(0, sys.executable, *serve, stderr=subprocess.DEVNULL)
    other = both.start(1, *TINY, "--set", "launch.timeout_s=4", **by_hand(1, port))
    try:
        both.heard([other], f"waiting: .* port {port}: what answers there is no store of PyTorch's",
                   WITHIN_S)  # fmt: skip
        first = both.start(0, *TINY, **by_hand(0, port))
        both.heard([first], rf"error: rank 0 on n1 cannot listen on 10\.77\.0\.1, port {port}: "
                   "Address already in use", WITHIN_S)  # fmt: skip
        assert [first.wait(5), other.wait(15)] == [2, 2]
    finally:
        web.kill()
        web.wait()


@pytest.mark.deep
def test_a_rank_is_missing(both: Warm) -> None:
    port = next(ports)
    started = [
        both.start(0, *TINY, "--set", "launch.timeout_s=5",
                   **by_hand(rank, port, WORLD_SIZE="4", LOCAL_RANK=str(rank), NODE_RANK="0",
                             LOCAL_WORLD_SIZE="2"))
        for rank in range(2)
    ]  # fmt: skip
    both.heard(started[:1], r"waiting: rank 0 on n1 waits for rank 2, 3 of 4, for 5 s", WITHIN_S)
    refused(both, started, r"rank 2, 3 did not come within 5 s \(launch.timeout_s\)")
    assert "waiting" not in started[1].err  # it is told once on each node


@pytest.mark.deep
def test_two_ranks_with_one_local_rank(both: Warm) -> None:
    port = next(ports)
    slurm = {
        "SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0",
        "SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_NODELIST": "n[1-2]",
        "SLURM_STEP_TASKS_PER_NODE": "2,1", "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    started = [both.start(0, *TINY, **slurm, SLURM_PROCID=str(rank)) for rank in range(2)]
    started.append(both.start(1, *TINY, **slurm | {"SLURM_PROCID": "2", "SLURM_NODEID": "1"}))
    refused(both, started, r"ranks 0, 1 are all n1 \(node 0\), local rank 0; the launcher is set")


@pytest.mark.deep
def test_two_processes_with_one_rank(both: Warm) -> None:
    port = next(ports)
    mpi = {"OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "MASTER_PORT": str(port),
           "MASTER_ADDR": "10.77.0.1"}  # fmt: skip
    # Nothing else is wrong: no two of them are the same local rank of one host.
    started = [
        both.start(host, *TINY, **mpi, OMPI_COMM_WORLD_RANK=rank, OMPI_COMM_WORLD_LOCAL_RANK=local)
        for host, rank, local in ((0, "0", "0"), (0, "1", "1"), (1, "1", "0"))
    ]
    refused(both, started, r"process \d+ on n. and process \d+ on n. are both rank 1; the launcher")


@pytest.mark.deep
def test_code_that_differs(both: Warm, tmp_path: Path) -> None:
    """Another checkout of the same version on one node, with one line more."""
    copy = tmp_path / "shardlab"
    shutil.copytree(commands.ROOT / "src" / "shardlab", copy)
    with (copy / "training" / "loop.py").open("a") as file:
        file.write("# changed\n")
    plant = f"import shardlab; shardlab.__file__ = '{copy / '__init__.py'}'"
    words = r"the code of shardlab is \w+ for rank 0 on n1, and \w+ for rank 1 on n2: install one"
    refused(both, start(both, plant=plant), words)


@pytest.mark.deep
def test_own_code_that_differs(both: Warm, tmp_path: Path) -> None:
    text = (commands.ROOT / "examples" / "your_model.py").read_text()
    own = []
    for node in range(2):
        (tmp_path / f"{node}").mkdir()
        (tmp_path / f"{node}" / "mine.py").write_text(text + "#\n" * node)
        own.append(("--workload", f"{tmp_path}/{node}/mine.py:workload"))
    refused(both, start(both, *own[0], argv=own[1]),
            r"model.workload is mine.py:workload \(content \w+\) for rank 0 on n1, "
            r"and mine.py:workload \(content \w+\) for rank 1 on n2")  # fmt: skip


# ------------------------------------------------------------------ the run folder


RAISES = """
from shardlab.training.recorder import Recorder
loss = Recorder.loss
def raising(self, number, value):
    if number == 3:
        raise RuntimeError("planted")
    loss(self, number, value)
Recorder.loss = raising
"""


@pytest.mark.deep
def test_the_folder_says_which_rank_failed(both: Warm, tmp_path: Path) -> None:
    """Runs that fail in different ways, all at once: they mostly wait."""
    hang = ("--inject", "hang:rank=1,step=3", "--set", "guard.hang_s=3")
    ways: list[tuple[tuple[str, ...], dict[str, Any], list[int], tuple[str, int], str]] = [
        ((), {"plant": RAISES}, [1, 1], ("crashed", 1), "planted"),
        ((), {"plant": RAISES, "at": 0}, [1, 1], ("crashed", 0), "planted"),
        (("--inject", "kill:rank=1,step=3"), {}, [1, -9], ("lost", 1), "n2"),
        (hang, {}, [1, 1], ("hung", 1), "rank 1"),
    ]
    runs = [
        start(both, "--steps", "6", "--out", f"{tmp_path / str(i)}", *way[0], **way[1])
        for i, way in enumerate(ways)
    ]
    for i, (started, (_, _, codes, verdict, words)) in enumerate(zip(runs, ways, strict=True)):
        assert [one.wait(100) for one in started] == codes, [one.err for one in started]
        status = json.loads((tmp_path / str(i) / "status.json").read_text())
        assert (status["state"], status["rank"]) == verdict
        assert words in status["reason"]
        assert len((tmp_path / str(i) / "rank1.jsonl").read_text().splitlines()) >= 3
