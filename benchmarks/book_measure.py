"""What ``book.py measure`` runs. Each part gets an empty folder and returns plain data."""

from __future__ import annotations

import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import book_timeline as timeline

ROOT = Path(__file__).parent.parent
LINK = "4gbit"

TRACED = ("single", "simple_ddp", "simple_ddp_ga", "simple_ddp_hook", "simple_ddp_async",
          "bucket_ddp_async", "zero1", "zero2", "zero3", "pytorch_ddp",
          "pytorch_zero3")  # fmt: skip
TRACE = "train --size mini --seq-len 64 --global-batch 4 --steps 9 --profile --set profile.active=6"
SABOTEURS = ("NoAveraging", "AveragesWeights", "ReducesOnlyTheLast", "NoBroadcast",
             "NoBufferBroadcast", "MeanOfMeans", "ReadsAnothersData", "BucketTooEarly",
             "NobodyWaits", "EveryMicrobatch", "ShardOffByOne", "ForgetsToGather",
             "WholeOptimizer", "FreesAtTheEnd", "GathersEverything", "Leaks", "SendsEachTime",
             "HookEachTime", "SendsLate", "LosesTheEdge")  # fmt: skip
# Commands with what they print: the arguments, and the exit code that they should have.
OUTPUTS = {
    "hang": (
        "train --strategy bucket_ddp_async --size tiny --steps 8 --set guard.hang_s=4 "
        "--inject hang:rank=1,step=4,where=data",
        1,
    ),
    "dropped": (
        "train --strategy simple_ddp_ga --size tiny --steps 8 "
        "--inject drop-collective:rank=1,step=2",
        1,
    ),
    "killed": (
        "train --strategy zero1 --size tiny --steps 8 --checkpoint-every 2 --max-restarts 1 "
        "--inject kill:rank=1,step=5",
        0,
    ),
}
MEMORY = "memory --size small --seq-len 1024 --micro-batch 1 --world 8"
FITS = (
    "memory --size medium --seq-len 1024 --micro-batch 1 --world 8 "
    "--strategies simple_ddp_ga,zero1,zero2,zero3"
)
SIZES = (1 << 10, 1 << 14, 1 << 18, 1 << 22, 1 << 26)
SPLIT = (1, 4, 16, 64, 256)
REPEATS = 40


def environment() -> dict[str, str]:
    tests = os.pathsep.join(
        [*(str(ROOT / "tests" / room) for room in ("support", "bugs", "proof")), str(ROOT)]
    )
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": tests, "COLUMNS": "100"}


def shardlab(
    arguments: str,
    link: str | None = None,
    codes: tuple[int, ...] = (0,),
    with_errors: bool = False,
) -> str:
    """What a command printed. With a link: over a loopback of that rate."""
    command = [sys.executable, "-m", "shardlab", *shlex.split(arguments)]
    if link:
        limit = f"tc qdisc add dev lo root tbf rate {link} burst 1mb latency 100ms"
        script = f'ip link set lo up && {limit} && exec "$@"'
        command = ["unshare", "--net", "sh", "-c", script, "sh", *command]
    print(f"  shardlab {arguments}", flush=True)
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if with_errors else subprocess.PIPE,
        text=True,
    )
    if done.returncode not in codes:
        sys.exit(f"shardlab {arguments}: exit code {done.returncode}\n{done.stderr or done.stdout}")
    return done.stdout


# ------------------------------------------------------------------ the parts


def traces(scratch: Path) -> Any:
    """One step of each strategy; every strategy under the same link."""
    from shardlab import trace

    found = {}
    for name in TRACED:
        world = 1 if name == "single" else 2
        shardlab(f"{TRACE} --strategy {name} --world {world} --out {scratch / name}", link=LINK)
        found[name] = timeline.take(trace.load(scratch / name))
    return found


def planted(scratch: Path) -> Any:
    """What ``prove`` says of each planted bug: the messages of the checks that fail."""
    names = [f"saboteurs:{name}" for name in SABOTEURS]
    shardlab(f"prove --strategies {','.join(names)} --out {scratch / 'proof'}", codes=(1,))
    proof = json.loads((scratch / "proof" / "prove.json").read_text(encoding="utf-8"))
    return {
        verdict["strategy"].partition(":")[2]: {
            check: found["message"]
            for check, found in verdict["checks"].items()
            if found["pass"] is False
        }
        for verdict in proof["verdicts"]
    }


def outputs(scratch: Path) -> Any:
    """Commands with what they print, as a reader will see it; without the ranks' stacks."""
    found = {}
    for key, (command, code) in OUTPUTS.items():
        text = shardlab(f"{command} --out {scratch / key}", codes=(code,), with_errors=True)
        lines = text.replace(str(scratch / key), f"runs/{key}").splitlines()
        kept = [line.rstrip() for line in lines if not line.startswith("  ")]
        found[key] = {"command": f"shardlab {command} --out runs/{key}", "text": "\n".join(kept)}
    return found


def memory(_scratch: Path) -> Any:
    return json.loads(shardlab(f"{MEMORY} --json"))


def fits(_scratch: Path) -> Any:
    return json.loads(shardlab(f"{FITS} --json"))


