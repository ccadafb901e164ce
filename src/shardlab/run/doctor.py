"""What this machine can run, and why not the rest: each line is something that was tried."""

from __future__ import annotations

import os
import platform
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardlab.config import LaunchConfig
from shardlab.data import sources
from shardlab.errors import RankFailure, UsageError
from shardlab.run.launch import Ranks

if TYPE_CHECKING:
    from shardlab.world import World

Check = dict[str, str]


def examine() -> list[Check]:
    """status: ok; missing (not here, and what that rules out); failed (should work, does not)."""
    checks = [_python(), _writable("run folders", Path.cwd())]
    try:
        checks.append(_check("ok", "text", f"{sources.stdlib_shard()} (the embedded data)"))
    except (UsageError, OSError) as error:
        checks.append(_check("missing", "text", str(error)))
    gpus: list[str] = []
    try:
        with Ranks(LaunchConfig(device="cpu"), 2) as ranks:
            facts = ranks.run(f"{__name__}:look", deadline_s=60)[0]
        gpus = facts["gpus"]
        checks += [
            _check("ok", "torch", facts["torch"]),
            _check("ok", "CPU", f"{facts['cores']} cores, {facts['memory_gib']:.0f} GiB"),
            _check(
                "ok",
                "gloo",
                f"2 ranks on the CPU: a 4 MiB all_reduce took {facts['all_reduce_ms']:.1f} ms",
            ),
        ]
        checks += _gpu_checks(gpus, facts["nccl"])
    except (RankFailure, UsageError) as error:
        checks.append(_check("failed", "gloo", f"2 ranks on the CPU could not work: {error}"))
    return checks


def look(world: World) -> dict[str, Any]:
    """On a rank: what torch sees, and what a collective takes."""
    import torch
    import torch.distributed as dist

    from shardlab import comm
    from shardlab.run import environment

    tensor = torch.ones(1 << 20)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        comm.all_reduce(tensor, world.group)
        times.append((time.perf_counter() - start) * 1e3)
    if float(tensor[0]) != 2.0**5:
        raise RuntimeError(f"all_reduce gave {float(tensor[0])}, not {2.0**5}")
    facts = environment.describe(world.device, "")
    return {
        "torch": facts["torch"],
        "cores": facts["cores"],
        "memory_gib": facts["memory_bytes"] / 2**30,
        "gpus": facts["gpus"],
        "nccl": dist.is_nccl_available(),
        "all_reduce_ms": sorted(times)[2],
    }


def _gpu_checks(gpus: list[str], has_nccl: bool) -> list[Check]:
    if not gpus:
        return [
            _check("missing", "GPU", "PyTorch sees none: everything runs on the CPU, over gloo"),
            _check("missing", "nccl", "needs a GPU for each rank"),
        ]
    names = ", ".join(gpus)
    checks = [_check("ok", "GPU", f"{len(gpus)}: {names}; more ranks can share them over gloo")]
    if has_nccl:
        checks.append(_check("ok", "nccl", "a rank for each GPU"))
    else:
        checks.append(_check("missing", "nccl", "this PyTorch was built without it: use gloo"))
    return checks


def _python() -> Check:
    good = sys.version_info >= (3, 11)
    return _check("ok" if good else "failed", "python", platform.python_version())


def _writable(name: str, folder: Path) -> Check:
    good = os.access(folder, os.W_OK)
    return _check(
        "ok" if good else "failed", name, f"{folder} {'can' if good else 'cannot'} be written"
    )


def _check(status: str, name: str, detail: str) -> Check:
    return {"status": status, "name": name, "detail": detail}
