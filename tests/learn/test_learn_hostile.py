"""Whatever a submission does, the check ends in time, says what happened, and leaves no process."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import commands
import kill_rate
from shardlab.learn import exercise as exercises
from shardlab.learn import grade
from shardlab.learn.reports import Rank

ENDLESS_S = 4.0  # the deadline of what would not end by itself
# Each runs as average_gradients(model) of the exercise simple_ddp; the causes that may be named,
# and words of the message.
HOSTILE: dict[str, tuple[str, set[str], str]] = {
    "infinite loop on one rank": (
        "while dist.get_rank() == 1:\n    pass\ndist.barrier()",
        {"timed-out"},
        "rank 1 was busy in line",
    ),
    "sys.exit": ("import sys; sys.exit(0)", {"exited"}, "SystemExit(0) in line"),
    "os._exit": ("os._exit(0)", {"exited"}, "exit code 0"),
    "one rank leaves": (
        "if dist.get_rank() == 1:\n    os._exit(3)\ndist.barrier()",
        {"exited"},
        "rank 1 left with exit code 3",
    ),
    "deadlock": (
        "if dist.get_rank() == 0:\n    dist.barrier()",
        {"deadlock"},
        "rank 0 entered barrier once, rank 1 never",
    ),
    "crossed calls": (
        "dist.recv(torch.zeros(4), 1 - dist.get_rank())",
        {"deadlock"},
        "waits in recv",
    ),
    "wrong shapes": (
        "dist.all_reduce(torch.zeros(3 + 4 * dist.get_rank()))",
        {"calls-differ"},
        "the ranks' calls must come",
    ),
    "raises": ("1 / 0", {"raised"}, "ZeroDivisionError in line"),
    "segmentation fault": (
        "import ctypes; ctypes.string_at(0)",
        {"crashed"},
        "was killed by SIGSEGV",
    ),
    "huge tensor": ("torch.ones(1 << 40)", {"memory"}, "more memory than a check allows"),
    "huge list": ("x = [0] * (1 << 40)", {"memory"}, "more memory than a check allows"),
    "grows": (
        "x = []\nwhile True:\n    x.append(bytearray(1 << 24))",
        {"memory"},
        "memory",
    ),
    "prints PASS": (
        "print('PASS', flush=True)\nprint('{\"pass\": true}')",
        {"not-communicated"},
        "still the rank's own",
    ),
    "prints for ever": ("while True:\n    print('x' * 1000)", {"timed-out"}, "busy in line"),
    "replaces a collective": (
        "dist.all_reduce = lambda *a, **k: None",
        {"tampered"},
        "`torch.distributed.all_reduce`",
    ),
    "writes to every descriptor": (
        "for fd in range(3, 1024):\n"
        '    try:\n        os.write(fd, b\'["case", {"got": {}}]\\n\')\n'
        "    except OSError:\n        pass",
        {"tampered", "unusable", "raised", "crashed"},
        "",
    ),
    "closes every descriptor": (
        "os.closerange(0, 1024)",
        {"exited", "unusable", "raised", "crashed"},
        "",
    ),
    "fork bomb": ("while True:\n    os.fork()", {"processes", "memory"}, ""),
    "forks and goes on as two": ("os.fork()", {"not-communicated"}, ""),
    "daemon that outlives us": (
        "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
        "        import time; time.sleep(1000)\n    os._exit(0)",
        {"not-communicated"},
        "",
    ),
    "ends its guard": (
        "import signal; os.kill(os.getppid(), signal.SIGKILL); import time; time.sleep(100)",
        {"tampered"},
        "guard was ended",
    ),
    "stops itself": (
        "import signal; os.kill(os.getpid(), signal.SIGSTOP)",
        {"timed-out"},
        "not done within",
    ),
    "ignores signals": (
        "import signal\nfor s in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):\n"
        "    signal.signal(s, signal.SIG_IGN)\nwhile True:\n    pass",
        {"timed-out"},
        "not done within",
    ),
    "returns nonsense in .grad": (
        "for p in model.parameters():\n    p.grad = torch.full_like(p, float('nan'))",
        {"not-finite"},
        "nan or inf",
    ),
}


def submission(body: str) -> str:
    head = "import os\nimport torch\nimport torch.distributed as dist\n\n\n"
    return head + "def average_gradients(model):\n" + textwrap.indent(body, "    ") + "\n"


GetVerdict = Callable[[str], tuple[grade.Verdict, float]]


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the checks of these tests work: their processes are known by it."""
    folder = tmp_path_factory.mktemp("scratch")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(folder))
        yield folder


