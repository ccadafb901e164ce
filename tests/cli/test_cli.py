"""The command line: fast help, refusals in a line, lists, and what the doctor says."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from unittest import mock

import pytest

import commands
from shardlab.cli import flags
from shardlab.config import Config
from shardlab.naming import EVERY_STRATEGY, WORKLOADS

COMMANDS = ["train", "compare", "prove", "list", "doctor"]


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


def test_every_command_explains_itself(tmp_path: Path) -> None:
    for command in COMMANDS:
        done = commands.here(command, "--help", cwd=tmp_path)
        assert done.returncode == 0
        assert f"shardlab {command}" in done.stdout
        if "--workload" in done.stdout:  # it runs steps of a model: the flag, or why there is none
            assert "--precision" in done.stdout
    none = commands.here(cwd=tmp_path)
    assert all(command in none.stdout + none.stderr for command in COMMANDS)


REFUSED = {  # what this room says itself, and one word of a config by each way that it comes in
    "train --strategy simple_dpp": "unknown strategy 'simple_dpp'; did you mean 'simple_ddp'?",
    "train --config bad_type.yaml": "training.steps must be a whole number, got text: 'ten'",
    "train --set training.steps=many": "training.steps must be a whole number, got text: 'many'",
    "train --set training.steps": "--set training.steps: not KEY=VALUE",
    "train --set strategy.options.buckets=3": "unknown option of strategy simple_ddp",
    "train --micro_batch 0": "training.micro_batch must be at least 1",
    "train --world 2 --set launch.backend=nccl --device cuda": "GPU",
    "train --data words.bin": "words.bin is not a token shard",
    "train --out full": "the output folder full exists and is not empty",
    "train --set launch.port=29500": "launch.port is for ranks that a launcher has started",
    "train --epochs 0.01 --set training.steps=4 --data synthetic": (
        "training.epochs 0.01 are 3 steps (2,048 samples, global batch 8) and training.steps"
    ),
    "train --log-level loud": "unknown log level 'loud'; known: debug, info",
    "--log-level infos list": "unknown log level 'infos'; did you mean 'info'?",
}


@pytest.mark.parametrize("command", REFUSED)
def test_wrong_input_is_answered_in_a_line(command: str, tmp_path: Path) -> None:
    (tmp_path / "bad_type.yaml").write_text("training: {steps: ten}")
    (tmp_path / "words.bin").write_text("words " * 1000)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "something").touch()
    before = sorted(tmp_path.rglob("*"))
    done = commands.here(*command.split(), cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert REFUSED[command] in done.stderr
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.splitlines()) == 1
    assert sorted(tmp_path.rglob("*")) == before  # no run folder, nothing half-written


WRITING = ["train", "compare", "prove", "memory", "plan", "throughput", "network"]


@pytest.mark.parametrize("command", WRITING)
def test_a_folder_that_cannot_be_made_is_refused_before_the_work(
    command: str, tmp_path: Path
) -> None:
    with mock.patch.object(Config, "new_folder", side_effect=AssertionError("it has worked")):
        done = commands.here(command, "--out", "/proc/self/x", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == (
        "error: cannot write the folder: /proc/self is not a folder to write to\n"
    )


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


def test_a_letter_is_one_flag_on_every_command() -> None:
    by_short: dict[str, set[str]] = {}
    for command in commands.tree():
        for short, name in command.short.items():
            by_short.setdefault(short, set()).add(name)
    assert {short: names for short, names in by_short.items() if len(names) > 1} == {}


# A new flag needs an old one to go: everything else is --set KEY=VALUE.
FLAGS = {
    "train": {
        "--config", "--set", "--workload", "--size", "--data", "--seq-len", "--precision", "--seed",
        "--steps", "--epochs", "--global-batch", "--micro-batch", "--optimizer", "--learning-rate",
        "--strategy", "--world", "--device", "--checkpoint-every", "--resume", "--max-restarts",
        "--inject", "--profile", "--out", "--quiet", "--json",
    },
    "compare": {
        "--config", "--set", "--workload", "--size", "--precision", "--global-batch",
        "--micro-batch", "--strategies", "--world", "--device", "--repeats", "--warmup", "--steps",
        "--to-loss", "--tokens", "--seeds", "--prove", "--fresh", "--time-limit", "--profile",
        "--against", "--fail-if", "--out", "--quiet", "--json",
    },
}  # fmt: skip
EVERYWHERE = {"--help", "--log-level"}


@pytest.mark.parametrize("name", FLAGS)
def test_the_flags_are_frozen(name: str) -> None:
    (command,) = (c for c in commands.tree() if c.name == name)
    assert {option.opts[0] for option in command.options.values()} - EVERYWHERE == FLAGS[name]
    assert len(FLAGS[name]) <= 25


def test_the_defaults_that_help_states_are_the_configs() -> None:
    standard = Config().to_dict()
    for name, flag in flags.FLAGS.items():
        section, _, key = flag.key.partition(".")
        if flag.default is not None:
            assert standard[section][key] == flag.default, name


def test_the_version(tmp_path: Path) -> None:
    assert commands.here("--version", cwd=tmp_path).stdout.strip() == version("shardlab")


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
    listed = json.loads(commands.here("list", "--json", cwd=tmp_path).stdout)
    text = commands.here("list", cwd=tmp_path).stdout
    for kind, known in (("strategies", EVERY_STRATEGY), ("workloads", WORKLOADS)):
        assert list(listed[kind]) == list(known)
        assert all(listed[kind].values())
        assert all(name in text for name in known)


@pytest.mark.long
def test_quiet_prints_the_folder_alone(tmp_path: Path) -> None:
    done = commands.here("train", "--size", "tiny", "--steps", "1", "--quiet", cwd=tmp_path)
    assert done.stderr == ""
    assert (tmp_path / done.stdout.strip() / "config.yaml").exists()


@pytest.mark.long
def test_only_reading_traces_needs_more_than_the_core() -> None:
    """Training, proofs and comparisons run where only torch and six small packages are."""
    script = """
import importlib, pkgutil, sys
for name in ("sklearn", "transformers", "tiktoken", "pyarrow", "pandas", "isal"):
    sys.modules[name] = None
import shardlab
reads_traces = ("shardlab.trace.", "shardlab.report.trace", "shardlab.report.timeline")
for found in pkgutil.walk_packages(shardlab.__path__, "shardlab."):
    name = found.name
    if name == "shardlab.trace.capture" or not name.startswith((*reads_traces, "shardlab.learn.e")):
        if name not in ("shardlab.__main__", "shardlab.training._preload"):
            importlib.import_module(name)
print("all")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "all", done.stderr
