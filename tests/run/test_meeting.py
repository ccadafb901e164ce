"""Ranks on two hosts that are set up wrongly: what they say, and how soon."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import commands
import hosts
import warm
from warm import Started, Warm

pytestmark = pytest.mark.long

WITHIN_S = 10.0  # of the moment when the processes are there
ports = itertools.count(29500)
TINY = ("train", "--size", "tiny", "--steps", "2")


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warm]:
    with hosts.made(2) as two, warm.on(two, tmp_path_factory.mktemp("hosts")) as both:
        yield both


def by_hand(rank: int, port: int, **changes: str) -> dict[str, str]:
    """What a person exports on each node before the command."""
    return {
        "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
        "NODE_RANK": str(rank), "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", **changes,
    }  # fmt: skip


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


# ------------------------------------------------------------------ planted misconfigurations


@pytest.mark.parametrize("host", [0, 1])
def test_loopback_for_gloo(both: Warm, host: int) -> None:
    """An interface that is there, where the other node does not come."""
    started = start(both, at=host, GLOO_SOCKET_IFNAME="lo")
    other = 1 - host
    refused(both, started, rf"rank {other} on n{other + 1} does not reach rank {host} on "
            rf"n{host + 1} at 127\.0\.0\.1, port \d+, where Gloo would listen \(interface lo\): "
            "Connection refused; name the interface")  # fmt: skip


def test_an_interface_of_another_network(both: Warm) -> None:
    """As a container's bridge: it has an address, to which the other node knows no way."""
    both.hosts.call(1, "ip", "link", "add", "br9", "type", "veth")
    both.hosts.call(1, "ip", "address", "add", "10.99.0.1/24", "dev", "br9")
    both.hosts.call(1, "ip", "link", "set", "br9", "up")
    started = start(both, argv=("--set", "launch.interface=br9"))
    refused(both, started, r"rank 0 on n1 does not reach rank 1 on n2 at 10\.99\.0\.1, port \d+, "
            r"where Gloo would listen \(interface br9\): Network is unreachable")  # fmt: skip


def test_an_interface_that_is_not_there(both: Warm) -> None:
    started = start(both, GLOO_SOCKET_IFNAME="ib0")
    refused(both, started, "rank 1 on n2: GLOO_SOCKET_IFNAME is ib0, and this host has lo, eth0")


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


def test_world_sizes_differ(both: Warm) -> None:
    refused(both, start(both, WORLD_SIZE="3"), "rank 0 on n1 is in a world of 2 ranks, and rank 1 "
            "on n2 in one of 3: start every node with the same number")  # fmt: skip


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


@pytest.mark.parametrize(("argv", "plant", "words"), [
    ((), "import torch; torch.__version__ = '2.0.1'",
     r"torch is 2\.1\S+ for rank 0 on n1, and 2\.0\.1 for rank 1 on n2: install one version"),
    ((), "import shardlab; shardlab.__version__ = '0.0.1'",
     r"shardlab is \S+ for rank 0 on n1, and 0\.0\.1 for rank 1 on n2: install one version"),
    (("--learning-rate", "0.5"), "",
     r"training.learning_rate is 0\.001 for rank 0 on n1, and 0\.5 for rank 1 on n2: give all"),
    (("--data", "/no/such"), "", "rank 1 on n2: no such data: /no/such"),
], ids=["torch", "shardlab", "config", "data"])  # fmt: skip
def test_nodes_that_differ(both: Warm, argv: tuple[str, ...], plant: str, words: str) -> None:
    refused(both, start(both, argv=argv, plant=plant), words)


