"""Faults between machines: a link cut, a node killed, gone and back again, or slow.

The hosts are network namespaces, each with a host name of its own. The deep
tests alone have them; what is said, and what is made of it, is tested without.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import commands
import hosts
import preloaded_hosts
from commands import rows_in
from preloaded_hosts import Started, Warm, by_hand
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
TRAIN = ("train", "--size", "tiny", "--data", "synthetic", "--out", "run")
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
    runfolder.mark_failed(tmp_path, failure)
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
    """The others waited for rank 2. What each rank waited itself says whether it was its node."""
    slow = report._slowest(2, {0: 9.0, 1: 8.0, 2: 2.0, 3: 1.0}, TWO)
    assert slow == ([2, 3], "Node 1 (b, ranks 2, 3)")
    slow = report._slowest(2, {0: 9.0, 1: 8.0, 2: 1.0, 3: 7.0}, TWO)
    assert slow == ([2], "Rank 2 (node 1, b)")
    assert report._slowest(1, {0: 2.0, 1: 1.0}, Nodes()) == ([1], "Rank 1")


# ------------------------------------------------------------------ on hosts


@pytest.fixture
def both(tmp_path: Path) -> Iterator[Warm]:
    with hosts.made(2) as two, preloaded_hosts.on(two, tmp_path) as both:
        yield both


def started(both: Warm, *more: str) -> list[Started]:
    """A run of four ranks, two on each host, as a person starts it by hand."""
    found = []
    for rank in range(4):
        place = {"LOCAL_RANK": str(rank % 2), "NODE_RANK": str(rank // 2)}
        env = by_hand(rank, 29500, WORLD_SIZE="4", LOCAL_WORLD_SIZE="2", **place)
        found.append(both.start(rank // 2, *TRAIN, *more, **env))
    return found


def wait(is_so: Callable[[], bool], folder: Path, seconds: float = 60) -> float:
    """How long it took; an error, with what the hosts have said, if it takes longer."""

    def logs() -> str:
        return "\n".join(path.read_text()[-3000:] for path in sorted(folder.glob("*.err")))

    return commands.wait_for(is_so, seconds, logs)


def start_agent(
    network: hosts.Hosts, host: int, folder: Path, *agent: str, **env: str
) -> subprocess.Popen[str]:
    """torchrun's agent on a host with a name; what it prints goes to a file."""
    named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', f"host{host}"]
    own = commands.environment(GLOO_SOCKET_IFNAME=hosts.DEVICE, OMP_NUM_THREADS="1", **env)
    with (folder / f"{host}.err").open("a") as log:
        return network.start(
            host, *named, *agent, cwd=folder, stdout=log, stderr=subprocess.STDOUT, env=own
        )


def said(folder: Path, host: int) -> list[str]:
    lines = (folder / f"{host}.err").read_text().splitlines()
    return [line for line in lines if line.startswith("error: ")]


@pytest.mark.deep
@pytest.mark.timeout(120)
def test_a_link_that_is_cut(tmp_path: Path) -> None:
    """Each side says once what it knows, in time, and ends."""
    hang = ("--set", f"guard.hang_s={LIMIT_S:g}", "--strategy", "simple_ddp")
    train = ("-m", "shardlab", *TRAIN, "--steps", "100000", *hang)
    with hosts.made(2) as network:
        agents = [
            start_agent(network, host, tmp_path, *network.agent(host, *train, ranks=2))
            for host in (0, 1)
        ]
        wait(lambda: rows_in(tmp_path / "run" / "rank3.jsonl") >= 3, tmp_path)
        for host in (0, 1):  # nothing listens on other interfaces; torchrun's store is torchrun's
            listening = network.call(host, "ss", "-ltnpH")
            found = re.findall(r"^LISTEN +\d+ +\d+ +(\S+):\d+ .*pid=(\d+)", listening, flags=re.M)
            ours = {address for address, pid in found if int(pid) != agents[host].pid}
            assert ours == {network.address(host)}
        network.cut(1)
        both = wait(lambda: bool(said(tmp_path, 0) and said(tmp_path, 1)), tmp_path, LIMIT_S + 10)
        assert both < LIMIT_S + 5
        assert [agent.wait(30) for agent in agents] == [1, 1]
    (first,), (second,) = said(tmp_path, 0), said(tmp_path, 1)  # once on each node
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


