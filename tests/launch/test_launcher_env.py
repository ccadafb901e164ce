"""The place of a process among a launcher's ranks, from nothing but its environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import commands
from shardlab import config as configs
from shardlab.config import LaunchConfig
from shardlab.errors import UsageError
from shardlab.launch import cluster, doctor, launch, launcher_env, ranks
from shardlab.launch.launcher_env import Place, first_node, port_of, resolve, tasks_per_node

TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "n1", "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_MAX_RESTARTS": "0",
}  # fmt: skip
SLURM = {
    "SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0", "SLURM_PROCID": "2", "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1", "SLURM_NTASKS": "3", "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_NODELIST": "n[08-09]", "SLURM_JOB_NODELIST": "n[08-11]",
    "SLURM_STEP_TASKS_PER_NODE": "2,1", "SLURM_TASKS_PER_NODE": "8(x4)",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "4711.1",
}  # fmt: skip
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
# The script of a Slurm job: it looks like a first task, but no step has started it.
BATCH = {"SLURM_JOB_ID": "17", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0",
         "SLURM_NTASKS": "8", "SLURM_JOB_NODELIST": "n[1-2]"}  # fmt: skip
ONE_TASK = SLURM | {
    "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_STEP_NODELIST": "n08",
    "SLURM_PROCID": "0", "SLURM_NODEID": "0",
}  # fmt: skip
ON_ONE_NODE = {"SLURM_STEP_NODELIST": "n08", "SLURM_STEP_TASKS_PER_NODE": "3", "SLURM_NODEID": "0"}


@pytest.mark.parametrize(("environ", "want"), [
    ({}, None),
    ({"RANK": "0", "WORLD_SIZE": "2"}, None),  # as our own ranks have them
    (SLURM | {"RANK": "2", "WORLD_SIZE": "3", "MASTER_ADDR": "n08"},
     Place("srun", 2, 3, 0, 1, 1, 2, "n08", port_of("slurm 17.0"))),
    (TORCHRUN, Place("torchrun", 3, 4, 1, 2, 1, 2, "n1", 29500)),
    ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
     Place("torchrun", 1, 2, 1, 2, 0, 1, "localhost", 1)),
    (SLURM, Place("srun", 2, 3, 0, 1, 1, 2, "n08", port_of("slurm 17.0"))),
    (SLURM | {"MASTER_ADDR": "ib08", "MASTER_PORT": "7000"},
     Place("srun", 2, 3, 0, 1, 1, 2, "ib08", 7000)),
    (SLURM | ON_ONE_NODE, Place("srun", 2, 3, 0, 3, 0, 1, "127.0.0.1", port_of("slurm 17.0"))),
    (OPEN_MPI, Place("mpirun", 1, 2, 1, 2, 0, 1, "127.0.0.1", port_of("mpi 4711.1"))),
    (MPICH, Place("mpirun", 3, 4, 1, 2, None, 2, "", port_of("mpi "))),
    (MPICH | {"MASTER_ADDR": "n1"}, Place("mpirun", 3, 4, 1, 2, None, 2, "n1", port_of("mpi "))),
    ({"PMI_RANK": "0", "PMI_SIZE": "1"},
     Place("mpirun", 0, 1, 0, 1, 0, 1, "127.0.0.1", port_of("mpi "))),
    # One inside the other: the inner one has started the ranks.
    (SLURM | TORCHRUN, Place("torchrun", 3, 4, 1, 2, 1, 2, "n1", 29500)),
    (SLURM | OPEN_MPI, Place("mpirun", 1, 2, 1, 2, 0, 1, "127.0.0.1", port_of("mpi 4711.1"))),
    (SLURM | MPICH, Place("mpirun", 3, 4, 1, 2, None, 2, "", port_of("mpi "))),
    # srun --mpi=pmi2 sets both.
    (SLURM | {"PMI_RANK": "2", "PMI_SIZE": "3"},
     Place("srun", 2, 3, 0, 1, 1, 2, "n08", port_of("slurm 17.0"))),
    # Ray's nodes may be tasks of srun, and its ranks are not.
    (SLURM | {"RANK": "0", "WORLD_SIZE": "8", "MASTER_ADDR": "n08", "MASTER_PORT": "1",
              "RAY_JOB_ID": "1"}, Place("torchrun", 0, 8, 0, 8, 0, 1, "n08", 1)),
    # Not ranks: a job's script, salloc's shell on a node, a shell of srun --pty.
    (BATCH, None),
    (SLURM | {"SLURM_STEP_ID": "4294967290"}, None),
    (ONE_TASK | {"SLURM_PTY_PORT": "40000"}, None),
], ids=lambda _: "")  # fmt: skip
def test_places(environ: dict[str, str], want: Place | None) -> None:
    assert resolve(environ) == want


CONTRADICTIONS: list[tuple[dict[str, str], str]] = [
    (TORCHRUN | {"RANK": "4"}, "torchrun says that this is rank 4 of 4: ranks go from 0 to 3"),
    (TORCHRUN | {"LOCAL_RANK": "2"}, "this is local rank 2 of 2"),
    (TORCHRUN | {"RANK": "x"}, "RANK is 'x', which is no whole number"),
    (TORCHRUN | {"WORLD_SIZE": "0"}, "torchrun says that there are 0 ranks in all"),
    ({"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "n1"},
     "RANK 1 of WORLD_SIZE 4 is set and MASTER_PORT is not: ranks that are started by hand"),
    (TORCHRUN | {"MASTER_PORT": "70000"}, "MASTER_PORT is 70000; a port is 1 to 65535"),
    (MPICH | {"PMI_SIZE": "1", "PMI_RANK": "0"}, "this is local rank 1 of 2|2 ranks are on this"),
    (SLURM | {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "n08", "MASTER_PORT": "1"},
     r"RANK 0 of WORLD_SIZE 3 contradicts srun, which has made this task 2 of 3: .* leave them"),
    (SLURM | TORCHRUN | {"GROUP_WORLD_SIZE": "1", "GROUP_RANK": "0"},
     "srun has started 3 torchruns, and each is a world of its own: give them --nnodes=3"),
    (SLURM | {"MASTER_ADDR": "127.0.0.1"},
     "MASTER_ADDR is 127.0.0.1, which every node takes for itself, and srun .* on 2 nodes"),
    (MPICH | {"MASTER_ADDR": "localhost"}, "MASTER_ADDR is localhost, which every node"),
    (SLURM | {"SLURM_STEP_NUM_TASKS": "4"},
     r"Slurm contradicts itself: 4 tasks, 2,1 per node, nodes n\[08-09\], and this is node 1"),
    (SLURM | {"SLURM_PTY_PORT": "4"}, "srun --pty gives its terminal to the first of 3 tasks"),
    (SLURM | {"SLURM_STEP_NODELIST": "n[1-"}, "Slurm's node list 'n\\[1-' cannot be read"),
    (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(y3)"}, r"tasks per node '2\(y3\)' cannot be read"),
    ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "this MPI does not say which rank of its node this is"),
    ({"PMI_RANK": "0"}, "PMI_SIZE is not set"),
    (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(x999999999999)"}, "too many nodes at '2"),
    ({k: v for k, v in SLURM.items() if "NODELIST" not in k}, "SLURM_STEP_NODELIST is not set"),
]  # fmt: skip


@pytest.mark.parametrize(("environ", "words"), CONTRADICTIONS)
def test_contradictions_are_named(environ: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError, match=words) as refused:
        resolve(environ)
    assert "\n" not in str(refused.value)


PAGE = (commands.ROOT / "docs" / "clusters.md").read_text()


def test_the_page_has_the_words() -> None:
    """Of seven contradictions, to the letter."""
    told = []
    for environ, _ in CONTRADICTIONS:
        with pytest.raises(UsageError) as refused:
            resolve(environ)
        told.append(str(refused.value))
    assert sum(f"| {text} |" in PAGE for text in told) == 7


def test_an_elastic_torchrun_may_have_lost_its_other_nodes() -> None:
    lost = {"GROUP_WORLD_SIZE": "1", "GROUP_RANK": "0", "TORCHELASTIC_MAX_RESTARTS": "3"}
    found = resolve(SLURM | TORCHRUN | lost)
    assert found is not None
    assert found.nodes == 1


@pytest.mark.parametrize(("text", "name"), [
    ("n1", "n1"),
    ("n[01-03,7],m2", "n01"),
    ("n[098-101,0-1],m[007]", "n098"),
    ("r[1-2]n[1-2]", "r1n1"),
    ("a-1.x,b[2]-ib", "a-1.x"),
    ("b[2]-ib,a-1.x", "b2-ib"),
])  # fmt: skip
def test_node_lists(text: str, name: str) -> None:
    assert first_node(text) == name


@pytest.mark.parametrize("text", ["", "n[1-2", "n[a]", "n1]", "n[]"])
def test_node_lists_that_cannot_be_read(text: str) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        first_node(text)


@given(st.lists(st.tuples(st.integers(1, 64), st.integers(1, 9)), min_size=1, max_size=5))
def test_tasks_per_node(runs: list[tuple[int, int]]) -> None:
    text = ",".join(f"{tasks}(x{nodes})" if nodes > 1 else f"{tasks}" for tasks, nodes in runs)
    assert tasks_per_node(text) == [tasks for tasks, nodes in runs for _ in range(nodes)]


@given(st.integers(1, 10**7), st.integers(0, 10**4))
def test_ports_of_jobs_are_free_for_everyone(job: int, step: int) -> None:
    assert 1024 < port_of(f"slurm {job}.{step}") < 32768


# ------------------------------------------------------------------ what follows from it


def in_environment(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)


def test_a_job_of_many_tasks_is_not_run_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that forgot srun would train on one node of many."""
    in_environment(monkeypatch, BATCH)
    assert launcher_env.joined() is None
    words = "Slurm gave this job 8 tasks, but srun did not start this command: put srun before it"
    with pytest.raises(UsageError, match=words) as refused:
        launch.default_world(configs.Config())
    assert f"| {refused.value} |" in PAGE
    assert doctor._place_row()[2].startswith("in a Slurm job of 8 tasks, not started by srun")


