"""The commands that start ranks again and again, on two hosts under torchrun."""

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
from shardlab.naming import STRATEGIES

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def two() -> Iterator[Hosts]:
    with hosts.made(2) as made:
        yield made


def on_both(
    two: Hosts, cwd: Path, *words: str, ranks: int = 1, timeout: float = 400
) -> list[subprocess.CompletedProcess[str]]:
    """A shardlab command as the ranks of both hosts."""
    return two.torchrun("-m", "shardlab", *words, ranks=ranks, timeout=timeout, cwd=cwd)


def written(cwd: Path, name: str) -> dict[str, Any]:
    """The one record that a command has left: only the first process writes."""
    (found,) = cwd.rglob(name)
    record: dict[str, Any] = json.loads(found.read_text(encoding="utf-8"))
    return record


def ranks_of(record: dict[str, Any]) -> list[list[int]]:
    return [node["ranks"] for node in record["env"]["nodes"]]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_strategy_is_proved(two: Hosts, tmp_path: Path, ranks: int) -> None:
    first, second = on_both(two, tmp_path, "prove", ranks=ranks, timeout=800)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert f"All {len(STRATEGIES)} do what is claimed" in first.stdout
    assert second.stdout == ""
    record = written(tmp_path, "prove.json")
    assert {v["strategy"] for v in record["verdicts"]} == set(STRATEGIES)
    assert {v["world"] for v in record["verdicts"]} == {1, 2 * ranks}
    assert ranks_of(record) == ([[0], [1]] if ranks == 1 else [[0, 1], [2, 3]])


def test_compare_measures_every_strategy(two: Hosts, tmp_path: Path) -> None:
    """The report says which ranks were on which host."""
    few = ["--size", "tiny", "--repeats", "1", "--steps", "2", "--warmup", "1", "--no-prove"]
    first, second = on_both(two, tmp_path, "compare", *few, "--no-profile")
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert "measured on 2 nodes: " in first.stdout
    assert second.stdout == ""
    record = written(tmp_path, "compare.json")
    assert {cell["strategy"]: cell["status"] for cell in record["cells"]} == dict.fromkeys(
        STRATEGIES, "ok"
    )
    assert ranks_of(record) == [[0], [1]]
    assert "2 nodes: " in next(tmp_path.rglob("report.html")).read_text(encoding="utf-8")


def test_throughput_and_memory(two: Hosts, tmp_path: Path) -> None:
    size = ("--size", "tiny")
    for r in on_both(two, tmp_path, "throughput", *size, "--micro-batch", "1", "--steps", "2"):
        assert r.returncode == 0, r.stderr
    record = written(tmp_path, "throughput.json")
    assert (record["world"], ranks_of(record)) == (2, [[0], [1]])
    words = ("memory", *size, "--strategies", "zero3", "--measure")
    for r in on_both(two, tmp_path, *words):
        assert r.returncode == 0, r.stderr
    (row,) = written(tmp_path, "memory.json")["rows"]
    assert row["world"] == 2
    assert row["measured_step_bytes"]


def test_what_is_refused_is_refused_on_both(two: Hosts, tmp_path: Path) -> None:
    for words, line in (
        (("compare", "--strategies", "zero9"), "zero9"),
        (("prove", "--world", "3"), "3 ranks were asked for, but torchrun has started 2"),
    ):
        first, _ = on_both(two, tmp_path, *words, timeout=120)
        assert first.returncode != 0, words
        assert line in first.stderr
        errors = [e for e in first.stderr.splitlines() if e.startswith("error: ")]
        assert len(errors) == 1, first.stderr  # below it stands torchrun's own report
    assert not list(tmp_path.rglob("*.json"))


SLOW = '''
"""A strategy that is stuck in its first step."""
import time
from shardlab.strategies.simple_ddp import SimpleDDP


class Slow(SimpleDDP):
    def gradients(self, microbatches):
        time.sleep(600)
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
            limit = time.monotonic() + 120
            while "Slow · world 2" not in log.read_text(encoding="utf-8"):
                assert time.monotonic() < limit, log.read_text(encoding="utf-8")
                time.sleep(0.2)
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
    line = r"^error: rank 1 on .*: the launcher's process there does not answer"
    assert re.search(line, said, re.MULTILINE)
    assert "does not do what is claimed" not in said  # it is not the strategy's fault


def test_ctrl_c_ends_every_rank(two: Hosts, tmp_path: Path) -> None:
    with stuck(two, tmp_path) as (started, _):
        for process in started:
            process.send_signal(signal.SIGINT)
        for process in started:
            process.wait(60)
        assert commands.wait_until_gone(two.pids(0) + two.pids(1)) == []