@pytest.mark.deep
@pytest.mark.timeout(200)
def test_a_node_that_is_killed_and_comes_back(tmp_path: Path) -> None:
    """The run continues without it and then with it, each time exactly from a checkpoint."""
    train = [
        *TRAIN, "--steps", "1000", "--strategy", "zero1", "--precision", "fp64", "--set",
        f"guard.hang_s={LIMIT_S:g}", "--checkpoint-every", "5",
        "--set", "checkpoint.keep_last=1000", "--resume", "auto", "--inject", "slow:rank=0,ms=50",
    ]  # fmt: skip
    run = tmp_path / "run"
    agents = []
    with hosts.made(2) as network:

        def start(host: int) -> None:
            keep = "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=2"
            agent = [
                sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--rdzv-id=job",
                "--nproc-per-node=1", "--max-restarts=3", "--rdzv-backend=c10d",
                f"--rdzv-endpoint={network.address(0)}:29400", f"--rdzv-conf=is_host={1 - host},"
                + keep, f"--local-addr={network.address(host)}", "-m", "shardlab",
            ]  # fmt: skip
            # Else torchrun does not tell a node that joins later where the store is.
            alone = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
            agents.append(start_agent(network, host, tmp_path, *agent, *train, **alone))

        start(0)
        start(1)
        wait(
            lambda: rows_in(run / "checkpoints.jsonl") >= 1 and rows_in(run / "rank1.jsonl") >= 7,
            tmp_path,
        )
        network.end(1)
        assert wait(lambda: bool(said(tmp_path, 0)), tmp_path, LIMIT_S + 10) < LIMIT_S + 5
        assert re.match(
            r"error: node 1 \(host1, rank 1\) is gone without a word: killed, or the machine is "
            r"down \(.*10\.77\.0\.2.*\)$",
            said(tmp_path, 0)[0],
        )
        status = read_json(run / "status.json")
        assert (status["state"], status["rank"], status["where"]) == ("lost", 1, "node 1, host1")
        wait(lambda: rows_in(run / "resumes.jsonl") == 1, tmp_path)
        start(1)
        wait(lambda: rows_in(run / "resumes.jsonl") == 2, tmp_path)
        resumes = read_jsonl(run / "resumes.jsonl")
        last = resumes[1]["step"] // 5 * 5 + 5
        wait(lambda: (run / "checkpoints" / f"step-{last + 5:06}").exists(), tmp_path)
        assert len(said(tmp_path, 0)) == 1
    for agent in agents:
        agent.wait()
    assert [row["world"] for row in resumes] == [1, 2]
    # Undisturbed runs from the same checkpoints, with as many ranks, on one machine.
    for row, steps in zip(resumes, (resumes[1]["step"], last), strict=True):
        own = ["--out", f"from{row['step']}", "--set", "faults=[]", "--set", "launch.device=cpu"]
        many = ["--steps", str(steps), "--world", str(row["world"]), "--checkpoint-every", "5"]
        done = commands.here("train", "--resume", row["checkpoint"], *many, *own, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        want, got = state_at(tmp_path / f"from{row['step']}", steps), state_at(run, steps)
        assert want.keys() == got.keys()
        assert [name for name, value in want.items() if not torch.equal(value, got[name])] == []


@pytest.mark.alone  # a busy machine makes other ranks late, too
@pytest.mark.deep
@pytest.mark.timeout(100)
def test_a_slow_node_is_named(both: Warm, tmp_path: Path) -> None:
    slow = [word for r in (2, 3) for word in ("--inject", f"slow:rank={r},ms=250")]
    ranks = started(both, "--strategy", "simple_ddp_ga", "--steps", "7", "--profile", *slow)
    assert [rank.wait(80) for rank in ranks] == [0, 0, 0, 0], ranks[0].err
    said = report.verdict(traces.load(tmp_path / "run"))
    assert re.search(r"Node 1 \(n2, ranks 2, 3\) is the slow one: each other rank waited", said)
