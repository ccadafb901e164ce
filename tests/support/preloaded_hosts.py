"""Processes on the tests' hosts that have imported torch already: a command of ours starts at once.

    with hosts.made(2) as two, warm.on(two, tmp_path) as both:
        ranks = [both.start(host, "train", "--size", "tiny", RANK=str(host)) for host in range(2)]
        took = both.heard(ranks, "does not reach", within=10)
        codes = [rank.wait(20) for rank in ranks]

Each host has a name of its own, n1, n2 and so on, and its own mounts.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import itertools
import json
import os
import re
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import commands
import hosts

NEW_NAME = 0x04000000  # CLONE_NEWUTS of <sched.h>


@dataclass
class Started:
    """A command that was started on a host."""

    host: int
    stem: Path

    def _text(self, kind: str) -> str:
        path = self.stem.with_suffix(kind)
        return path.read_text() if path.exists() else ""

    @property
    def out(self) -> str:
        return self._text(".out")

    @property
    def err(self) -> str:
        return self._text(".err")

    def wait(self, seconds: float) -> int:
        """Its exit code; an error, with what it said, if it does not end."""
        said = lambda: f"{self.stem.name} did not end\n{self.err}"  # noqa: E731
        commands.wait_for(lambda: self._text(".code"), seconds, said)
        return int(self._text(".code"))

    @property
    def errors(self) -> list[str]:
        return [line for line in self.err.splitlines() if line.startswith("error: ")]


class Warm:
    def __init__(self, on: hosts.Hosts, folder: Path) -> None:
        self.hosts, self.folder = on, folder
        self._numbers = itertools.count()
        self._servers: list[subprocess.Popen[str]] = []

    def open(self) -> None:
        for host in range(self.hosts.count):
            self._servers.append(self.hosts.start(
                host, sys.executable, __file__, f"n{host + 1}", cwd=self.folder,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            ))  # fmt: skip
        for server in self._servers:
            assert server.stdout is not None
            assert server.stdout.readline() == "ready\n"

    def close(self) -> None:
        self.hosts.end_all()
        for server in self._servers:
            server.communicate()

    def start(
        self, host: int, *argv: str, plant: str = "", cwd: Path | None = None, **env: str
    ) -> Started:
        """``shardlab argv`` on a host. ``plant``: Python that runs before it, in its process."""
        stem = self.folder / f"{next(self._numbers)}-n{host + 1}"
        job = {"argv": argv, "env": env, "plant": plant, "stem": str(stem),
               "cwd": str(cwd or self.folder)}  # fmt: skip
        server = self._servers[host]
        assert server.stdin is not None
        server.stdin.write(json.dumps(job) + "\n")
        server.stdin.flush()
        return Started(host, stem)

    def heard(self, started: Sequence[Started], words: str, within: float) -> float:
        """After how many seconds each of them has said it on stderr; an error if one does not."""
        return max(self.heard_of_any([one], words, within) for one in started)

    def heard_of_any(self, started: Sequence[Started], words: str, within: float) -> float:
        def said() -> str:
            return words + "\n" + "\n".join(f"{one.stem.name}: {one.err}" for one in started)

        is_said = lambda: any(re.search(words, one.err) for one in started)  # noqa: E731
        return commands.wait_for(is_said, within, said)


def by_hand(rank: int, port: int, **changes: str) -> dict[str, str]:
    """What a person exports on each node before the command."""
    return {
        "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
        "NODE_RANK": str(rank), "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", **changes,
    }  # fmt: skip


@contextlib.contextmanager
def on(some: hosts.Hosts, folder: Path) -> Iterator[Warm]:
    warm = Warm(some, folder)
    try:
        warm.open()
        yield warm
    finally:
        warm.close()


# ------------------------------------------------------------------ on the host


def _serve(name: str) -> None:
    if ctypes.CDLL(None, use_errno=True).unshare(NEW_NAME):
        raise OSError(ctypes.get_errno(), "unshare")
    socket.sethostname(name)
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # as main() does, before torch is imported
    import shardlab.cli
    import shardlab.training.restart
    import shardlab.training.run
    import shardlab.workloads.gpt2

    print("ready", flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        if (keeper := os.fork()) == 0:
            if (child := os.fork()) == 0:
                _become(job)
                code = 0
                try:
                    shardlab.cli.main()
                except SystemExit as end:
                    code = end.code if isinstance(end.code, int) else 1
                except BaseException:
                    traceback.print_exc()
                    code = 1
                atexit._run_exitfuncs()
                sys.stdout.flush()
                os._exit(code)  # the interpreter would take seconds to undo its imports
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            Path(job["stem"] + ".part").write_text(str(code))
            Path(job["stem"] + ".part").rename(job["stem"] + ".code")
            os._exit(0)
        del keeper


def _become(job: dict[str, object]) -> None:
    stem = str(job["stem"])
    for number, kind in ((1, ".out"), (2, ".err")):
        file = os.open(stem + kind, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(job["env"])  # type: ignore[call-overload]
    os.chdir(str(job["cwd"]))
    sys.argv = ["shardlab", *job["argv"]]  # type: ignore[misc]
    exec(str(job["plant"]), {})


if __name__ == "__main__":
    _serve(sys.argv[1])
