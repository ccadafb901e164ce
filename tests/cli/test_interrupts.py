"""Ctrl-C reaches every process of a command. It ends with 130, in words, whatever was starting."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

import commands
from conftest import deep_unless

TINY = ("--size", "tiny", "--data", "synthetic")
COMMANDS = {
    "train": (*TINY,),
    "compare": ("--size", "tiny", "--set", "data.source=synthetic"),
    "prove": (*TINY, "--strategies", "zero1"),
    "plan": (*TINY, "--world", "2,8"),
    "memory": (*TINY, "--strategies", "zero1"),
    "throughput": (*TINY,),
    "network": (),
    "doctor": (),
}


def has_fork_server(pid: int) -> bool:
    lines = [Path(f"/proc/{child}/cmdline") for child in commands.descendants(pid)]
    return any(b"forkserver" in line.read_bytes() for line in lines if line.exists())


@pytest.mark.long
@pytest.mark.parametrize("command", deep_unless(lambda c: c in ("train", "compare"), COMMANDS))
def test_ctrl_c_while_processes_start(command: str, tmp_path: Path) -> None:
    """The fork server is importing torch, and a process that it will fork is being waited for."""
    process = commands.start(*commands.SHARDLAB, command, *COMMANDS[command], cwd=tmp_path)
    commands.wait_for(lambda: has_fork_server(process.pid))
    time.sleep(0.3)
    below = commands.descendants(process.pid)
    os.killpg(process.pid, signal.SIGINT)
    process.wait(60)
    assert commands.wait_until_gone(below, 1) == []  # torch takes longer to import
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert err.splitlines()[-1].startswith("interrupted")
    assert err.count("interrupted") == 1


# Ctrl-C while typer reads the command line, inside an exec (`python -m` then ended by the signal),
# and in a command without ranks.
INTERRUPTED = """
from shardlab import __main__, cli, output
def interrupted(*_): raise KeyboardInterrupt
{}
__main__.main()
"""
MOMENTS = {
    "parse": "from typer import core; core.TyperGroup.make_context = interrupted",
    "exec": "cli.main = lambda: exec('raise KeyboardInterrupt')",
    "command": "output.say = interrupted",
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_ctrl_c_says_a_line_at_any_moment(moment: str, tmp_path: Path) -> None:
    (tmp_path / "moment.py").write_text(INTERRUPTED.format(MOMENTS[moment]))
    ended = commands.run(sys.executable, "-m", "moment", "--version", cwd=tmp_path)
    assert (ended.returncode, ended.stderr) == (130, "interrupted\n")
