"""What a delay does to Gloo's collectives between two ranks, over 1 Gbit/s, with 0 and 5 ms.

    python benchmarks/gloo_delay.py [--out FILE]

Needs root: the ranks are in network namespaces (`tests/support/hosts.py`).
Each collective begins 0.1 s after
the one before, with both ranks there, as in a step. "sockets" are plain ones, which send half of
the bytes each way at once, as an all-to-all between two ranks does. The planner's rules for links
with a delay (src/shardlab/plan/gloo.py) were read from these times.
"""

from __future__ import annotations

import argparse
import importlib
import json
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

RATE, DELAYS_S = "1gbit", (0.0, 0.005)
SIZES_MIB = 1, 4, 8, 16, 24
REPEATS = 7
PORT = 29600


def on_rank(out: Path, first: str) -> None:
    """``first``: the address of rank 0's host."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank, found = dist.get_rank(), []
    peer = connection(rank, first)
    for mib in SIZES_MIB:
        whole, other = torch.zeros(mib * 2**18), torch.zeros(mib * 2**18)

        kinds: dict[str, Callable[[], Any]] = {
            "all_reduce": partial(dist.all_reduce, whole),
            "all_to_all": partial(dist.all_to_all_single, other, whole),
            "broadcasts": partial(broadcasts, whole),
            "sockets": partial(both_ways, peer, mib * 2**19),
        }
        for op, call in kinds.items():
            times = []
            for _ in range(REPEATS):
                time.sleep(0.1)
                dist.barrier()
                begin = time.perf_counter()
                call()
                times.append((time.perf_counter() - begin) * 1e3)
            found.append({"op": op, "mib": mib, "ms": statistics.median(times), "all_ms": times})
    if rank == 0:
        out.write_text(json.dumps(found))
    dist.barrier()


def broadcasts(whole: Any) -> None:
    """A gather of ours: each rank broadcasts its half."""
    import torch.distributed as dist

    halves = enumerate(whole.view(2, -1))
    for work in [dist.broadcast(half, src, async_op=True) for src, half in halves]:
        work.wait()


def connection(rank: int, first: str) -> socket.socket:
    if rank == 0:
        with socket.create_server((first, PORT)) as server:
            server.settimeout(60)
            return server.accept()[0]
    for _ in range(600):
        try:
            return socket.create_connection((first, PORT), timeout=60)
        except OSError:
            time.sleep(0.1)
    raise TimeoutError(f"nobody listens at {first}:{PORT}")


def both_ways(peer: socket.socket, size: int) -> None:
    sender = threading.Thread(target=peer.sendall, args=(bytes(size),))
    sender.start()
    while size:
        size -= len(peer.recv(min(size, 2**20)))
    sender.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--on-rank", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.on_rank is not None:
        on_rank(given.out, given.on_rank)
        return
    import torch

    from shardlab.launch import environment

    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
    hosts: Any = importlib.import_module("hosts")
    rows: list[dict[str, Any]] = []
    for delay_s in DELAYS_S:
        with (
            tempfile.TemporaryDirectory() as name,
            hosts.made(2, rate=RATE, delay_s=delay_s) as made,
        ):
            out = Path(name) / "found.json"
            words = [str(Path(__file__).resolve()), "--on-rank", made.address(0), "--out", str(out)]
            for done in made.torchrun(*words, timeout=300, cwd=Path(name)):
                if done.returncode:
                    raise RuntimeError(done.stderr)
            rows += [{"delay_ms": delay_s * 1e3, **row} for row in json.loads(out.read_text())]
    print("ms, median: without and with a delay of 5 ms")
    for op in dict.fromkeys(row["op"] for row in rows):
        for mib in SIZES_MIB:
            without, delayed = (r["ms"] for r in rows if (r["op"], r["mib"]) == (op, mib))
            print(f"{op:12}{mib:4} MiB {without:8.1f} {delayed:8.1f} {delayed - without:+7.1f}")
    if given.out is not None:
        command = "python benchmarks/gloo_delay.py"
        found = environment.describe(torch.device("cpu"), command)
        record = {"command": command, "environment": found, "rows": rows}
        given.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
