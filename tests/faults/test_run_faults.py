"""What goes wrong around a run: signals, two runs in one folder, nodes that share none, bombs."""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import commands
import dropout_workload
from conftest import GetRanks
from resuming import losses_of, state_at, train
from shardlab import cli, runlock, seal
from shardlab import config as configs
from shardlab.config import LaunchConfig
from shardlab.data import image_files, text
from shardlab.errors import RankFailure, UsageError
from shardlab.files import read_jsonl
from shardlab.launch.forking import fork_server
from shardlab.launch.ranks import Ranks
from shardlab.strategies.base import Setup
from shardlab.strategies.data_parallel.simple_ddp import SimpleDDP
from shardlab.training import restart
from shardlab.world import World

WORKLOAD = f"{Path(dropout_workload.__file__)}:make"
STEPS = 12
SLOW_MS = 20.0


def settings(root: Path, **changes: Any) -> dict[str, Any]:
    values = {
        "model.workload": "dropout_workload:make",
        "training.global_batch": 8,
        "training.steps": STEPS,
        "strategy.name": "zero2",
        "launch.device": "cpu",
        "checkpoint.every": 4,
        "checkpoint.keep_last": 20,
        "output.root": str(root),
    }
    return configs.load(None, values | changes).to_dict()


# ------------------------------------------------------------------ random numbers


def masks_of_a_run(world: World, values: dict[str, Any]) -> tuple[list[Any], float, str]:
    """A run's masks on this rank, a weight that its model began with, and its folder."""
    from shardlab.training.builders import build_workload
    from shardlab.training.run import train_rank

    build_workload(configs.from_dict(values))  # a process tries a workload once, with a forward
    before = len(dropout_workload.MASKS)
    result = train_rank(world, configs.from_dict(values), "a test")
    return dropout_workload.MASKS[before:], dropout_workload.BEGINNINGS[-1], result["folder"]


@pytest.mark.long
def test_each_rank_drops_its_own(ranks: GetRanks, tmp_path: Path) -> None:
    """Masks differ by rank and follow the seed; the model that all begin with does not differ."""
    values = settings(tmp_path, **{"training.steps": 4})
    first, again = (ranks(2).run(masks_of_a_run, values, deadline_s=60) for _ in range(2))
    (zero, began_zero, _), (one, began_one, _) = first
    assert len(zero) == len(one) == 4
    assert all(a != b for a in zero for b in one)
    assert began_zero == began_one
    assert [masks for masks, _, _ in again] == [zero, one]
    values["training"]["seed"] = 1
    other = ranks(2).run(masks_of_a_run, values, deadline_s=60)
    assert all(a != b for a in zero + one for masks, _, _ in other for b in masks)


def test_one_process_draws_as_if_there_were_no_ranks(ranks: GetRanks, tmp_path: Path) -> None:
    changes = {"strategy.name": "single", "training.steps": 3, "training.seed": 5}
    ((masks, _, _),) = ranks(1).run(
        masks_of_a_run, settings(tmp_path, **changes), deadline_s=60
    )  # fmt: skip
    torch.manual_seed(5)
    model = dropout_workload.Net()
    expected = []
    for _ in range(3):
        model(torch.zeros(1, 6))
        expected.append(dropout_workload.MASKS.pop())
    assert masks == expected


@pytest.mark.long
def test_masks_go_on_after_a_resume(ranks: GetRanks, tmp_path: Path) -> None:
    """Bit for bit in the same world; and a rank that was not there draws what nobody drew."""
    values = settings(tmp_path)
    whole = ranks(2).run(masks_of_a_run, values, deadline_s=60)
    folder = Path(whole[0][2])
    values["checkpoint"]["resume"] = str(folder / "checkpoints" / "step-000004")
    resumed = ranks(2).run(masks_of_a_run, values, deadline_s=60)
    for before, after in zip(whole, resumed, strict=True):
        assert after[0] == before[0][4:]
    want, got = (state_at(Path(run[0][2]), STEPS) for run in (whole, resumed))
    assert all(torch.equal(value, got[name]) for name, value in want.items())
    more = ranks(3).run(masks_of_a_run, values, deadline_s=60)
    assert [masks for masks, _, _ in more[:2]] == [masks for masks, _, _ in resumed]
    drawn = [mask for masks, _, _ in (*whole, *more[:2]) for mask in masks]
    assert all(mask not in drawn for mask in more[2][0])


# ------------------------------------------------------------------ signals


