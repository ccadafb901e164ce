"""One run under our own launcher, torchrun, srun, mpirun and Ray: the same parameters, bit for bit.

These tests use a real Slurm, Open MPI and Ray: `make test-cluster` installs them.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import commands
import hosts
import mpi
import rays
import slurm as slurms
from resuming import losses_of, state_at

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(200)]

STEPS = 8
TRAIN = [
    "train", "--size", "tiny", "--data", "synthetic", "--strategy", "zero2", "--precision", "fp64",
    "--checkpoint-every", "4", "--set", "training.clip_norm=0.5",
]  # fmt: skip
# A host's name says nothing about its address: the ranks must be told the interface.
ON_HOSTS = ["--set", f"launch.interface={hosts.DEVICE}"]
# The hosts share a name, by which torchrun would know which of them is the first.
AGENT = '--local-addr="$ADDRESS" --rdzv-conf=is_host="$IS_HOST"'

needs_mpi = pytest.mark.skipif(bool(mpi.why_not()), reason=mpi.why_not())


# ------------------------------------------------------------------ clusters, each started once


@pytest.fixture(scope="module")
def two() -> Iterator[hosts.Hosts]:
    with hosts.made(2) as made:
        yield made


@pytest.fixture(scope="module")
def slurm() -> Iterator[slurms.Slurm]:
    """Two nodes, each a host of its own; not those of ``two``, on which a test ends everything."""
    if reason := slurms.why_not():
        pytest.skip(reason)
    with hosts.made(2) as nodes, slurms.started(nodes) as running:
        yield running


@pytest.fixture(scope="module")
def ray() -> Iterator[rays.Ray]:
    """Two nodes, each a host of its own."""
    if reason := rays.why_not():
        pytest.skip(reason)
    with rays.started() as running:
        yield running


# ------------------------------------------------------------------ on this machine


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of our own launcher, with 2 ranks."""
    folder = tmp_path_factory.mktemp("local")
    done = commands.shardlab(*TRAIN, "--steps", str(STEPS), "--out", "run", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "run"


def assert_same(run: Path, other: Path, steps: int = STEPS) -> None:
    want, got = state_at(other, steps), state_at(run, steps)
    assert want.keys() == got.keys()
    assert [name for name, value in want.items() if not torch.equal(value, got[name])] == []
    assert losses_of(run) == losses_of(other)
    assert json.loads((run / "status.json").read_text())["state"] == "finished"


# ------------------------------------------------------------------ the files of examples/clusters

SHOWN = "train --size tiny --checkpoint-every 5"  # in the shell scripts


def edited(name: str, folder: Path, changes: dict[str, str]) -> Path:
    """A copy of a file of ``examples/clusters``, edited as a user edits it: text by text."""
    text = (commands.CLUSTERS / name).read_text()
    for old, new in changes.items():
        assert text.count(old) == 1, (name, old)
        text = text.replace(old, new)
    copy = folder / name
    copy.write_text(text)
    return copy


@needs_mpi
@pytest.mark.parametrize(("args", "words"), [
    (["--world", "4"], "launch.world is 4, but mpirun has started 2 ranks"),
    (["--strategy", "zero9"], "unknown strategy 'zero9'"),
])  # fmt: skip
def test_refusals_are_told_once(args: list[str], words: str, tmp_path: Path) -> None:
    train = (*commands.SHARDLAB, *TRAIN, *args)
    done = commands.run("mpirun", "-np", "2", *train, cwd=tmp_path, **mpi.AS_ROOT)
    assert done.returncode == 2
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("error:"))
    assert words in line
    assert list(tmp_path.iterdir()) == []


def test_a_script_without_srun_is_refused(slurm: slurms.Slurm, tmp_path: Path) -> None:
    (tmp_path / "job").write_text("#!/bin/bash\n" + " ".join([*commands.SHARDLAB, *TRAIN]) + "\n")
    command = ["sbatch", "--wait", "-N2", "--ntasks-per-node=2", "--output=log", "job"]
    assert slurm.run(*command, cwd=tmp_path).returncode == 2
    assert "Slurm gave this job 4 tasks, but srun did not start" in (tmp_path / "log").read_text()