def test_one_task_starts_its_own_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    in_environment(monkeypatch, ONE_TASK)
    assert launcher_env.joined() is None
    assert launch.default_world(configs.Config()) == 1


def test_the_doctor_tells_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    in_environment(monkeypatch, SLURM)
    status, name, text = doctor._place_row()
    assert (status, name) == ("ok", "place")
    assert text.startswith("srun: rank 2 of 3, local rank 0 of 1, node 1 of 2; rank 0 at n08, port")
    monkeypatch.setenv("SLURM_NODEID", "7")
    assert doctor._place_row()[:2] == ("failed", "place")


def test_restarts_are_the_launchers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "has_met", True)
    done = commands.here(
        "train", "--max-restarts", "1", "--checkpoint-every", "2", cwd=tmp_path, **SLURM
    )
    assert done.returncode == 2
    assert f"| {done.stderr.strip().removeprefix('error: ')} |" in PAGE


FIRST = Place("mpirun", 0, 2, 0, 1, None, 2, "", 12345)


@pytest.mark.parametrize(("where", "config", "words"), [
    (FIRST, {}, "mpirun has started ranks on 2 nodes and does not say where the first is: add "
                "--set launch.address=HOST, or set MASTER_ADDR"),
    (FIRST, {"address": "127.0.0.1"}, "launch.address is 127.0.0.1, which every node takes"),
    (FIRST, {"address": "192.0.2.1"}, r"rank 0 on .* cannot listen on 192.0.2.1, port 12345: "
                                      r"Cannot assign .*; --set launch.address=HOST and "
                                      "launch.port=PORT"),
    (FIRST, {"address": "no.such.host.invalid"}, "cannot listen on no.such.host.invalid"),
])  # fmt: skip
def test_where_rank_0_cannot_be(
    where: Place, config: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "has_met", False)
    with pytest.raises(UsageError, match=words):
        cluster.store_of(where, LaunchConfig(**config))