def command(*more: str, steps: int = 400, slow_ms: float = SLOW_MS, every: int = 1000) -> list[str]:
    return [
        "train", "--workload", WORKLOAD, "--strategy", "zero2", "--global-batch", "8",
        "--steps", str(steps), "--checkpoint-every", str(every), "--device", "cpu",
        "--set", "checkpoint.keep_last=20", "--set", f"model.options.slow_ms={slow_ms}", *more,
    ]  # fmt: skip


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Commands in the background, which do not outlive the test."""
    processes: list[subprocess.Popen[str]] = []

    def start(*args: str, cwd: Path = tmp_path, **env: str) -> subprocess.Popen[str]:
        processes.append(commands.start(*args, cwd=cwd, **env))
        return processes[-1]

    yield start
    for process in processes:
        with process:  # which waits for it, and closes its streams
            left = [process.pid, *commands.descendants(process.pid)]
            for pid in left if process.poll() is None else []:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


DEEP = pytest.mark.deep
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("launcher", "number", "more"),
    [
        pytest.param(commands.SHARDLAB, signal.SIGTERM, [], id="SIGTERM"),
        pytest.param(
            commands.SHARDLAB, signal.SIGTERM, ["--max-restarts", "2"], id="to all", marks=DEEP
        ),
        pytest.param(
            commands.SHARDLAB,
            signal.SIGINT,
            ["--set", "checkpoint.asynchronous=true"],
            id="Ctrl-C",
            marks=DEEP,
        ),
        pytest.param([*TORCHRUN, "-m", "shardlab"], signal.SIGTERM, [], id="torchrun", marks=DEEP),
    ],
)
def test_a_run_that_is_asked_to_stop_goes_on_exactly(
    launcher: list[str], number: int, more: list[str], ranks: GetRanks, tmp_path: Path, started: Any
) -> None:
    """It finishes its step, saves, says how to go on; resumed, it ends as if left alone."""
    process = started(*launcher, *command(*more))
    status = commands.wait_for_steps(tmp_path / "runs", 3, timeout=90)
    to_all = commands.descendants(process.pid) if "--max-restarts" in more else []  # as Slurm does
    for pid in (process.pid, *to_all):
        os.kill(pid, number)
    _, errors = process.communicate(timeout=60)
    assert commands.wait_until_gone(status["pids"]) == []
    (folder,) = (tmp_path / "runs").iterdir()
    state = json.loads((folder / "status.json").read_text())
    assert state["state"] == "interrupted", errors
    assert state["reason"] == signal.Signals(number).name
    made = state["steps"]
    assert 3 <= made < 400
    assert [path.name for path in (folder / "checkpoints").iterdir()] == [f"step-{made:06d}"]
    assert all(list(losses_of(folder, rank)) == list(range(made)) for rank in (0, 1))
    again = f"to continue from its last checkpoint: shardlab train --resume runs/{folder.name}"
    assert any(line.startswith(f"{again} --workload ") for line in errors.splitlines()), errors
    how = f"interrupted: by {state['reason']} after {made} steps, with a checkpoint"
    assert how in errors.splitlines()
    if launcher is commands.SHARDLAB:
        assert process.returncode == 128 + number
        assert "Traceback" not in errors

    changes = {
        "training.steps": made + 4,
        "checkpoint.every": 1000,
        "model.workload": WORKLOAD,
        "model.options": {"slow_ms": SLOW_MS},
    }
    values = settings(tmp_path / "other", **changes)
    _, undisturbed = train(ranks, 2, values)
    values["checkpoint"]["resume"] = str(folder)
    assert train(ranks, 2, values)[1] == folder
    assert losses_of(folder) == losses_of(undisturbed)
    want, got = (state_at(run, made + 4) for run in (undisturbed, folder))
    assert want.keys() == got.keys()
    assert all(torch.equal(value, got[name]) for name, value in want.items())


@pytest.mark.long
def test_while_it_builds_there_is_nothing_to_wait_for(tmp_path: Path, started: Any) -> None:
    (tmp_path / "meeting").mkdir()
    options = [f"model.options.meeting={tmp_path / 'meeting'}", "model.options.expected=9"]
    more = [word for option in options for word in ("--set", option)]
    process = started(*commands.SHARDLAB, *command(*more))
    commands.wait_for(lambda: len(list((tmp_path / "meeting").iterdir())) == 2)
    others = commands.descendants(process.pid)
    os.kill(process.pid, signal.SIGTERM)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGTERM
    assert errors.splitlines()[-1] == "interrupted: every rank was ended"
    assert "Traceback" not in errors
    assert commands.wait_until_gone(others) == []
    assert not (tmp_path / "runs").exists()


@pytest.mark.long
@pytest.mark.parametrize(
    "more",
    [
        pytest.param(
            [
                "--set",
                "training.evaluate_every=2",
                "--set",
                "model.options.slow_evaluation_ms=60000",
            ],
            id="evaluation",
        ),
        pytest.param(
            ["--inject", "hang:rank=0,step=1,where=checkpoint"], id="checkpoint", marks=DEEP
        ),
    ],
)
def test_a_second_signal_ends_it_at_once(more: list[str], tmp_path: Path, started: Any) -> None:
    """In an evaluation, or inside a checkpoint: what was half written does not count."""
    process = started(*commands.SHARDLAB, *command(*more, steps=8, slow_ms=0.0, every=2))
    commands.wait_for_steps(tmp_path / "runs", 2)
    (folder,) = (tmp_path / "runs").iterdir()
    os.kill(process.pid, signal.SIGINT)
    assert process.stderr is not None
    said = ""
    while "SIGINT: the run stops after this step" not in said:
        said = process.stderr.readline()
        assert said
    assert process.poll() is None
    os.kill(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert errors.splitlines()[-1] == "interrupted: every rank was ended"
    assert json.loads((folder / "status.json").read_text())["state"] == "interrupted"
    assert list(folder.glob("checkpoints/*")) == list(folder.glob("checkpoints/.*")) == []


# ------------------------------------------------------------------ the run's folder


@pytest.mark.long
def test_a_folder_that_is_removed_in_mid_run(tmp_path: Path) -> None:
    """The rows since would be lost in silence, and checkpoints would make the folder again."""
    out = tmp_path / "out"

    def remove(event: dict[str, Any]) -> None:
        if event.get("step", 0) >= 2 and out.exists():
            shutil.rmtree(out)

    more = {"output.dir": str(out), "launch.world": 2, "training.steps": 400}
    values = settings(tmp_path, **more, **{"model.options": {"slow_ms": 5.0}})
    with pytest.raises(RankFailure, match=r"somebody removed the run folder .*out while the run"):
        restart.train(configs.from_dict(values), "a test", remove)
    assert not out.exists()


@pytest.mark.long
def test_two_runs_in_one_folder(tmp_path: Path, started: Any) -> None:
    """Both begin while it is empty. The second to come is refused, and the first goes on.

    They meet when both have seen the folder empty; the first has no batch before the second ends.
    """
    (tmp_path / "meeting").mkdir()
    options = {"meeting": tmp_path / "meeting", "expected": 2, "waits_for": tmp_path / "go on"}
    more = ["--out", "out", "--set", "strategy.name=single", "-w", "1"]
    for key, value in options.items():
        more += ["--set", f"model.options.{key}={value}"]
    both = [started(*commands.SHARDLAB, *command(*more, steps=3)) for _ in range(2)]
    commands.wait_for(lambda: any(process.poll() is not None for process in both))
    second, first = sorted(both, key=lambda process: process.poll() is None)
    _, refused = second.communicate(timeout=60)
    lock = json.loads((tmp_path / "out" / "run.lock").read_text())
    assert (second.returncode, refused.splitlines()[-1]) == (
        2,
        f"error: out belongs to a run that is still active: process {lock['pid']} on "
        f"{socket.gethostname()}; wait for it, or choose another folder with --out",
    )
    (tmp_path / "go on").touch()
    _, errors = first.communicate(timeout=60)
    assert first.returncode == 0, errors
    assert list(losses_of(tmp_path / "out")) == list(range(3))
    assert json.loads((tmp_path / "out" / "status.json").read_text())["state"] == "finished"


def test_who_has_the_lock_may_say_so_a_moment_later(tmp_path: Path) -> None:
    """Another run may look between the two: it waits for the holder's name."""
    name = tmp_path / runlock.NAME
    with name.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        later = threading.Timer(0.1, lambda: name.write_text('{"pid": 7, "host": "a"}'))
        later.start()
        with pytest.raises(UsageError, match="still active: process 7 on a; wait for it"):
            runlock.RunLock().take(tmp_path)
        later.join()