def precision(scratch: Path) -> Any:
    """The same training, computed in each of the formats."""
    found = {}
    for name in ("fp32", "bf16", "fp16"):
        shardlab(f"train --size tiny --steps 100 --precision {name} --quiet --out {scratch / name}")
        text = (scratch / name / "rank0.jsonl").read_text(encoding="utf-8")
        losses = [json.loads(line)["loss"] for line in text.splitlines()]
        found[name] = {"loss": statistics.mean(losses[-10:]), "first": losses[0]}
    return found


def all_reduce(_scratch: Path) -> Any:
    """How long messages of each size take, and one large message beside many small ones."""
    from shardlab.config import LaunchConfig
    from shardlab.launch.ranks import Ranks

    sizes: list[dict[str, Any]] = [{"bytes": size} for size in SIZES]
    split: list[dict[str, Any]] = []
    for world in (2, 4):
        with Ranks(LaunchConfig(), world) as ranks:
            times = ranks.run(time_messages, SIZES, [1] * len(SIZES))[0]
            for row, ms in zip(sizes, times, strict=True):
                row[f"ms_{world}"] = ms
            if world == 2:
                total = 1 << 22
                times = ranks.run(time_messages, [total // n for n in SPLIT], SPLIT)[0]
                split = [
                    {"bytes": total, "messages": n, "ms": ms}
                    for n, ms in zip(SPLIT, times, strict=True)
                ]
    alpha, large = sizes[0]["ms_2"], sizes[-1]
    per_ms = large["bytes"] / (large["ms_2"] - alpha)
    return {
        "sizes": sizes,
        "split": split,
        "alpha_ms": alpha,
        "gb_per_s": per_ms / 1e6,
        "half_bytes": alpha * per_ms,  # of this size, latency and transfer cost the same
    }


def time_messages(world: Any, sizes: list[int], counts: list[int]) -> list[float]:
    """On each rank: the time of an all-reduce, or of several one after the other, in ms.

    The fastest of many: other work on the machine only ever adds.
    """
    import torch

    from shardlab import comm

    fastest = []
    for size, count in zip(sizes, counts, strict=True):
        tensors = [torch.ones(size // 4) for _ in range(count)]
        times = []
        for _ in range(REPEATS):
            comm.barrier(world.group)
            start = time.perf_counter()
            for tensor in tensors:
                comm.all_reduce(tensor, world.group)
            times.append((time.perf_counter() - start) * 1e3)
        fastest.append(min(times))
    return fastest


def wire(_scratch: Path) -> Any:
    """Bytes that all ranks together put on the wire for each collective, counted by the kernel.

    In a network namespace of its own, where nobody else uses the loopback.
    """
    command = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    command += [sys.executable, str(ROOT / "benchmarks" / "book.py"), "count-wire"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"counting bytes failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def count_wire() -> list[dict[str, Any]]:
    from shardlab.config import LaunchConfig
    from shardlab.launch.ranks import Ranks
    from shardlab.wire import wire_bytes

    names = {
        "all_reduce": "all_reduce",
        "reduce_scatter": "reduce_scatter",
        "Gloo's own reduce_scatter": "reduce_scatter",
        "all_gather": "all_gather",
        "broadcast": "broadcast",
    }
    rows: list[dict[str, Any]] = [{"op": name} for name in names]
    for world in (2, 4):
        with Ranks(LaunchConfig(), world) as ranks:
            for row in rows:
                row[f"times_{world}"] = ranks.run(bytes_of, row["op"])[0]
                row[f"best_{world}"] = world * wire_bytes(names[row["op"]], 1, world)
    return rows


def bytes_of(world: Any, name: str) -> float:
    """On each rank: what the loopback carried for one collective on 16 MiB, in units of that."""
    import torch
    import torch.distributed as dist

    from shardlab import comm

    size = 1 << 24
    tensor, shard = torch.ones(size // 4), torch.ones(size // 4 // world.size)

    def once() -> None:
        if name == "all_reduce":
            comm.all_reduce(tensor, world.group)
        elif name == "broadcast":
            comm.broadcast(tensor, world.group)
        elif name == "all_gather":
            comm.all_gather(tensor, shard, world.group)
        elif name == "reduce_scatter":
            comm.reduce_scatter(shard, tensor, world.group)
        else:
            scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
            scatter(shard, tensor, group=world.group)

    once()  # connections are made in the first
    comm.barrier(world.group)
    time.sleep(0.2)
    before = carried()
    comm.barrier(world.group)
    once()
    comm.barrier(world.group)
    time.sleep(0.2)
    after = carried()
    comm.barrier(world.group)
    return (after - before) / size


def carried() -> int:
    """Bytes that the loopback has sent so far."""
    for line in Path("/proc/net/dev").read_text(encoding="utf-8").splitlines():
        name, _, fields = line.partition(":")
        if name.strip() == "lo":
            return int(fields.split()[8])
    raise OSError("no loopback")


PARTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "traces": (traces, f"shardlab {TRACE} --strategy NAME, over a link of {LINK}"),
    "planted": (planted, "shardlab prove --strategies saboteurs:NAME,... (in tests/)"),
    "outputs": (outputs, "the commands that are shown with them"),
    "memory": (memory, f"shardlab {MEMORY}"),
    "fits": (fits, f"shardlab {FITS}"),
    "precision": (precision, "shardlab train --size tiny --steps 100 --precision NAME"),
    "all_reduce": (all_reduce, "python benchmarks/book.py measure all_reduce"),
    "wire": (wire, "python benchmarks/book.py measure wire"),
}
