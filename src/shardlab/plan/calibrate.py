"""What this machine's collectives cost: measured between two ranks, and kept.

Of each collective of Gloo and size: how long it takes, and how long it keeps the cores busy, which
the ranks' own work has to share with it. Alone, and with others under way: a thread that is awake
need not be woken. The tensors are as many as do not fit into a cache together, as in a step, where
each one is sent once.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from shardlab import files
from shardlab.config import LaunchConfig
from shardlab.data import sources
from shardlab.launch.ranks import Ranks
from shardlab.plan import gloo
from shardlab.plan.gloo import OPS, Gloo

if TYPE_CHECKING:
    from shardlab.world import World

SCHEMA = 2
SIZES = tuple(2**k for k in (8, 14, 17, 20, 22, 24))
POOL = 2**26  # bytes of all tensors of one size
MOST_TENSORS = 64
ROUNDS = 4  # over all points: what a small message takes changes from one second to the next
MOST_CALLS = 16  # in a round
ROUND_S = 0.05  # a round of slow calls has fewer
LAUNCHES = 3
LIMIT_S = 120.0
IN_FLIGHT = 8  # of those that are under way together


def this_machine() -> Gloo:
    """Gloo between two ranks of this machine: measured now, or kept from before."""
    path = sources.cache_folder() / "plan" / f"gloo-{_digest()}.json"
    points: list[dict[str, Any]] | None
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        points = kept["points"] if kept["schema"] == SCHEMA else None
    except (OSError, ValueError, KeyError, TypeError):
        points = None
    if points is None:
        points = []
        for _ in range(LAUNCHES):  # a process may be faster or slower than another all its life
            with Ranks(LaunchConfig(device="cpu"), 2) as ranks:
                points += ranks.run(f"{__name__}:on_rank", deadline_s=LIMIT_S)[0]
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_text(path, json.dumps({"schema": SCHEMA, "points": points}))
    near = gloo.measured(points)
    return Gloo(near, gloo.over_a_link(near))


def _digest() -> str:
    """Of what the prices depend on."""
    what = platform.node(), platform.release(), os.cpu_count(), version("torch"), SCHEMA
    return hashlib.sha256(repr(what).encode()).hexdigest()[:16]


def on_rank(world: World) -> list[dict[str, Any]]:
    """The points, by two ranks together: op, bytes, and seconds; one of each in every round."""
    points: list[dict[str, Any]] = []
    pools = {size: _pool(world, size) for size in SIZES}
    for i in range(1 + ROUNDS):
        found: list[dict[str, Any]] = []
        for size, pool in pools.items():
            for op in OPS:
                found.append({"op": op, "bytes": size, **_point(world, _call(world, op, pool))})
        if i:  # the first round opens connections, and wakes the machine
            points += found
    return points


Tensors = tuple[Any, Any, Any]  # the whole, another like it, and a shard of it


def _pool(world: World, size: int) -> list[Tensors]:
    import torch

    elements = max(1, size // 4 // world.size) * world.size
    count = max(2, min(MOST_TENSORS, POOL // (2 * size)))
    return [
        (torch.zeros(elements), torch.zeros(elements), torch.zeros(elements // world.size))
        for _ in range(count)
    ]


def _call(world: World, op: str, pool: Sequence[Tensors]) -> Callable[[int], list[Any]]:
    """PyTorch's own collectives on float32, as strategies call them through ``comm``."""
    import torch.distributed as dist

    group, ranks = world.group, world.size
    # Torch 2.13 has new names for two of them, and warns of the old ones.
    gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    scatter: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

    def call(i: int) -> list[Any]:
        whole, other, shard = pool[i % len(pool)]
        if op == "all_reduce":
            return [dist.all_reduce(whole, group=group, async_op=True)]
        if op == "broadcast":  # each rank is the source in its turn
            return [dist.broadcast(whole, group=group, group_src=i % ranks, async_op=True)]
        if op == "broadcasts":
            return [
                dist.broadcast(part, group=group, group_src=source, async_op=True)
                for source, part in enumerate(whole.view(ranks, -1))
            ]
        if op == "all_to_all":
            return [dist.all_to_all_single(other, whole, group=group, async_op=True)]
        if op == "all_gather":
            return [gather(whole, shard, group=group, async_op=True)]
        return [scatter(shard, whole, group=group, async_op=True)]

    return call


def _point(world: World, call: Callable[[int], list[Any]]) -> dict[str, float]:
    """Seconds of a call: of those that are waited for one by one, and of several at once."""
    import torch

    from shardlab import comm

    made = 0

    def timed(calls: int, at_once: int) -> tuple[float, float]:
        nonlocal made
        comm.barrier(world.group)
        busy, begin = time.process_time(), time.perf_counter()
        for _ in range(calls // at_once):
            works = []
            for _ in range(at_once):
                works += call(made)
                made += 1
            for work in works:
                work.wait()
        wall, host = time.perf_counter() - begin, time.process_time() - busy
        both = torch.tensor([wall, host / world.size], dtype=torch.float64)
        slowest = both[:1].clone()
        comm.all_reduce(slowest, world.group, op="max")
        comm.all_reduce(both, world.group)
        return float(slowest) / calls, float(both[1]) / calls

    calls = max(2, min(MOST_CALLS, int(ROUND_S / timed(2, 1)[0]) // 2 * 2))
    at_once = min(calls, IN_FLIGHT)
    wall, host = timed(calls, 1)
    queued_wall, queued_host = timed(calls // at_once * at_once, at_once)
    return {"wall_s": wall, "host_s": host,
            "queued_wall_s": queued_wall, "queued_host_s": queued_host}  # fmt: skip