@pytest.mark.long
def test_two_resumes_of_one_run(ranks: GetRanks, tmp_path: Path) -> None:
    """Another process has the folder: it is left as it is. When that is gone, the run goes on."""
    values = settings(tmp_path, **{"strategy.name": "single", "training.steps": 4})
    _, folder = train(ranks, 1, values)
    values["checkpoint"]["resume"] = str(folder)
    values["training"]["steps"] = 6
    holder = (
        "import sys; from pathlib import Path; from shardlab.runlock import RunLock; "
        "lock = RunLock(); lock.take(Path(sys.argv[1])); print('taken', flush=True); "
        "sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", holder, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"taken\n"
        before = {path: path.read_bytes() for path in folder.glob("*") if path.is_file()}
        refusal = rf"still active: process {other.pid} on .*; wait for it"
        with pytest.raises(UsageError, match=refusal):
            train(ranks, 1, values)
        assert {p: p.read_bytes() for p in folder.glob("*") if p.is_file()} == before
        other.communicate(b"")
    train(ranks, 1, values)
    assert list(losses_of(folder)) == list(range(6))
    # The folder is taken twice by one process, to choose and to make it: that is noted once.
    assert len(read_jsonl(folder / "resumes.jsonl")) == 1


# ------------------------------------------------------------------ nodes


def two_nodes(tmp_path: Path, started: Any, *args: str) -> list[list[str]]:
    """Ranks as torchrun starts them on two nodes, which share no folder: what each refuses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    nodes = []
    for node in range(2):
        place = {"RANK": f"{node}", "GROUP_RANK": f"{node}", "LOCAL_RANK": "0"}
        all_of_them = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        folder = tmp_path / f"node{node}"
        folder.mkdir(exist_ok=True)
        own = {**place, **all_of_them, "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "none"}
        nodes.append(started(*commands.SHARDLAB, *args, cwd=folder, **own))
    errors = [node.communicate(timeout=100)[1] for node in nodes]
    assert [node.returncode for node in nodes] == [2, 2], errors
    return [said(text) for text in errors]


def said(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("error:")]


@pytest.mark.long
@pytest.mark.parametrize(
    "more", [(), pytest.param(("--out", "run", "--resume", "auto"), marks=DEEP)], ids=["", "auto"]
)
def test_nodes_without_a_common_folder(more: tuple[str, ...], tmp_path: Path, started: Any) -> None:
    """Every node says so, and none waits for the other. A run that may resume looks for its folder
    in another way than one that begins."""
    for (line,) in two_nodes(tmp_path, started, *command(*more, steps=3)):
        assert line.startswith(f"error: {tmp_path / 'node0'}, where rank 0 on ")
        assert f"not visible to rank 1 on {socket.gethostname()}, in {tmp_path / 'node1'}" in line
        assert "--out /shared/run" in line
    assert list(tmp_path.glob("node*/*")) == []


@pytest.mark.deep
def test_a_run_to_resume_that_one_node_lacks(ranks: GetRanks, tmp_path: Path, started: Any) -> None:
    """Refused before the ranks have joined each other: all the same, by both."""
    changes = {"training.steps": 4, "model.workload": WORKLOAD}
    values = settings(tmp_path / "node0", **changes)
    _, folder = train(ranks, 2, values)
    args = ["train", "--workload", WORKLOAD, "--resume", folder.name, "--steps", "6"]
    for (line,) in two_nodes(tmp_path, started, *args):
        assert line.startswith(f"error: rank 1 on {socket.gethostname()}: there is no folder")


# ------------------------------------------------------------------ who can reach a run


def listening(_world: World) -> set[str]:
    """The addresses at which this process listens, as the kernel writes them."""
    inodes = set()
    for handle in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(str(handle.readlink()).removeprefix("socket:[").removesuffix("]"))
    tables = [Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6")]
    lines = [line for table in tables if table.exists() for line in table.read_text().splitlines()]
    rows = [line.split() for line in lines]
    return {row[1].partition(":")[0] for row in rows if row[3] == "0A" and row[9] in inodes}


def store_of(_world: World) -> tuple[str, str]:
    """The kind of the store at which the ranks have met, and its file."""
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return type(store).__name__, getattr(store, "path", "")


def look(file: str, told: Any) -> None:
    """Another user of the machine: nobody, if this one is root."""
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        with pytest.raises(PermissionError):
            Path(file).stat()
    told.send("looked")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and the file is in memory")
def test_only_this_machine_reaches_a_local_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the store nor Gloo, whatever interface the environment of a cluster names. The store
    is a file of this user: at a port, anybody could list, read and write its keys."""
    others = [name for _, name in socket.if_nameindex() if name.startswith(("eth", "en"))]
    for name in others[:1]:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", name)
    loopback = {"0100007F", "00000000000000000000000001000000"}
    context = fork_server()
    ours, theirs = context.Pipe()
    with Ranks(LaunchConfig(device="cpu", timeout_s=60), 2) as world:
        found = world.run(listening, deadline_s=60)
        (kind, file), (other_kind, _) = world.run(store_of)
        assert kind == other_kind == "FileStore"
        assert Path(file).exists()
        looking = context.Process(target=look, args=(file, theirs))
        looking.start()
        theirs.close()
        assert ours.recv() == "looked"
        looking.join()
    assert all(found)
    assert set().union(*found) <= loopback


def test_without_files_in_memory_it_is_one_of_this_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)
    with Ranks(LaunchConfig(device="cpu", timeout_s=60), 2) as world:
        file = Path(world.run(store_of)[0][1])
        assert file.stat().st_mode & 0o077 == 0
    assert not file.exists()