def test_code_that_differs(both: Warm, tmp_path: Path) -> None:
    """Another checkout of the same version on one node, with one line more."""
    copy = tmp_path / "other" / "shardlab"
    shutil.copytree(commands.ROOT / "src" / "shardlab", copy)
    with (copy / "run" / "loop.py").open("a") as file:
        file.write("# changed\n")
    port = next(ports)
    first = both.start(0, *TINY, **by_hand(0, port))
    with (tmp_path / "said").open("w+") as said:
        path = os.pathsep.join([str(copy.parent), commands.environment()["PYTHONPATH"]])
        env = {**commands.environment(), **by_hand(1, port), "PYTHONPATH": path}
        other = both.hosts.start(1, *commands.SHARDLAB, *TINY, env=env, cwd=tmp_path, stderr=said)
        words = (
            r"error: the code of shardlab/run/loop.py is not the same for rank 0 on n1 and rank 1"
        )
        both.heard([first], words, 4 * WITHIN_S)  # torch has to be imported
        assert [first.wait(5), other.wait(5)] == [2, 2]
        assert re.search(words, (tmp_path / "said").read_text())


def test_own_code_that_differs(both: Warm, tmp_path: Path) -> None:
    for node in range(2):
        (tmp_path / f"{node}").mkdir()
        text = (commands.ROOT / "examples" / "your_model.py").read_text()
        (tmp_path / f"{node}" / "mine.py").write_text(text + "#\n" * node)
    port = next(ports)
    argv = ("train", "--workload", "mine.py:workload", "--steps", "2")
    started = [
        both.start(host, *argv, cwd=tmp_path / f"{host}", **by_hand(host, port))
        for host in range(2)
    ]
    refused(both, started, r"model.workload is mine.py:workload \(content \w+\) for rank 0 on n1, "
            r"and mine.py:workload \(content \w+\) for rank 1 on n2")  # fmt: skip


def test_clocks_apart(both: Warm, tmp_path: Path) -> None:
    """A warning: nothing is computed from them."""
    plant = "import time; right = time.time; time.time = lambda: right() + 3600"
    started = start(both, "--out", str(tmp_path / "run"), plant=plant)
    words = (
        r"warning: the clock of rank 1 on n2 is 3600\.0 s ahead of that of rank 0 on n1: times in"
    )
    both.heard(started[:1], words, WITHIN_S)
    assert [one.wait(60) for one in started] == [0, 0]


# ------------------------------------------------------------------ folders that are not shared


RAISES = """
from shardlab.run.recorder import Recorder
loss = Recorder.loss
def raising(self, number, value):
    if number == 3:
        raise RuntimeError("planted")
    loss(self, number, value)
Recorder.loss = raising
"""


def apart(
    both: Warm, folder: Path, *more: str, at: int = 1, plant: str = "", ranks_per_node: int = 1
) -> list[Started]:
    """Ranks whose folder ``run`` is another on each host. ``plant`` runs in one host's first."""
    port, started = next(ports), []
    for host in range(2):
        (folder / f"n{host + 1}").mkdir(exist_ok=True)
        for local in range(ranks_per_node):
            env = by_hand(
                host * ranks_per_node + local, port, WORLD_SIZE=str(2 * ranks_per_node),
                LOCAL_RANK=str(local), LOCAL_WORLD_SIZE=str(ranks_per_node), NODE_RANK=str(host),
            )  # fmt: skip
            started.append(both.start(
                host, "train", "--size", "tiny", "--out", "run", *more, cwd=folder / f"n{host + 1}",
                plant=plant if (host, local) == (at, 0) else "", **env,
            ))  # fmt: skip
    return started


def collected(folder: Path) -> list[tuple[str, list[int], bool]]:
    record = json.loads((folder / "n1" / "run" / "collected.json").read_text())
    return [(part["host"], part["ranks"], part["collected"]) for part in record["parts"]]


