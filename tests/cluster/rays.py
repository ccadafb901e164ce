"""A Ray of two nodes on this machine, for tests: each is a host of its own (hosts.py)."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import commands
import hosts

# Ray sends nothing to anyone, and every line of the ranks is shown.
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "OMP_NUM_THREADS": "1"}
# Warnings that Ray cannot look up a host's name: these hosts have none.
QUIET["TORCH_CPP_LOG_LEVEL"] = "ERROR"


def why_not() -> str:
    """Why no Ray can be started here; empty if it can."""
    if any(importlib.util.find_spec(name) is None for name in ("ray", "aiohttp_cors")):
        return "Ray is missing: pip install 'ray[default,train]'"
    return hosts.why_not() or ""


class Ray:
    def __init__(self, two: hosts.Hosts, folder: Path) -> None:
        self.hosts = two
        self.folder = folder

    def start(self, *command: str, cwd: Path) -> subprocess.Popen[str]:
        """On the first node, as a user who is logged in there."""
        address = f"{self.hosts.address(0)}:6379"
        return self.hosts.start(
            0, *command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env=commands.environment(**QUIET, RAY_ADDRESS=address),
        )  # fmt: skip

    def run(
        self, *command: str, cwd: Path, timeout: float = 120
    ) -> subprocess.CompletedProcess[str]:
        """What it wrote to either stream is in ``stdout``."""
        process = self.start(*command, cwd=cwd)
        try:
            out, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise TimeoutError(f"{command}\n{process.communicate()[0]}\n{self.logs()}") from None
        return subprocess.CompletedProcess(command, process.returncode, out)

    def logs(self) -> str:
        return "\n".join(f"{p.name}:\n{p.read_text()[-2000:]}" for p in self.folder.glob("*.log"))


@contextlib.contextmanager
def started() -> Iterator[Ray]:
    # A short path: Ray's sockets lie below it, and a socket's path has at most 107 letters.
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    daemons: list[subprocess.Popen[str]] = []
    try:
        with hosts.made(2) as two:
            ray = Ray(two, folder)
            for node in range(2):
                daemons.append(_start(ray, node))
                _wait_for(ray, node)
            yield ray  # leaving ends whatever runs on the hosts
    finally:
        for daemon in daemons:
            daemon.wait(10)
        shutil.rmtree(folder, ignore_errors=True)


def _start(ray: Ray, node: int) -> subprocess.Popen[str]:
    first = f"{ray.hosts.address(0)}:6379"
    role = ["--head", "--port=6379", "--include-dashboard=true"]  # a job is handed to the dashboard
    command = [
        "ray", "start", *(role if node == 0 else [f"--address={first}"]), "--block",
        f"--node-ip-address={ray.hosts.address(node)}", "--num-cpus=2", "--disable-usage-stats",
        "--object-store-memory=100000000", f"--temp-dir={ray.folder}/{node}",
    ]  # fmt: skip
    with (ray.folder / f"node{node}.log").open("w") as file:
        environ = commands.environment(**QUIET)
        return ray.hosts.start(node, *command, stdout=file, stderr=file, env=environ)


def _wait_for(ray: Ray, node: int) -> None:
    log = ray.folder / f"node{node}.log"
    commands.wait_for(lambda: "Ray runtime started" in log.read_text(), 60, ray.logs)
