"""The command line: fast help, refusals in a line, lists, and what the doctor says."""

from __future__ import annotations

import json
import resource
import socket
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import commands
from shardlab.naming import EVERY_STRATEGY, WORKLOADS

COMMANDS = ["train", "compare", "prove", "strategies", "workloads", "doctor", "version"]


@pytest.mark.alone
def test_help_is_fast_and_needs_no_torch() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "shardlab", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "typer" in imported
    assert not imported & {"torch", "numpy", "jinja2", "yaml"}
    times = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([*commands.SHARDLAB, "--help"], capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        # Of the CPU: a busy machine makes everything slow, and is not what is tested here.
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(times) < 0.3


def test_importing_costs_and_does_nothing() -> None:
    """No tokenizer, no download, no command line, no torch."""
    script = "import sys, shardlab.config, shardlab.run.launch; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str, tmp_path: Path) -> None:
    done = commands.here(command, "--help", cwd=tmp_path)
    assert done.returncode == 0
    assert f"shardlab {command}" in done.stdout


def test_no_command_is_the_help(tmp_path: Path) -> None:
    done = commands.here(cwd=tmp_path)
    assert all(command in done.stdout + done.stderr for command in COMMANDS)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--strategy", "zero4"], "error: unknown strategy 'zero4'; "),
        (["--config", "bad_key.yaml"], "unknown key in training 'step'; did you mean 'steps'?"),
        (["--config", "bad_type.yaml"], "training.steps must be a whole number, got text: 'ten'"),
        (["--set", "training.steps=many"], "training.steps must be a whole number, got text"),
        (["--set", "training.steps"], "--set training.steps: not KEY=VALUE"),
        (["--world", "3", "--global-batch", "8"], "a global batch of 8 cannot be divided evenly"),
        (["--data", "no/such/shard.bin"], "no such data: no/such/shard.bin"),
        (["--config", "no.yaml"], "cannot read the config no.yaml: No such file or directory"),
        (["--world", "2", "--backend", "nccl", "--device", "cuda"], "GPU"),
        (["--out", "full"], "the output folder full exists and is not empty"),
        (["--set", "strategy.options.buckets=3"], "unknown option of strategy simple_ddp"),
        (["--strategy", "zero1:tensor=3", "--world", "4"], "4 ranks cannot be tensor 3"),
        (
            ["--strategy", "zero1:tensor=2", "--tensor", "4"],
            "--strategy says tensor=2, and --tensor 4",
        ),
        (["--size", "tinny"], "unknown gpt2 size 'tinny'; did you mean 'tiny'?"),
        (["--data", "words.bin"], "words.bin is not a token shard"),
        # Flags of other people's scripts: those that mean one of ours, and one that does not.
        (["--ddp-choice", "simple_dpp"], "unknown strategy 'simple_dpp'; did you mean"),
        (["--nproc_per_node=3", "--batch-size", "0"], "training.micro_batch must be at least 1"),
        (["--num-epochs", "0"], "training.epochs must be above 0, got 0"),
        (["--sharding_strategy", "x"], "--sharding-strategy: FULL_SHARD and its like are strat"),
        (
            ["--epochs", "0.01", "--set", "training.steps=4", "--data", "synthetic"],
            "training.epochs 0.01 are 3 steps (2,048 samples, global batch 8) and training.steps",
        ),
    ],
)
def test_wrong_input_is_answered_in_a_line(args: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "bad_key.yaml").write_text("training: {step: 3}")
    (tmp_path / "bad_type.yaml").write_text("training: {steps: ten}")
    (tmp_path / "words.bin").write_text("words " * 1000)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "something").touch()
    before = sorted(tmp_path.rglob("*"))
    done = commands.here("train", *args, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert message in done.stderr
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.splitlines()) == 1
    assert sorted(tmp_path.rglob("*")) == before  # no run folder, nothing half-written


@pytest.mark.long
@pytest.mark.parametrize("command", ["train", "memory --strategy zero1"])
def test_a_folder_for_temporary_files_that_is_too_deep(command: str, tmp_path: Path) -> None:
    """Python's own error is a traceback that ends with "AF_UNIX path too long"."""
    deep = tmp_path / ("d" * 80)
    deep.mkdir()
    done = commands.shardlab(*command.split(), "--size", "tiny", cwd=tmp_path, TMPDIR=str(deep))
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "characters, as in TMPDIR=/tmp" in done.stderr
    assert list(tmp_path.iterdir()) == [deep]


