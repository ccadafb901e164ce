"""What goes wrong around a run: signals, two runs in one folder, nodes that share none, bombs."""

from __future__ import annotations

import gzip
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import commands
import dropping
from conftest import GetRanks
from resuming import TRAIN_RANK, losses_of, state_at
from shardlab import config as configs
from shardlab.config import LaunchConfig
from shardlab.data import image_files, text
from shardlab.errors import UsageError
from shardlab.files import read_jsonl
from shardlab.run.ranks import Ranks
from shardlab.strategies.base import Setup
from shardlab.strategies.simple_ddp import SimpleDDP
from shardlab.world import World

WORKLOAD = f"{Path(dropping.__file__)}:make"
STEPS = 12
SLOW_MS = 20.0


def settings(root: Path, **changes: Any) -> dict[str, Any]:
    values = {
        "model.workload": "dropping:make",
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
    from shardlab.run.rank import train_rank

    before = len(dropping.MASKS)
    result = train_rank(world, values, "a test")
    return dropping.MASKS[before:], dropping.BEGINNINGS[-1], result["folder"]


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
    model = dropping.Net()
    expected = []
    for _ in range(3):
        model(torch.zeros(1, 6))
        expected.append(dropping.MASKS.pop())
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
    values["training"]["batch_split"] = "uneven"
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

    def start(*args: str, cwd: Path = tmp_path) -> subprocess.Popen[str]:
        processes.append(commands.start(*args, cwd=cwd))
        return processes[-1]

    yield start
    for process in processes:
        if process.poll() is None:
            left = [process.pid, *commands.descendants(process.pid)]
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            process.wait()
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            stream.close()


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("launcher", "number", "more"),
    [
        pytest.param(commands.SHARDLAB, signal.SIGTERM, [], id="SIGTERM"),
        pytest.param(commands.SHARDLAB, signal.SIGTERM, ["--max-restarts", "2"], id="to all"),
        pytest.param(commands.SHARDLAB, signal.SIGINT, ["--checkpoint-async"], id="Ctrl-C"),
        pytest.param([*TORCHRUN, "-m", "shardlab"], signal.SIGTERM, [], id="torchrun"),
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
    undisturbed = Path(ranks(2).run(TRAIN_RANK, values, "a test", deadline_s=60)[0]["folder"])
    values["checkpoint"]["resume"] = str(folder)
    resumed = ranks(2).run(TRAIN_RANK, values, "a test", deadline_s=60)[0]["folder"]
    assert Path(resumed) == folder
    assert losses_of(folder) == losses_of(undisturbed)
    want, got = (state_at(run, made + 4) for run in (undisturbed, folder))
    assert want.keys() == got.keys()
    assert all(torch.equal(value, got[name]) for name, value in want.items())


def wait_for(is_so: Callable[[], bool], seconds: float = 60) -> None:
    limit = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < limit
        time.sleep(0.05)


@pytest.mark.long
def test_while_it_builds_there_is_nothing_to_wait_for(tmp_path: Path, started: Any) -> None:
    (tmp_path / "meeting").mkdir()
    options = [f"model.options.meeting={tmp_path / 'meeting'}", "model.options.expected=9"]
    more = [word for option in options for word in ("--set", option)]
    process = started(*commands.SHARDLAB, *command(*more))
    wait_for(lambda: len(list((tmp_path / "meeting").iterdir())) == 2)
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
            ["--evaluate-every", "2", "--set", "model.options.slow_evaluation_ms=60000"],
            id="evaluation",
        ),
        pytest.param(["--inject", "hang:rank=0,step=1,where=checkpoint"], id="checkpoint"),
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


# ------------------------------------------------------------------ one run in a folder


@pytest.mark.long
def test_two_runs_in_one_folder(tmp_path: Path, started: Any) -> None:
    """Both begin while it is empty. The second to come is refused, and the first goes on."""
    (tmp_path / "meeting").mkdir()
    more = [
        "--set", f"model.options.meeting={tmp_path / 'meeting'}", "--set",
        "model.options.expected=2", "--out", "out", "--set", "strategy.name=single", "-w", "1",
    ]  # fmt: skip
    both = [started(*commands.SHARDLAB, *command(*more, steps=30, slow_ms=100)) for _ in range(2)]
    ends = [process.communicate(timeout=100)[1] for process in both]
    assert sorted(process.returncode for process in both) == [0, 2]
    refused = ends[[process.returncode for process in both].index(2)]
    lock = json.loads((tmp_path / "out" / "run.lock").read_text())
    assert refused.splitlines()[-1] == (
        f"error: out belongs to a run that is still active: process {lock['pid']} on "
        f"{socket.gethostname()}; wait for it, or choose another folder with --out"
    )
    assert list(losses_of(tmp_path / "out")) == list(range(30))
    assert json.loads((tmp_path / "out" / "status.json").read_text())["state"] == "finished"


@pytest.mark.long
def test_two_resumes_of_one_run(ranks: GetRanks, tmp_path: Path) -> None:
    """Another process has the folder: it is left as it is. When that is gone, the run goes on."""
    values = settings(tmp_path, **{"strategy.name": "single", "training.steps": 4})
    folder = Path(ranks(1).run(TRAIN_RANK, values, "a test", deadline_s=60)[0]["folder"])
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
            ranks(1).run(TRAIN_RANK, values, "a test", deadline_s=60)
        assert {p: p.read_bytes() for p in folder.glob("*") if p.is_file()} == before
        other.communicate(b"")
    ranks(1).run(TRAIN_RANK, values, "a test", deadline_s=60)
    assert list(losses_of(folder)) == list(range(6))


# ------------------------------------------------------------------ nodes


def two_nodes(tmp_path: Path, started: Any, *args: str) -> list[tuple[int, str]]:
    """torchrun's agents of two nodes, which share no folder; how each ended."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    agents = []
    for node in range(2):
        folder = tmp_path / f"node{node}"
        folder.mkdir(exist_ok=True)
        torchrun = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={node}",
            "--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={port}",
        ]  # fmt: skip
        agents.append(started(*torchrun, "-m", "shardlab", *args, cwd=folder))
    errors = [agent.communicate(timeout=100)[1] for agent in agents]
    return [(agent.returncode, text) for agent, text in zip(agents, errors, strict=True)]


def said(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("error:")]


@pytest.mark.long
def test_nodes_without_a_common_folder(tmp_path: Path, started: Any) -> None:
    """Every node says so, and none waits for the other."""
    for code, errors in two_nodes(tmp_path, started, *command(steps=3)):
        assert code == 1  # torchrun's own
        (line,) = said(errors)
        assert line.startswith(f"error: {tmp_path / 'node0'}, where rank 0 on ")
        assert f"not visible to rank 1 on {socket.gethostname()}, in {tmp_path / 'node1'}" in line
        assert "--out /shared/run" in line
    assert list(tmp_path.glob("node*/*")) == []


@pytest.mark.long
def test_a_run_to_resume_that_one_node_lacks(ranks: GetRanks, tmp_path: Path, started: Any) -> None:
    """Refused before the ranks have joined each other: all the same, by both."""
    changes = {"training.steps": 4, "model.workload": WORKLOAD}
    values = settings(tmp_path / "node0", **changes)
    folder = Path(ranks(2).run(TRAIN_RANK, values, "a test", deadline_s=60)[0]["folder"])
    args = ["train", "--workload", WORKLOAD, "--resume", folder.name, "--steps", "6"]
    for code, errors in two_nodes(tmp_path, started, *args):
        assert code == 1
        (line,) = said(errors)
        assert line.startswith(f"error: rank 1 on {socket.gethostname()}: there is no folder")


# ------------------------------------------------------------------ who can reach a run


def listening(_world: World) -> list[str]:
    """The addresses at which this process listens, as the kernel writes them."""
    inodes = set()
    for handle in Path("/proc/self/fd").iterdir():
        try:
            inodes.add(str(handle.readlink()).removeprefix("socket:[").removesuffix("]"))
        except OSError:
            continue
    rows = []
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        if Path(table).exists():
            rows += [line.split() for line in Path(table).read_text().splitlines()[1:]]
    return [row[1].partition(":")[0] for row in rows if row[3] == "0A" and row[9] in inodes]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_only_this_machine_reaches_a_local_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the store nor Gloo, whatever interface the environment of a cluster names."""
    others = [name for _, name in socket.if_nameindex() if name.startswith(("eth", "en"))]
    for name in others[:1]:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", name)
    loopback = {"0100007F", "00000000000000000000000001000000"}
    with Ranks(LaunchConfig(device="cpu", timeout_s=60), 2) as world:
        found = world.run(listening, deadline_s=60)
    assert all(found)
    assert {address for of_rank in found for address in of_rank} <= loopback


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
        ("output.dir=file/out", "error: cannot write the run folder: [Errno 20] Not a directory"),
        (r'output.dir="a\0b"', "embedded null byte"),
        (b"output.dir=a\xff", "error: the name of the run folder is not UTF-8: a"),
    ],
    ids=["below a file", "null", "bytes"],
)
def test_a_run_folder_that_cannot_be(setting: str | bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    done = commands.here(
        "train", "--workload", WORKLOAD, "-w", "1", "--steps", "2", "--set", os.fsdecode(setting),
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    (line,) = said(done.stderr)
    assert message in line
    assert "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.long
def test_the_current_folder_is_gone(tmp_path: Path) -> None:
    leave = (
        "import os, subprocess, sys; os.rmdir(os.getcwd()); sys.exit(subprocess.call(sys.argv[1:]))"
    )
    (tmp_path / "gone").mkdir()
    done = commands.run(
        sys.executable, "-c", leave, *commands.SHARDLAB, "train", cwd=tmp_path / "gone"
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: the current folder is gone")


def bomb(prefix: bytes = b"") -> bytes:
    """100 MB in 100 kB."""
    return gzip.compress(prefix + b"1" * 100_000_000)


def png(width: int, height: int, rows: bytes) -> bytes:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        )

    header = struct.pack(">II", width, height) + b"\x08\x02\0\0\0"
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows))


