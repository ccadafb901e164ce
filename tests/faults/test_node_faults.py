"""Faults between machines: a link cut, a node killed, gone and back again, or slow.

The hosts are network namespaces, each with a host name of its own.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import commands
import hosts
from resuming import state_at
from shardlab import runfolder
from shardlab import trace as traces
from shardlab.errors import Halt, RankFailure
from shardlab.files import read_jsonl
from shardlab.guard import lost, nodes, verdict, watchdog
from shardlab.guard.nodes import Nodes
from shardlab.guard.verdict import Seen
from shardlab.report import trace as report

LIMIT_S = 6.0  # of the watchdog
TRAIN = [
    "-m", "shardlab", "train", "--size", "tiny", "--data", "synthetic", "--out", "run",
]  # fmt: skip
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
TWO = Nodes((0, 0, 1, 1), ("a", "b"))  # two ranks on each of two nodes


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


# ------------------------------------------------------------------ what is said, without hosts


def test_where_ranks_are() -> None:
    found = nodes.of([(0, "a"), (0, "a"), (1, "b"), (1, "b")], 2)
    assert found == Nodes((0, 0, 1, 1), ("a", "b"), 1)
    # mpirun does not number the nodes.
    assert nodes.of([(None, "x"), (None, "c"), (None, "x")], 1) == Nodes((0, 1, 0), ("x", "c"), 1)
    # Two nodes of one name, as in a container without a host name, are two.
    assert nodes.of([(0, "x"), (1, "x")], 0).are_several


def test_a_single_machine_is_not_named() -> None:
    one = nodes.of([(0, "a"), (0, "a")], 0)
    assert one.located("rank 1 waits") == "rank 1 waits"
    failure = RankFailure(1, "ValueError: x")
    one.locate(failure)
    assert str(failure) == "rank 1: ValueError: x"


def test_a_rank_is_named_with_its_node(tmp_path: Path) -> None:
    failure = RankFailure(3, "ValueError: a tensor of rank 2")
    TWO.locate(failure)
    assert str(failure) == "rank 3 (node 1, b): ValueError: a tensor of rank 2"
    runfolder.mark_crashed(tmp_path, failure)
    assert read_json(tmp_path / "status.json")["where"] == "node 1, b"
    assert (tmp_path / "crash.txt").read_text().startswith("rank 3 (node 1, b) failed before")
    halt = Halt("drifted", "rank 3 differs from rank 0, and rank 3 alone", rank=3)
    TWO.locate(halt)
    assert str(halt) == "rank 3 (node 1, b) differs from rank 0 (node 0, a), and rank 3 alone"


def test_a_node_of_which_no_rank_answers() -> None:
    ranks = [Seen(r, "backward", answers=r < 2) for r in range(4)]
    halt = verdict.judge(ranks, 60, TWO)
    assert str(halt) == (
        "hung for 60 s: node 1 (b, ranks 2, 3) does not answer: the machine, or the link to it, "
        "may be down; it was last seen in backward; ranks 0, 1 wait for them"
    )
    assert (halt.details["causes"], halt.details["nodes"]) == ([2, 3], [1])
    # One of its ranks answers: it is not the node.
    ranks[2] = Seen(2, "backward")
    said = str(verdict.judge(ranks, 60, TWO))
    assert "rank 3 (node 1, b) does not answer; it was last seen in backward" in said
    assert "node 1 (b" not in said


def test_ranks_that_left_without_a_word() -> None:
    gloo = RuntimeError("[/x/pair.cc:537] Read error [10.0.0.2]:5: Connection reset by peer. GLHF!")
    assert lost.is_lost_peer(gloo)
    why = "gone without a word: killed, or the machine is down (Read error [10.0.0.2]:5: "
    assert str(lost.of_ranks([2, 3], TWO, gloo)).startswith(f"node 1 (b, ranks 2, 3) is {why}")
    assert str(lost.of_ranks([3], TWO, gloo)).startswith(f"rank 3 (node 1, b) is {why}")

    now = [0.0]
    monitor = watchdog.Monitor(6.0, 600, clock=lambda: now[0], nodes=TWO)
    for tick in range(6):  # rank 1 says that it leaves, rank 3 goes without
        for rank in range(4):
            if tick == 1 and rank == 1:
                monitor.end(1)
            elif tick < 1 or rank in (0, 2):
                monitor.see(Seen(rank, "backward", tick=tick, beats=tick))
        now[0] += 1.0
    assert monitor.gone() == [3]


def test_a_node_is_slow_if_all_its_ranks_are() -> None:
    waited = {0: 1.0, 1: 2.0, 2: 9.0, 3: 7.0}  # what others waited for each rank
    slow = report._slowest(waited, {0: 9.0, 1: 8.0, 2: 2.0, 3: 1.0}, TWO)
    assert slow == ([2, 3], "Node 1 (b, ranks 2, 3)")
    slow = report._slowest(waited, {0: 9.0, 1: 8.0, 2: 1.0, 3: 7.0}, TWO)
    assert slow == ([2], "Rank 2 (node 1, b)")
    assert report._slowest({0: 1.0, 1: 2.0}, {0: 2.0, 1: 1.0}, Nodes()) == ([1], "Rank 1")


# ------------------------------------------------------------------ on hosts


class Run:
    """Commands on hosts with names, each with a log."""

    def __init__(self, network: hosts.Hosts, folder: Path) -> None:
        self.network, self.folder = network, folder
        self.agents: dict[int, subprocess.Popen[str]] = {}
        self._started: list[subprocess.Popen[str]] = []

    def start(self, host: int, *command: str, **env: str) -> None:
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', f"host{host}"]
        with (self.folder / f"log{host}").open("a") as log:
            self.agents[host] = self.network.start(
                host, *named, *command, cwd=self.folder, stdout=log, stderr=subprocess.STDOUT,
                env=commands.environment(
                    GLOO_SOCKET_IFNAME=hosts.DEVICE, OMP_NUM_THREADS="1", **env
                ),
            )  # fmt: skip
        self._started.append(self.agents[host])

    def end(self) -> None:
        self.network.end_all()
        for process in self._started:
            process.wait()

    def said(self, host: int) -> list[str]:
        log = (self.folder / f"log{host}").read_text()
        return [line for line in log.splitlines() if line.startswith("error: ")]

    def wait(self, is_so: Callable[[], bool], seconds: float = 60) -> float:
        """How long it took."""
        began = time.monotonic()
        while not is_so():
            if time.monotonic() - began > seconds:
                logs = [path.read_text()[-3000:] for path in sorted(self.folder.glob("log*"))]
                raise TimeoutError("\n".join(logs))
            time.sleep(0.05)
        return time.monotonic() - began

    def rows(self, name: str) -> int:
        path = self.folder / "run" / name
        return len(path.read_text().splitlines()) if path.exists() else 0

    def listening(self, host: int) -> dict[str, int]:
        """The addresses on which processes of a host listen, and their ids."""
        text = self.network.call(host, "ss", "-ltnpH")
        found = re.findall(r"^LISTEN +\d+ +\d+ +(\S+):\d+ .*pid=(\d+)", text, flags=re.M)
        assert found, text
        return {address: int(pid) for address, pid in found}


@contextlib.contextmanager
def two_hosts(folder: Path) -> Iterator[tuple[hosts.Hosts, Run]]:
    with hosts.made(2) as network:
        run = Run(network, folder)
        try:
            yield network, run
        finally:
            run.end()


def static(network: hosts.Hosts, host: int, ranks: int) -> list[str]:
    return [
        *TORCHRUN, f"--nnodes={network.count}", f"--node-rank={host}", f"--nproc-per-node={ranks}",
        f"--master-addr={network.address(0)}", "--master-port=29500",
        f"--local-addr={network.address(host)}",
    ]  # fmt: skip


@pytest.mark.long
@pytest.mark.timeout(120)
def test_a_link_that_is_cut(tmp_path: Path) -> None:
    """Each side says once what it knows, in time, and ends."""
    with two_hosts(tmp_path) as (network, run):
        more = ["--steps", "100000", "--hang-after", f"{LIMIT_S:g}", "--strategy", "simple_ddp"]
        for host in (0, 1):
            run.start(host, *static(network, host, ranks=2), *TRAIN, *more)
        run.wait(lambda: run.rows("rank3.jsonl") >= 3)
        for host in (0, 1):  # torchrun's store is torchrun's
            ours = {a for a, p in run.listening(host).items() if p != run.agents[host].pid}
            assert ours == {network.address(host)}
        network.cut(1)
        took = run.wait(lambda: bool(run.said(0) and run.said(1)), LIMIT_S + 10)
        assert took < LIMIT_S + 5
        run.wait(lambda: all(a.poll() is not None for a in run.agents.values()), 30)
        assert [agent.returncode for agent in run.agents.values()] == [1, 1]
        (first,), (second,) = run.said(0), run.said(1)  # once on each node
    assert first.startswith("error: hung for ")
    assert "node 1 (host1, ranks 2, 3) does not answer: the machine, or the link to it" in first
    assert second.startswith(
        "error: node 1 (host1, ranks 2, 3) has lost node 0 (host0, ranks 0, 1) at 10.77.0.1, "
        "port 29500: the store there has not answered for "
    )
    assert re.search(r"; rank [23] has been in .* for \d+ s$", second)
    # The side that has all reports speaks for the run, whoever was first.
    status = read_json(tmp_path / "run" / "status.json")
    assert (status["state"], status["rank"], status["where"]) == ("hung", 2, "node 1, host1")
    assert read_json(tmp_path / "run" / "hang.json")["nodes"] == [1]


@pytest.mark.long
@pytest.mark.timeout(200)
def test_a_node_that_is_killed_and_comes_back(tmp_path: Path) -> None:
    """The run continues without it and then with it, each time exactly from a checkpoint."""
    keep = "is_host={},keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=2"
    more = [
        "--steps", "1000", "--strategy", "zero1", "--precision", "fp64", "--hang-after",
        f"{LIMIT_S:g}", "--checkpoint-every", "5", "--set", "checkpoint.keep_last=1000",
        "--resume", "auto", "--inject", "slow:rank=0,ms=50",
    ]  # fmt: skip
    with two_hosts(tmp_path) as (network, run):
        endpoint = f"--rdzv-endpoint={network.address(0)}:29400"

        def start(host: int) -> None:
            elastic = ["--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-id=job"]
            own = [f"--local-addr={network.address(host)}"]
            rendezvous = ["--rdzv-backend=c10d", endpoint, f"--rdzv-conf={keep.format(1 - host)}"]
            # Else torchrun does not tell a node that joins later where the store is.
            alone = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
            run.start(host, *TORCHRUN, *elastic, *own, *rendezvous, *TRAIN, *more, **alone)

        start(0)
        start(1)
        run.wait(lambda: run.rows("checkpoints.jsonl") >= 1 and run.rows("rank1.jsonl") >= 7)
        hosts._end_processes(network.namespace(1))
        assert run.wait(lambda: bool(run.said(0)), LIMIT_S + 10) < LIMIT_S + 5
        assert re.match(
            r"error: node 1 \(host1, rank 1\) is gone without a word: killed, or the machine is "
            r"down \(.*10\.77\.0\.2.*\)$",
            run.said(0)[0],
        )
        status = read_json(tmp_path / "run" / "status.json")
        assert (status["state"], status["rank"], status["where"]) == ("lost", 1, "node 1, host1")
        run.wait(lambda: run.rows("resumes.jsonl") == 1)
        start(1)
        run.wait(lambda: run.rows("resumes.jsonl") == 2)
        resumes = read_jsonl(tmp_path / "run" / "resumes.jsonl")
        last = resumes[1]["step"] // 5 * 5 + 5
        run.wait(lambda: (tmp_path / "run/checkpoints" / f"step-{last + 5:06}").exists())
        assert len(run.said(0)) == 1
    assert [row["world"] for row in resumes] == [1, 2]
    # Undisturbed runs from the same checkpoints, with as many ranks, on one machine.
    for row, steps in zip(resumes, (resumes[1]["step"], last), strict=True):
        own = ["--out", f"from{row['step']}", "--set", "faults=[]", "--set", "launch.device=cpu"]
        many = ["--steps", str(steps), "--world", str(row["world"]), "--checkpoint-every", "5"]
        done = commands.shardlab("train", "--resume", row["checkpoint"], *many, *own, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        want = state_at(tmp_path / f"from{row['step']}", steps)
        got = state_at(tmp_path / "run", steps)
        assert want.keys() == got.keys()
        assert [name for name, value in want.items() if not torch.equal(value, got[name])] == []


@pytest.mark.long
@pytest.mark.timeout(100)
@pytest.mark.parametrize("kind", ["srun", "by hand"])
def test_nothing_listens_on_all_interfaces(kind: str, tmp_path: Path) -> None:
    with two_hosts(tmp_path) as (network, run):
        for host in (0, 1):
            rank, common = str(host), {"MASTER_ADDR": network.address(0), "MASTER_PORT": "29500"}
            own = {
                "srun": {
                    "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": rank,
                    "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0", "SLURM_NODEID": rank,
                    "SLURM_STEP_NODELIST": "a,b", "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
                },
                "by hand": {
                    "RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
                    "NODE_RANK": rank,
                },
            }[kind]  # fmt: skip
            run.start(host, sys.executable, *TRAIN, "--steps", "100000", **common, **own)
        run.wait(lambda: run.rows("rank1.jsonl") >= 2)
        assert [set(run.listening(host)) for host in (0, 1)] == [{"10.77.0.1"}, {"10.77.0.2"}]


@pytest.mark.long
@pytest.mark.timeout(100)
def test_a_slow_node_is_named(tmp_path: Path) -> None:
    slow = [word for r in (2, 3) for word in ("--inject", f"slow:rank={r},ms=250")]
    more = ["--strategy", "simple_ddp_ga", "--steps", "7", "--profile", *slow]
    with hosts.made(2) as network:
        done = network.torchrun(*TRAIN, *more, ranks=2, timeout=80, cwd=tmp_path)
    assert [d.returncode for d in done] == [0, 0], done
    said = report.verdict(traces.load(tmp_path / "run"))
    assert re.search(r"Node 1 \(.*, ranks 2, 3\) is the slow one: each other rank waited", said)