def test_a_port_in_use(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = commands.here("train", "--port", str(port), cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: port {port} cannot be used: Address already in use")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_a_port_of_ones_choice(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("", 0))
        port = str(free.getsockname()[1])
    done = commands.here("train", "--port", port, "--size", "tiny", "--steps", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_an_unknown_flag(tmp_path: Path) -> None:
    done = commands.here("train", "--stratgy", "single", cwd=tmp_path)
    assert done.returncode == 2
    assert "--stratgy" in done.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["train", "--batch", "4"], "no option --batch: write --global-batch for the samples of a"),
        (["memory", "-b=4"], "no option -b: it is short for --global-batch on other commands"),
        (["memory", "--batch", "0"], "error: --micro-batch 0: a batch has at least one sample"),
        (["throughput", "--max-batch=x"], "--max-micro-batch"),
        (["learn", "check", "--deadline", "0"], "error: --time-limit 0: a check needs time"),
        (["data", "text", "no.txt", "--to", "x"], "no such file or folder: no.txt"),
        (
            ["train", "--log-level", "loud"],
            "unknown log level 'loud'; known: debug, info",
        ),
        (["--log-level", "infos", "strategies"], "unknown log level 'infos'; did you mean 'info'?"),
    ],
)
def test_old_and_wrong_names_of_flags(args: list[str], message: str, tmp_path: Path) -> None:
    """An old name is understood, and answered by the new one; what could mean two things is not."""
    done = commands.here(*args, cwd=tmp_path)
    assert done.returncode == 2
    assert message in " ".join(done.stderr.split())


def test_a_flag_has_one_name_on_every_command() -> None:
    """No command may bring back a name for what is called otherwise elsewhere."""
    options = {name for command in commands.tree() for name in command.options}
    assert not options & {
        "--batch",
        "--max-batch",
        "--limit",
        "--deadline",
        "--output",
        "--verbose",
    }
    by_short: dict[str, set[str]] = {}
    for command in commands.tree():
        for short, name in command.short.items():
            by_short.setdefault(short, set()).add(name)
    assert {short: names for short, names in by_short.items() if len(names) > 1} == {}
    # `submit --to slurm` is the only --to: where files go is --out.
    assert [c.name for c in commands.tree() if "--to" in c.options] == ["submit"]


def test_the_version(tmp_path: Path) -> None:
    for args in (["--version"], ["version"]):
        assert commands.here(*args, cwd=tmp_path).stdout.strip() == version("shardlab")


def test_a_shell_completes_commands_and_flags(tmp_path: Path) -> None:
    script = "import sys; sys.argv[0] = 'shardlab'; from shardlab.cli import main; main()"
    for typed, number, found in (
        ("tr", 1, {"train", "trace"}),
        ("train --strat", 2, {"--strategy"}),
    ):
        done = commands.run(
            sys.executable, "-c", script, cwd=tmp_path, _SHARDLAB_COMPLETE="complete_bash",
            COMP_WORDS=f"shardlab {typed}", COMP_CWORD=str(number),
        )  # fmt: skip
        assert set(done.stdout.split()) == found, done.stderr


def test_lists(tmp_path: Path) -> None:
    for command, known in (("strategies", EVERY_STRATEGY), ("workloads", WORKLOADS)):
        rows = json.loads(commands.here(command, "--json", cwd=tmp_path).stdout)[command]
        assert list(rows) == list(known)
        assert all(rows.values())
        text = commands.here(command, cwd=tmp_path).stdout
        assert all(name in text for name in known)


@pytest.mark.long
def test_the_doctor(tmp_path: Path) -> None:
    done = commands.here("doctor", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert checks["gloo"]["status"] == "ok"
    assert "all_reduce took" in checks["gloo"]["detail"]
    assert checks["GPU"]["status"] in ("ok", "missing")


@pytest.mark.long
def test_quiet_prints_the_folder_alone(tmp_path: Path) -> None:
    done = commands.shardlab("train", "--size", "tiny", "--steps", "1", "--quiet", cwd=tmp_path)
    assert done.stderr == ""
    assert (tmp_path / done.stdout.strip() / "config.yaml").exists()


@pytest.mark.long
def test_only_reading_traces_needs_more_than_the_core() -> None:
    """Training, proofs and comparisons run where only torch and five small packages are."""
    script = """
import importlib, pkgutil, sys
for name in ("msgspec", "PIL", "sklearn", "transformers", "tiktoken", "pyarrow", "pandas", "isal"):
    sys.modules[name] = None
import shardlab
reads_traces = ("shardlab.trace.", "shardlab.report.trace", "shardlab.report.timeline")
for found in pkgutil.walk_packages(shardlab.__path__, "shardlab."):
    name = found.name
    if name == "shardlab.trace.capture" or not name.startswith((*reads_traces, "shardlab.learn.e")):
        if name not in ("shardlab.__main__", "shardlab.run._preload"):
            importlib.import_module(name)
print("all")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "all", done.stderr