LONG = ["--steps", "40"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    done = commands.shardlab(*TRAIN, *LONG, "--out", "run", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "run"


def submitted(slurm: slurms.Slurm, folder: Path) -> tuple[str, Path]:
    """A job that runs on two nodes, has made some steps, and has many before it."""
    train = [*TRAIN, *LONG, *ON_HOSTS, "--inject", "slow:rank=1,ms=150"]
    changes = {"--ntasks-per-node=4": "--ntasks-per-node=1", SHOWN: " ".join(train)}
    file = edited("slurm.sbatch", folder, changes)
    done = slurm.run("sbatch", file.name, cwd=folder)
    assert done.returncode == 0, done.stderr
    job = done.stdout.split()[-1]
    run = folder / "runs" / f"gpt-{job}"
    wait_for_steps(run, 6, slurm)
    return job, run


@pytest.mark.parametrize("how", ["scontrol requeue", "scancel --signal=TERM"])
def test_a_requeued_job_goes_on_by_itself(
    how: str, slurm: slurms.Slurm, undisturbed: Path, tmp_path: Path
) -> None:
    """It ends as if undisturbed, bit for bit: srun has started a rank on each of two hosts, and
    rank 0's address is the first of Slurm's node list. The second way is what Slurm does before
    the time limit."""
    job, run = submitted(slurm, tmp_path)
    assert slurm.run(*how.split(), job, cwd=tmp_path).returncode == 0
    slurm.wait_for(job, ("PENDING", "REQUEUED"))
    ended = slurm.wait_for(job, ("COMPLETED", "FAILED", "CANCELLED"))
    log = (tmp_path / f"gpt-{job}.log").read_text()
    assert ended == "COMPLETED", log
    (resumed,) = map(json.loads, (run / "resumes.jsonl").read_text().splitlines())
    assert resumed["step"] >= 4  # not from the beginning
    assert "interrupted: by SIGTERM after" in log  # it saved before it stopped
    assert_same(run, undisturbed, 40)


def test_a_job_that_is_cancelled_stays_so(slurm: slurms.Slurm, tmp_path: Path) -> None:
    job, run = submitted(slurm, tmp_path)
    assert slurm.run("scancel", job, cwd=tmp_path).returncode == 0
    slurm.wait_for(job, ("CANCELLED",))
    time.sleep(8)  # a requeued job would begin again
    assert slurm.field(job, "JobState") == "CANCELLED"
    assert json.loads((run / "status.json").read_text())["state"] == "interrupted"


def wait_for_steps(run: Path, steps: int, cluster: slurms.Slurm | rays.Ray) -> None:
    def said() -> str:
        found = {p: p.read_text()[-2000:] for p in run.parents[1].glob("*.log")}
        return f"no {steps} steps in {run}: {found}\n{cluster.logs()}"

    commands.wait_for(lambda: commands.rows_in(run / "rank1.jsonl") >= steps, 90, said)


# ------------------------------------------------------------------ on two hosts


def test_torchrun_on_two_hosts(two: hosts.Hosts, local: Path, tmp_path: Path) -> None:
    train = " ".join([*TRAIN, "--steps", str(STEPS), *ON_HOSTS])
    own = f"--rdzv-backend=c10d {AGENT}"
    changes = {"node=4": "node=1", "--rdzv-backend=c10d": own, SHOWN: train}
    file = edited("torchrun.sh", tmp_path, changes)
    for done in agents(two, ["bash", file.name, two.address(0)], tmp_path):
        assert done.returncode == 0, done.stderr
    assert_same(tmp_path / "runs" / "gpt", local)


@needs_mpi
def test_mpirun_on_two_hosts(two: hosts.Hosts, local: Path, tmp_path: Path) -> None:
    train = " ".join([*TRAIN, "--steps", str(STEPS), "--json", *ON_HOSTS])
    fewer = {"-np 8": "-np 2", "ppr:4": "ppr:1", "/:4,}:4": "/:1,}:1"}
    file = edited("mpirun.sh", tmp_path, fewer | {SHOWN: train})
    done = mpi.run(two, "bash", file.name, "n1,n2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] == STEPS  # rank 0 alone prints
    assert_same(tmp_path / "runs" / "gpt", local)


# ------------------------------------------------------------------ Ray, on two hosts


def written(folder: Path, *args: str, changes: dict[str, str] | None = None) -> Path:
    """A job for the two nodes of Ray."""
    shown = '"train", "--size", "tiny", "--checkpoint-every", "5",'
    here = {
        shown: "".join(f"{json.dumps(word)}, " for word in (*args, *ON_HOSTS)),
        "/shared/runs": f"{folder}/runs",
        "RANKS = 8": "RANKS = 2",
        "# worker_runtime_env": "worker_runtime_env",
    }
    return edited("ray_job.py", folder, here | (changes or {}))


def test_ray(ray: rays.Ray, local: Path, tmp_path: Path) -> None:
    """Submitted as a job, with a config that lies beside it: the nodes get a copy of the folder."""
    (tmp_path / "here.yaml").write_text(f"training: {{steps: {STEPS}}}\n")
    job = written(tmp_path, *TRAIN, "--config", "here.yaml")
    submit = ["ray", "job", "submit", "--working-dir", ".", "--", "python", job.name]
    done = ray.run(*submit, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert_same(tmp_path / "runs" / "gpt", local)


def test_a_worker_of_ray_that_dies(ray: rays.Ray, undisturbed: Path, tmp_path: Path) -> None:
    """Its rank dies with it; Ray starts all again, and they go on from the newest checkpoint."""
    job = written(tmp_path, *TRAIN, *LONG, "--inject", "slow:rank=1,ms=150")
    running = ray.start(sys.executable, job.name, cwd=tmp_path)
    run = tmp_path / "runs" / "gpt"
    wait_for_steps(run, 6, ray)
    ranks = json.loads((run / "status.json").read_text())["pids"]
    worker = int(Path(f"/proc/{ranks[1]}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(worker, signal.SIGKILL)
    assert commands.wait_until_gone([ranks[1]]) == []
    out, _ = running.communicate(timeout=120)
    assert running.returncode == 0, out
    (resumed,) = map(json.loads, (run / "resumes.jsonl").read_text().splitlines())
    assert resumed["step"] >= 4
    assert_same(run, undisturbed, 40)


def test_a_rank_that_dies_under_ray_is_named_once(ray: rays.Ray, tmp_path: Path) -> None:
    kill = ["--steps", "8", "--inject", "kill:rank=1,step=6"]
    job = written(tmp_path, *TRAIN, *kill, changes={"max_failures=3": "max_failures=0"})
    done = ray.run(sys.executable, job.name, cwd=tmp_path)
    assert done.returncode == 1
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("error: "))
    assert re.fullmatch(r"error: rank 1 on .+ was ended by SIGKILL", line)


def test_what_the_ranks_refuse_is_not_tried_again(ray: rays.Ray, tmp_path: Path) -> None:
    job = written(tmp_path, *TRAIN, "--data", "/on/no/node")
    done = ray.run(sys.executable, job.name, cwd=tmp_path)
    assert done.returncode == 2
    # A node that is slow to refuse is not waited for: then the message names the rank that did.
    said = [line for line in done.stdout.splitlines() if "no such data: /on/no/node" in line]
    assert len(said) == 2, done.stdout  # once on each node
    assert not (tmp_path / "runs").exists()


def test_a_comparison_on_ray(ray: rays.Ray, tmp_path: Path) -> None:
    """Only training can resume. A comparison writes one report, of two nodes."""
    compare = "compare --strategies pytorch_ddp,zero2 --size tiny --no-prove"
    job = written(tmp_path, *compare.split(), *FEW, changes={'"--resume", "auto", ': ""})
    done = ray.run(sys.executable, job.name, cwd=tmp_path, timeout=150)
    assert done.returncode == 0, done.stdout
    (report,) = tmp_path.rglob("report.html")
    assert report.parent == tmp_path / "runs" / "gpt"


# ------------------------------------------------------------------ the commands of the pages

FEW = ["--repeats", "1", "--warmup", "1", "--steps", "2", "--set", "profile.active=1"]
PAGES = [
    line
    for page in ("torchrun", "slurm", "mpi")
    for line in commands.bash_lines(f"docs/clusters/{page}.md")
]


def shortened(line: str) -> list[str]:
    """The command of a page, all as it is printed but for the interpreter and the time it takes."""
    words = line.split()
    at = words.index("shardlab")
    if "-m" not in words[:at]:
        words[at:at] = [sys.executable, "-m"]
    if "network" in words:
        words += ["--max-size", "64KiB", "--rounds", "2"]
    if "compare" in words:
        words += [*FEW, "--no-prove"]
    return words if "doctor" in words else [*words, *ON_HOSTS]


@pytest.mark.parametrize("line", PAGES)
def test_a_page_shows_what_runs(line: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    first, *words = shortened(line)
    if first == "srun":
        many = [request.getfixturevalue("slurm").run(first, *words, cwd=tmp_path)]
    elif first == "mpirun" and mpi.why_not():
        pytest.skip(mpi.why_not())
    elif first == "mpirun":
        many = [mpi.run(request.getfixturevalue("two"), first, *words, cwd=tmp_path)]
    else:
        many = torchruns(request.getfixturevalue("two"), words, tmp_path)
    assert [done.returncode for done in many] == [0] * len(many), many
    if "doctor" in words:
        places = re.findall(r"rank (\d) of (\d), local", "".join(done.stdout for done in many))
        assert {int(rank) for rank, _ in places} == set(range(int(places[0][1])))
    else:
        (folder,) = (tmp_path / "runs").iterdir()
        made = {path.name for path in folder.iterdir()}
        assert "network" in words or "measured on 2 nodes: " in many[0].stdout + many[-1].stdout
        assert made >= ({"network.json"} if "network" in words else {"compare.json", "report.html"})


def torchruns(
    two: hosts.Hosts, words: list[str], folder: Path
) -> list[subprocess.CompletedProcess[str]]:
    """torchrun as the page says, on this machine or on each of the hosts."""
    if "--standalone" in words:
        return [commands.run("torchrun", *words, cwd=folder, OMP_NUM_THREADS="1")]
    line = " ".join(["torchrun", AGENT, *words]).replace("FIRST", two.address(0))
    return agents(two, ["bash", "-c", line], folder)


def agents(
    two: hosts.Hosts, command: list[str], folder: Path
) -> list[subprocess.CompletedProcess[str]]:
    """The command on each host, with what ``AGENT`` says."""

    def agent(host: int) -> list[str]:
        return ["env", f"ADDRESS={two.address(host)}", f"IS_HOST={int(host == 0)}", *command]

    return two.everywhere(agent, timeout=150, cwd=folder, OMP_NUM_THREADS="1")