@pytest.mark.parametrize(("config", "words"), [
    ({"interface": "ib77"}, "launch.interface is ib77, and this host has "),
    ({"world": 4}, "launch.world is 4, but mpirun has started 2 ranks"),
])  # fmt: skip
def test_what_a_launchers_rank_cannot_run(config: dict[str, Any], words: str) -> None:
    assert cluster._unfit(FIRST, LaunchConfig(**config)).startswith(words)


def test_what_rank_0_listens_on() -> None:
    """Where the host's name means loopback: the interface that is named, or all of them."""
    one_node = Place("mpirun", 0, 2, 0, 2, 0, 1, "127.0.0.1", 12345)
    listens = cluster.own_address
    assert listens("127.0.0.1", one_node, None) == (2, launcher_env.LOOPBACK)
    assert listens("127.0.0.1", FIRST, "lo") == (2, launcher_env.LOOPBACK)
    assert listens("127.0.0.1", FIRST, None) == (2, "")
    assert listens("192.0.2.1", FIRST, "lo") == (2, "192.0.2.1")


@pytest.mark.parametrize("key", ["address", "interface"])
def test_ranks_of_one_machine_take_neither(key: str) -> None:
    config = configs.load(None, {f"launch.{key}": "lo"}).launch
    with pytest.raises(UsageError, match=f"launch.{key} is for ranks that a launcher has"):
        ranks.Ranks(config, 1)
