"""`--json` prints one JSON object with a schema and nothing else, whatever a user's model prints.

The commands are those that the command line has: a new one with `--json` must be added to CASES.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import commands
from conftest import deep_unless
from shardlab.data import fetching
from shardlab.learn.exercise import Exercise

MODEL = f"--workload {Path(__file__).with_name('printing_workload.py')}:workload"
LOUD = f"{MODEL} --device cpu"
FEW = "--warmup 2 --steps 1"

# What runs a model that prints, in processes of its own.
OF_A_MODEL = {
    "train": f"{LOUD} --steps 5 --profile --checkpoint-every 5 "
    "--set training.evaluate_every=0 --out run",
    "compare": f"{LOUD} --strategies simple_ddp --repeats 1 {FEW} --no-profile --fail-if wrong",
    "prove": f"{LOUD} --strategies zero1",
    "throughput": f"{LOUD} --micro-batch 2 --world 2 {FEW}",
    "memory": f"{LOUD} --strategies zero1 --measure",
    "plan": f"{MODEL} --strategies zero1 --world 4 --machine h100",
}
# What looks at files, or at the machine.
OTHERS = {
    "network": "--max-size 16KiB --rounds 2 --total-time 20 --device cpu",
    "list": "", "doctor": "", "schedule": "all",
    "trace analyze": "run", "trace diff": "run run", "checkpoint show": "run",
    "runs": "--dir .", "runs show": "run",
    "learn": "", "learn check": "sampler.py",
    "data text": "notes.txt --out shards --tokenizer bytes", "data show": "shards",
    "data fetch": "mnist",
}  # fmt: skip
STARTS_RANKS = ("network", "doctor")


def one_object(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("\n") == 1
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    assert isinstance(found["schema"], int)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the commands run, with what they look at."""
    made = tmp_path_factory.mktemp("json")
    (made / "notes.txt").write_text("some words, and some more\n" * 100)
    solution = (Exercise("sampler").folder / "solution.py").read_text()
    (made / "sampler.py").write_text(f"print('a learner prints, too')\n{solution}")
    done = commands.shardlab("train", *OF_A_MODEL["train"].split(), "--json", cwd=made)
    (made / "train.out").write_text(done.stdout)
    (made / "train.err").write_text(done.stderr)
    return made


def test_every_command_with_json_is_here() -> None:
    known = {command.name for command in commands.tree() if "--json" in command.options}
    assert known == {*OF_A_MODEL, *OTHERS}
    page = (commands.ROOT / "docs" / "scripts.md").read_text()
    assert all(f"`{name}`" in page for name in known if not name.startswith("data "))


@pytest.mark.long
def test_a_training_run(folder: Path) -> None:
    said = (folder / "train.err").read_text()
    one_object(subprocess.CompletedProcess([], 0, (folder / "train.out").read_text(), said))
    for way in ("print", "__stdout__", "descriptor", "C", "another process"):
        for rank in (0, 1):
            assert said.splitlines().count(f"[rank {rank}] import: {way}") == 1
    for rank in (0, 1):
        assert f"[rank {rank}] init: C" in said
        assert f"[rank {rank}] forward: print" in said
        assert f"[rank {rank}] rank {rank} reads its own samples" in said
    assert "[rank 0] rank 1" not in said
    assert "step 1/5" not in said
    written = list((folder / "run").glob("*.json"))
    assert written
    assert all("schema" in json.loads(path.read_text()) for path in written)


@pytest.mark.long
@pytest.mark.parametrize(
    "name", deep_unless(lambda name: name == "throughput", [n for n in OF_A_MODEL if n != "train"])
)
def test_a_command_with_a_model_that_prints(name: str, tmp_path: Path) -> None:
    done = commands.shardlab(name, *OF_A_MODEL[name].split(), "--json", cwd=tmp_path)
    one_object(done)
    assert "forward: C" in done.stderr