def rows(folder: Path, rank: int) -> list[int]:
    path = folder / "n1" / "run" / f"rank{rank}.jsonl"
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_what_other_nodes_wrote_is_collected(both: Warm, tmp_path: Path) -> None:
    started = apart(both, tmp_path, "--steps", "6", "--profile", ranks_per_node=2)
    codes = [one.wait(90) for one in started]
    assert codes == [0] * 4, "\n".join(one.err for one in started)
    assert "note: no common folder: rank 2, 3 on n2 write to their own disks" in started[0].err
    run = tmp_path / "n1" / "run"
    assert collected(tmp_path) == [("n2", [2, 3], True)]
    for rank in range(4):
        assert rows(tmp_path, rank) == list(range(6))
        assert (run / f"ledger.rank{rank}.jsonl").stat().st_size
        assert len(list((run / "traces" / f"rank{rank}").glob("*.gz"))) == 1
    assert not list(run.rglob("*.part"))
    assert json.loads((run / "status.json").read_text())["state"] == "finished"
    done = commands.here("trace", "analyze", "run", "--json", cwd=run.parent)
    assert done.returncode == 0, done.stderr
    assert {row["rank"] for row in json.loads(done.stdout)["steps"]} == set(range(4))


@pytest.mark.parametrize("more", [("--checkpoint-every", "2"), ("--resume", "auto")])
def test_checkpoints_need_a_common_folder(
    both: Warm, tmp_path: Path, more: tuple[str, str]
) -> None:
    started = apart(both, tmp_path, "--steps", "4", *more)
    words = "where rank 0 on n1 keeps the run, is not visible to rank 1 on n2, in"
    remedy = "checkpoints need a folder that all nodes share, as in --out /shared/run"
    refused(both, started, f"{tmp_path / 'n1'}, {words} {tmp_path / 'n2'}: {remedy}")
    assert not list(tmp_path.glob("n*/*"))


Runs = dict[str, tuple[Path, list[Started]]]


@pytest.fixture(scope="module")
def failing(both: Warm, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Runs that fail in different ways, all at once: they mostly wait."""
    root = tmp_path_factory.mktemp("apart")
    hang = ("--inject", "hang:rank=1,step=3", "--set", "guard.hang_s=3")
    ways: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
        "rank 2 raises": ((), {"plant": RAISES, "ranks_per_node": 2}),
        "rank 0 raises": ((), {"plant": RAISES, "at": 0}),
        "killed": (("--inject", "kill:rank=1,step=3"), {}),
        "hangs": (hang, {}),
    }
    runs = {}
    for name, (more, options) in ways.items():
        (root / name).mkdir()
        runs[name] = root / name, apart(both, root / name, "--steps", "6", *more, **options)
    return runs


def ended(failing: Runs, name: str, codes: list[int]) -> tuple[Path, dict[str, Any]]:
    folder, started = failing[name]
    assert [one.wait(100) for one in started] == codes, [one.err for one in started]
    status: dict[str, Any] = json.loads((folder / "n1" / "run" / "status.json").read_text())
    return folder, status


def test_a_rank_of_another_node_raises(failing: Runs) -> None:
    """Its files and its traceback are in the folder of rank 0, with those of its neighbour."""
    folder, status = ended(failing, "rank 2 raises", [1] * 4)
    assert collected(folder) == [("n2", [2, 3], True)]
    assert rows(folder, 2) == [0, 1, 2]
    assert rows(folder, 3)[:3] == [0, 1, 2]
    assert (status["state"], status["rank"]) == ("crashed", 2)
    assert "planted" in (folder / "n1" / "run" / "crash.txt").read_text()


def test_rank_0_raises(failing: Runs) -> None:
    """The other node is asked for its files while it waits in a collective."""
    folder, status = ended(failing, "rank 0 raises", [1, 1])
    assert collected(folder) == [("n2", [1], True)]
    assert rows(folder, 1)[:3] == [0, 1, 2]
    assert (status["state"], status["rank"]) == ("crashed", 0)


def test_a_node_that_is_gone_is_missing(failing: Runs) -> None:
    folder, status = ended(failing, "killed", [1, -9])
    assert collected(folder) == [("n2", [1], False)]
    assert status["state"] == "lost"
    assert "n2" in status["reason"]


def test_a_run_that_hangs(failing: Runs) -> None:
    folder, status = ended(failing, "hangs", [1, 1])
    assert collected(folder) == [("n2", [1], True)]
    assert rows(folder, 1) == [0, 1, 2]
    assert (status["state"], status["rank"]) == ("hung", 1)
