"""The commands that start ranks again and again, on two hosts under torchrun.

A short case of them, throughput, is in `test_cluster.py`: its hosts have imported torch already.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import commands
import hosts
from hosts import Hosts

pytestmark = pytest.mark.deep

# One of each mechanism, and one process.
NAMES = (
    "single", "simple_ddp", "bucket_ddp_async", "zero2", "zero3", "local_sgd", "pytorch_zero3",
)  # fmt: skip


@pytest.fixture(scope="module")
def two() -> Iterator[Hosts]:
    with hosts.made(2) as made:
        yield made


def on_both(two: Hosts, cwd: Path, *words: str, ranks: int = 1) -> tuple[str, str]:
    """What a shardlab command prints as the ranks of both hosts."""
    done = two.torchrun("-m", "shardlab", *words, ranks=ranks, timeout=400, cwd=cwd)
    assert [d.returncode for d in done] == [0, 0], done[0].stderr + done[1].stderr
    return done[0].stdout, done[1].stdout


def written(cwd: Path, name: str) -> dict[str, Any]:
    """The one record that a command has left: only the first process writes."""
    (found,) = cwd.rglob(name)
    record: dict[str, Any] = json.loads(found.read_text(encoding="utf-8"))
    return record


@pytest.mark.timeout(500)
def test_every_mechanism_is_proved(two: Hosts, tmp_path: Path) -> None:
    names = ("--strategies", ",".join(NAMES))
    first, second = on_both(two, tmp_path, "prove", *names, ranks=2)
    assert f"All {len(NAMES)} do what is claimed" in first
    assert second == ""
    record = written(tmp_path, "prove.json")
    assert {v["strategy"] for v in record["verdicts"]} == set(NAMES)
    assert {v["world"] for v in record["verdicts"]} == {1, 4}
    assert [node["ranks"] for node in record["env"]["nodes"]] == [[0, 1], [2, 3]]


def test_memory(two: Hosts, tmp_path: Path) -> None:
    on_both(two, tmp_path, "memory", "--size", "tiny", "--strategies", "zero3", "--measure")
    (row,) = written(tmp_path, "memory.json")["rows"]
    assert row["world"] == 2
    assert row["measured_step_bytes"]


def test_what_is_refused_is_refused_on_both(two: Hosts, tmp_path: Path) -> None:
    for words, line in (
        (("compare", "--strategies", "zero9"), "zero9"),
        (("prove", "--world", "3"), "3 ranks were asked for, but torchrun has started 2"),
    ):
        first, _ = two.torchrun("-m", "shardlab", *words, timeout=120, cwd=tmp_path)
        assert first.returncode != 0, words
        assert line in first.stderr
        errors = [e for e in first.stderr.splitlines() if e.startswith("error: ")]
        assert len(errors) == 1, first.stderr  # below it stands torchrun's own report
    assert not list(tmp_path.rglob("*.json"))


SLOW = '''
"""A strategy of which rank 1 is stuck in its first step."""
import os
import time
from shardlab.strategies.data_parallel.simple_ddp import SimpleDDP


class Slow(SimpleDDP):
    def gradients(self, microbatches):
        if os.environ["RANK"] == "1":
            time.sleep(600)
        return super().gradients(microbatches)
'''


@contextlib.contextmanager
def stuck(two: Hosts, folder: Path) -> Iterator[tuple[list[subprocess.Popen[str]], Path]]:
    """A proof that is stuck, on both hosts: torchrun's processes, and their output."""
    (folder / "slow.py").write_text(SLOW, encoding="utf-8")
    log = folder / "log"
    words = ("-m", "shardlab", "prove", "--strategies", f"{folder}/slow.py:Slow")
    with log.open("w", encoding="utf-8") as out:
        started = two.start_torchrun(*words, cwd=folder, log=out)
        try:
            commands.wait_for(lambda: "Slow · world 2" in log.read_text(), 120, log.read_text)
            time.sleep(2)  # the ranks are in their step
            yield started, log
        finally:
            two.end_all()
            for process in started:
                process.wait()


def test_a_lost_host_ends_the_command(two: Hosts, tmp_path: Path) -> None:
    """Host 1's processes are killed: the first process says so, and nothing is left behind."""
    with stuck(two, tmp_path) as (started, log):
        two.end(1)
        started[0].wait(60)
        assert commands.wait_until_gone(two.pids(0)) == []
    said = log.read_text(encoding="utf-8")
    line = r"^error: hung for \d+ s: node 1 \(.*, rank 1\) does not answer"
    assert re.search(line, said, re.MULTILINE), said
    assert "does not do what is claimed" not in said  # it is not the strategy's fault


def test_ctrl_c_ends_every_rank(two: Hosts, tmp_path: Path) -> None:
    with stuck(two, tmp_path) as (started, _):
        for process in started:
            process.send_signal(signal.SIGINT)
        for process in started:
            process.wait(60)
        assert commands.wait_until_gone(two.pids(0) + two.pids(1)) == []