@pytest.mark.long
@pytest.mark.parametrize("command", deep_unless(lambda c: c == "train", ["train", "compare"]))
def test_under_torchrun(command: str, tmp_path: Path) -> None:
    """There the ranks are processes of torchrun's, or started by them."""
    run = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "-m", "shardlab")
    flags = f"{LOUD} --steps 1" if command == "train" else OF_A_MODEL[command]
    done = commands.run(
        sys.executable, *run, command, *flags.split(), "--json", cwd=tmp_path, OMP_NUM_THREADS="1"
    )
    one_object(done)
    assert "forward: C" in done.stderr


IN_THE_FOLDER = [name for name in OTHERS if not name.startswith(("data", "learn check"))]


@pytest.mark.long
@pytest.mark.parametrize("name", deep_unless(lambda name: name != "network", IN_THE_FOLDER))
def test_the_other_commands(name: str, folder: Path) -> None:
    shardlab = commands.shardlab if name in STARTS_RANKS else commands.here
    done = shardlab(
        *name.split(), *OTHERS[name].split(), "--json", cwd=folder, SHARDLAB_CACHE=str(folder)
    )
    found = one_object(done)
    if name == "doctor":
        checks = {check["name"]: check for check in found["checks"]}
        assert checks["gloo"]["status"] == "ok"
        assert "all_reduce took" in checks["gloo"]["detail"]
        assert checks["GPU"]["status"] in ("ok", "missing")
    if name == "runs":
        assert ("train", "finished") in [(run["command"], run["state"]) for run in found["runs"]]


@pytest.mark.long
def test_a_learners_code_that_prints(folder: Path) -> None:
    done = commands.shardlab("learn", "check", *OTHERS["learn check"].split(), "--json", cwd=folder)
    assert one_object(done)["pass"]


def test_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The data sets are not fetched; what puts one in place prints, as a library might."""

    def fetch(wanted: Any, *_args: Any, **_options: Any) -> dict[str, Any]:
        print("unpacking …")
        return {"name": wanted.name, "kind": wanted.kind, "folder": "here", "new": True}

    monkeypatch.setattr(fetching, "fetch", fetch)
    (tmp_path / "notes.txt").write_text("some words, and some more\n" * 100)
    for name in [name for name in OTHERS if name.startswith("data")]:
        done = commands.here(*name.split(), *OTHERS[name].split(), "--json", cwd=tmp_path)
        one_object(done)


@pytest.mark.long
def test_how_much_stderr_says(tmp_path: Path) -> None:
    """error: nothing but the error; debug: progress, and what is being done. What is said by itself
    with --json, warning, is in the test of a training run."""
    for level, speaks in (("error", False), ("debug", True)):
        done = commands.shardlab(
            "train", *LOUD.split(), "--steps", "1", "--json", "--log-level", level, cwd=tmp_path
        )
        one_object(done)
        for words in ("[rank 0] init: C", "[rank 1] init: C", "step 1/1", "debug "):
            assert (words in done.stderr) == speaks
        assert bool(done.stderr) == speaks


@pytest.mark.deep
def test_the_page_for_scripts(tmp_path: Path) -> None:
    for line in commands.bash_lines("docs/scripts.md"):
        command = line.replace("shardlab ", f"{sys.executable} -m shardlab ", 1)
        done = commands.run("bash", "-ec", command, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "result.json").read_text())["steps"] == 2


def test_a_reader_that_leaves(tmp_path: Path) -> None:
    """`shardlab list --json | true` ends without a traceback."""
    done = commands.run(
        "bash", "-c", f"{sys.executable} -m shardlab list --json | true", cwd=tmp_path
    )
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("list --json", "the result cannot be written to stdout"),
        ("list", "cannot write to stdout"),
        ("train --help", "cannot write to stdout"),
    ],
)
def test_a_disk_that_is_full(command: str, said: str, tmp_path: Path) -> None:
    line = f"{sys.executable} -m shardlab {command} > /dev/full"
    done = commands.run("bash", "-c", line, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == f"error: {said}: No space left on device\n"