@pytest.fixture(scope="module")
def verdict(request: pytest.FixtureRequest, scratch: Path) -> Iterator[GetVerdict]:
    """The verdict of each chosen test, and how long it took; three at a time."""
    folder = scratch.parent / "submissions"
    folder.mkdir()

    def check(name: str) -> tuple[grade.Verdict, float]:
        body, causes, _ = HOSTILE[name]
        path = folder / f"{name.replace(' ', '_')}.py"
        path.write_text(submission(body))
        begin = time.monotonic()
        found = grade.grade(exercises.find("simple_ddp"), path, deadline_of(causes))
        return found, time.monotonic() - begin

    with ThreadPoolExecutor(3) as pool:
        futures = {name: pool.submit(check, name) for name in kill_rate.chosen(request, "name")}
        yield lambda name: futures[name].result()


def deadline_of(causes: set[str]) -> float:
    return ENDLESS_S if "timed-out" in causes else grade.DEADLINE_S


@pytest.mark.long
@pytest.mark.parametrize("name", HOSTILE)
def test_ends_with_a_verdict(name: str, verdict: GetVerdict) -> None:
    _, causes, words = HOSTILE[name]
    found, seconds = verdict(name)
    assert not found.passed
    assert found.findings[0].cause in causes, found.findings
    assert words in found.findings[0].message, found.findings
    assert found.seconds < deadline_of(causes) + 5
    assert seconds < deadline_of(causes) + 60  # with the import of torch


@pytest.mark.long
def test_nothing_is_left(scratch: Path, verdict: GetVerdict) -> None:
    for name in HOSTILE:
        with contextlib.suppress(KeyError):  # not chosen this time
            verdict(name)
    assert not commands.wait_until_gone(processes_in(scratch))
    assert not list(scratch.glob("shardlab-learn-*"))


def processes_in(folder: Path) -> list[int]:
    """Those that work in a folder, or in one that was removed from it: a rank and all it starts."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str((process / "cwd").readlink()).startswith(str(folder)):
                found.append(int(process.name))
    return found


def test_processes_are_found_by_their_folder(tmp_path: Path) -> None:
    """The check above can fail."""
    sleeper = commands.start("sleep", "60", cwd=tmp_path)
    assert processes_in(tmp_path) == [sleeper.pid]
    sleeper.kill()
    sleeper.communicate()
    assert not commands.wait_until_gone(processes_in(tmp_path))


@pytest.mark.long
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_ending_the_command_ends_the_ranks(how: signal.Signals, tmp_path: Path) -> None:
    path = tmp_path / "submission.py"
    path.write_text(submission("while True:\n    pass"))
    check = [*commands.SHARDLAB, "learn", "check", str(path), "--exercise", "simple_ddp"]
    with tempfile.TemporaryDirectory() as scratch:  # short: the path of a socket has an end
        running = commands.start(*check, cwd=tmp_path, TMPDIR=scratch)
        commands.wait_for(lambda: len(processes_in(Path(scratch))) >= 2)
        ranks, below = processes_in(Path(scratch)), commands.descendants(running.pid)
        os.kill(running.pid, how)
        _, errors = running.communicate(timeout=60)
        assert running.returncode == (130 if how == signal.SIGINT else -signal.SIGKILL), errors
        assert not commands.wait_until_gone([*ranks, *below], timeout=20)
        assert not list(Path(scratch).glob("shardlab-learn-*"))


def test_tampering_is_not_undone_by_what_follows() -> None:
    report, theirs = os.pipe()
    os.set_blocking(report, False)
    rank = Rank(0, os.getpid(), report, -1, -1, b"token")
    os.write(theirs, b'["case", {}]\n\ntoken ["case", {"got": {}}]\n')
    rank.read_report()
    assert rank.phase == "tampered"
    assert not rank.evidence
    os.close(theirs)
    os.close(report)