class Payload:
    """Somebody else's object: to read its pickle is to write a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def planted(world: World, path: Path) -> str:
    """Rank 1 stands for a program that does not know the key, and took the rank's place."""
    if world.rank == 1:
        seal.leave()
    value = Payload(path) if world.rank == 1 else None
    box: list[Any] = [None, None]
    try:
        dist.gather_object(value, None if world.rank else box, group=world.group)
    except RuntimeError as error:
        return str(error)
    return ""


def test_an_object_that_no_rank_has_sent_is_not_read(tmp_path: Path) -> None:
    """Whoever gets a rank's place at a port of Gloo's could run code in the others."""
    with Ranks(LaunchConfig(device="cpu", timeout_s=60), 2) as world:
        told = world.run(planted, tmp_path / "was here", deadline_s=60)
    assert told[0].startswith("a rank has received an object that no rank of this run has sent")
    assert list(tmp_path.iterdir()) == []


def test_pickles_are_read_in_one_place() -> None:
    """What a rank receives is read where its proof is checked."""
    source = Path(seal.__file__).parent
    reads = ("pickle.load", "(pickle.Unpickler)")
    found = {
        str(path.relative_to(source)) for path in source.rglob("*.py")
        if any(read in path.read_text() for read in reads)
    }  # fmt: skip
    assert found == {"seal.py"}


