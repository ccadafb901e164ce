"""What this machine can run, and why not the rest: each line is something that was tried."""

from __future__ import annotations

import os
import platform
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardlab.config import LaunchConfig
from shardlab.data import sources
from shardlab.errors import RankFailure, UsageError
from shardlab.launch import launcher_env
from shardlab.launch.ranks import Ranks

if TYPE_CHECKING:
    from shardlab.world import World

Row = tuple[str, str, str]  # status, name, detail


def examine() -> list[dict[str, str]]:
    """status: ok; missing (not here, and what that rules out); failed (should work, does not)."""
    folder = Path.cwd()
    is_writable = os.access(folder, os.W_OK)
    rows: list[Row] = [
        ("ok", "python", platform.python_version()),
        ("ok", "run folders", f"{folder} can be written")
        if is_writable
        else ("failed", "run folders", f"{folder} cannot be written"),
    ]
    rows.append(_place_row())
    try:
        rows.append(("ok", "text", f"{sources.stdlib_shard()} (the embedded data)"))
    except (UsageError, OSError) as error:
        rows.append(("missing", "text", str(error)))
    try:
        with Ranks(LaunchConfig(device="cpu"), 2) as ranks:
            facts = ranks.run(f"{__name__}:look", deadline_s=60)[0]
    except (RankFailure, UsageError) as error:
        rows.append(("failed", "gloo", f"2 ranks on the CPU could not work: {error}"))
    else:
        took = f"a 4 MiB all_reduce took {facts['all_reduce_ms']:.1f} ms"
        rows += [
            ("ok", "torch", facts["torch"]),
            ("ok", "CPU", f"{facts['cores']} cores, {facts['memory_bytes'] / 2**30:.0f} GiB"),
            ("ok", "gloo", f"2 ranks on the CPU: {took}"),
            *_gpu_rows(facts["gpus"], facts["nccl"]),
        ]
    return [{"status": status, "name": name, "detail": detail} for status, name, detail in rows]


def _place_row() -> Row:
    """Which launcher has started this, and what it says about where we are."""
    try:
        place = launcher_env.resolve(os.environ)
    except UsageError as error:
        return "failed", "place", str(error)
    if place is None:
        if tasks := launcher_env.tasks_without_srun(os.environ):
            text = f"in a Slurm job of {tasks} tasks, not started by srun: ranks start here"
            return "ok", "place", text
        return "ok", "place", "no launcher (torchrun, srun, mpirun): ranks start here"
    node = f"node {'?' if place.node is None else place.node} of {place.nodes}"
    where = f"rank 0 at {place.address or '?'}, port {place.port}"
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "chosen by the backend")
    text = (
        f"{place.launcher}: rank {place.rank} of {place.size}, local rank {place.local_rank} "
        f"of {place.local_size}, {node}; {where}; interface: {interface}"
    )
    return "ok", "place", text


def look(world: World) -> dict[str, Any]:
    """Runs on a rank: what torch sees, and how long a collective takes."""
    import torch
    import torch.distributed as dist

    from shardlab import comm
    from shardlab.launch import environment

    tensor = torch.ones(1 << 20)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        comm.all_reduce(tensor, world.group)
        times.append((time.perf_counter() - start) * 1e3)
    if float(tensor[0]) != 2.0**5:
        raise RuntimeError(f"all_reduce gave {float(tensor[0])}, not {2.0**5}")
    return {
        **environment.describe(world.device, ""),
        "nccl": dist.is_nccl_available(),
        "all_reduce_ms": statistics.median(times),
    }


def _gpu_rows(gpus: list[str], has_nccl: bool) -> list[Row]:
    if not gpus:
        return [
            ("missing", "GPU", "PyTorch sees none: everything runs on the CPU, over gloo"),
            ("missing", "nccl", "needs a GPU for each rank"),
        ]
    return [
        ("ok", "GPU", f"{len(gpus)}: {', '.join(gpus)}; more ranks can share them over gloo"),
        ("ok", "nccl", "a rank for each GPU")
        if has_nccl
        else ("missing", "nccl", "this PyTorch was built without it: use gloo"),
    ]