def test_a_bomb_is_not_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "bomb.txt.gz"
    path.write_bytes(bomb())
    message = r"bomb.txt.gz has [\d,]+ bytes and unpacks to more than 67,108,864"
    for read in (
        text.read_documents,
        image_files.read_idx,
        lambda path: image_files.read_digits(path, "train"),
    ):
        with pytest.raises(UsageError, match=message) as refusal:
            read(path)
        assert "\n" not in str(refusal.value)


def test_a_picture_is_unpacked_no_further_than_its_size(tmp_path: Path) -> None:
    path = tmp_path / "bomb.png"
    rows = b"\0" + bytes(range(6)) + b"\0" + bytes(range(6))
    path.write_bytes(png(2, 2, rows + b"\0" * 50_000_000))
    assert image_files.read_png(path).reshape(2, 6).tolist() == [list(range(6))] * 2
    path.write_bytes(png(60_000, 60_000, rows))
    with pytest.raises(UsageError, match=r"bomb.png is damaged: Image size .* exceeds limit"):
        image_files.read_png(path)


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
        SimpleDDP(Setup(nn.Linear(2, 2), torch.optim.SGD, dropping.loss, mesh))
    except UsageError as refusal:
        return str(refusal)
    return ""


def test_a_mesh_without_names(ranks: GetRanks) -> None:
    for refusal in ranks(2).run(on_a_nameless_mesh, deadline_s=60):
        assert refusal.startswith("the device mesh needs a dimension named 'dp'")
        assert "\n" not in refusal


def test_a_resume_is_noted_once(ranks: GetRanks, tmp_path: Path) -> None:
    """A folder that is taken twice by one process (choose, then make) is taken once."""
    values = settings(tmp_path, **{"strategy.name": "single", "training.steps": 4})
    folder = Path(ranks(1).run(TRAIN_RANK, values, "a test", deadline_s=60)[0]["folder"])
    values["checkpoint"]["resume"] = str(folder)
    values["training"]["steps"] = 5
    ranks(1).run(TRAIN_RANK, values, "a test", deadline_s=60)
    assert len(read_jsonl(folder / "resumes.jsonl")) == 1