# ------------------------------------------------------------------ refusals


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    done = commands.here("learn", "start", "ring_allreduce", "--dir", "file/learn", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "error: cannot write into the folder file/learn: Not a directory; name another with --dir\n"
    )


@pytest.mark.long
@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (r'output.dir="a\0b"', "embedded null byte"),
        (b"output.dir=a\xff", "error: the name of the run folder is not UTF-8: a"),
    ],
    ids=["null", "bytes"],
)
def test_a_run_folder_that_cannot_be(setting: str | bytes, message: str, tmp_path: Path) -> None:
    done = commands.here(
        "train", "--workload", WORKLOAD, "-w", "1", "--steps", "2", "--set", os.fsdecode(setting),
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    (line,) = said(done.stderr)
    assert message in line
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_current_folder_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    monkeypatch.setattr(sys, "argv", ["shardlab", "train"])
    (tmp_path / "gone").rmdir()
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith("error: the current folder is gone")


def test_a_bomb_is_not_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "bomb.txt.gz"
    path.write_bytes(gzip.compress(b"1" * 100_000_000))  # 100 kB
    message = r"bomb.txt.gz has [\d,]+ bytes and unpacks to more than 67,108,864"
    for read in (
        text.read_documents,
        image_files.read_idx,
        lambda path: image_files.read_digits(path, "train"),
    ):
        with pytest.raises(UsageError, match=message) as refusal:
            read(path)
        assert "\n" not in str(refusal.value)


def test_what_is_packed_in_parts_is_read_whole(tmp_path: Path) -> None:
    """A gzip file may have several members, zeros after the last, and be cut off."""
    path = tmp_path / "text.txt.gz"
    path.write_bytes(gzip.compress(b"one ") + gzip.compress(b"two") + b"\0" * 10)
    assert text.read_documents(path) == ["one two"]
    path.write_bytes(gzip.compress(b"one " * 1000)[:-9])
    assert text.read_documents(path) is None


def on_a_nameless_mesh(world: World) -> str:
    mesh = DeviceMesh.from_group(world.group, "cpu")
    try:
        SimpleDDP(Setup(nn.Linear(2, 2), torch.optim.SGD, dropout_workload.loss, mesh))
    except UsageError as refusal:
        return str(refusal)
    return ""


def test_a_mesh_without_names(ranks: GetRanks) -> None:
    for refusal in ranks(2).run(on_a_nameless_mesh, deadline_s=60):
        assert refusal.startswith("the device mesh needs a dimension named 'dp'")
        assert "\n" not in refusal
