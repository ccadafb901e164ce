"""Where a run ran: versions, CPU, GPU, git commit. It is written with every result."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import shardlab

if TYPE_CHECKING:
    from shardlab.world import World


def describe(device: torch.device, command: str) -> dict[str, Any]:
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "shardlab": shardlab.__version__,
        "git": git_state(Path(shardlab.__file__).parent),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "device": device.type,
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "cuda": torch.version.cuda,
        "threads_per_rank": torch.get_num_threads(),
    }


def node_name() -> tuple[str, str]:
    """What tells this rank's node from others (the launcher's number if there is one), its host."""
    host = socket.gethostname()
    for variable in ("GROUP_RANK", "SLURM_NODEID"):  # of torchrun, of srun
        if variable in os.environ:
            return os.environ[variable], host
    return host, host


def nodes_of(world: World) -> list[dict[str, Any]]:
    """The ``host`` and the ``ranks`` of each node, in the order of their first ranks."""
    return grouped(world.gather(node_name()))


def grouped(names: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    """The ranks of each node. ``names``: what tells each rank's node from others, and its host."""
    nodes: dict[str, dict[str, Any]] = {}
    for rank, (name, host) in enumerate(names):
        nodes.setdefault(name, {"host": host, "ranks": []})["ranks"].append(rank)
    return list(nodes.values())


def usable_cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def cpu_model() -> str:
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def git_state(folder: Path) -> dict[str, Any] | None:
    """Commit of the code that ran, and whether it was changed since; None outside a repository."""

    def git(*args: str) -> str:
        command = ["git", "-C", str(folder), *args]
        return subprocess.check_output(
            command, stderr=subprocess.DEVNULL, text=True, timeout=10
        ).strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None
