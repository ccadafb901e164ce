"""Bytes between two hosts, by their interface counters and by the ledger.

    python benchmarks/between_hosts.py [--out FILE]

Needs root: the hosts are network namespaces of this machine (`tests/support/hosts.py`),
with two ranks each.
Each strategy trains the same model of 8.4 million parameters under torchrun. After its first steps
every host reads what its interface has sent, before and after some steps, and compares it with what
its ranks' ledgers say that they send to the other node. What PyTorch's own strategies call without
the ledger is added by the formula of the same collectives (numbers.link_shares).
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

HOSTS, RANKS = 2, 2
WIDTH, BLOCKS = 1024, 8
WARMUP, STEPS = 2, 3
STRATEGIES = ["pytorch_ddp", "bucket_ddp_async", "zero3", "pytorch_hsdp"]
COUNTER = Path("/sys/class/net/eth0/statistics/tx_bytes")


def measure_here(name: str) -> dict[str, Any]:
    """On a rank: bytes per step that this host's interface has sent, and that should have been."""
    import torch
    import torch.distributed as dist
    from torch import nn

    import shardlab
    from shardlab.ledger import LEDGER

    def loss(model: nn.Module, batch: shardlab.Batch) -> torch.Tensor:
        result: torch.Tensor = (model(batch.inputs) - batch.targets).square().sum()
        return result

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)))
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    strategy = shardlab.strategy(
        name,
        model,
        lambda params: torch.optim.SGD(params, lr=1e-6),
        loss,
        blocks=[str(i) for i in range(BLOCKS)],
    )
    draw = torch.Generator().manual_seed(dist.get_rank())
    rows = torch.randn(4, WIDTH, generator=draw)
    losses = []

    def train(steps: int) -> None:
        for _ in range(steps):
            losses.append(float(strategy.gradients([shardlab.Batch(rows, rows.cos(), 4, 4)])))
            strategy.step()
        strategy.settle()

    def counted() -> tuple[int, int]:
        dist.barrier()
        time.sleep(0.2)  # until the last acknowledgement is sent
        found = int(COUNTER.read_text()), LEDGER.sent_between
        dist.barrier()
        return found

    train(WARMUP)
    before = counted()
    train(STEPS)
    after = counted()
    own = (after[1] - before[1]) / STEPS + called_by_pytorch(name, size)
    rank, world = dist.get_rank(), dist.get_world_size()
    by_rank: list[Any] = [None] * world
    dist.all_gather_object(by_rank, own)
    first = rank // RANKS * RANKS
    return {
        "strategy": name,
        "host": rank // RANKS,
        "gradient_bytes": size,
        "interface": (after[0] - before[0]) / STEPS,
        "ledger": sum(by_rank[first : first + RANKS]),
        "losses": losses,
    }


def called_by_pytorch(name: str, size: int) -> float:
    """Bytes that PyTorch's collectives make this rank send to the other host in a step."""
    import torch.distributed as dist

    from shardlab.wire import link_shares

    rank, nodes = dist.get_rank(), (0,) * RANKS + (1,) * RANKS
    if name == "pytorch_ddp":
        return size * link_shares("all_reduce", nodes, rank, ours=False)[1]
    if name == "pytorch_hsdp":  # it gathers and scatters inside the node
        return size / RANKS * link_shares("all_reduce", (0, 1), rank // RANKS, ours=False)[1]
    return 0.0


def on_rank(folder: Path) -> None:
    rank = int(os.environ["RANK"])
    found = [measure_here(name) for name in STRATEGIES]
    if rank % RANKS == 0:
        (folder / f"host{rank // RANKS}.json").write_text(json.dumps(found))


def measure(folder: Path, timeout: float = 300) -> list[dict[str, Any]]:
    """Make the hosts, run the strategies on them: a row for each strategy and host."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
    hosts: Any = importlib.import_module("hosts")
    with hosts.made(HOSTS) as made:
        done = made.torchrun(
            __file__, "--on-rank", str(folder), ranks=RANKS, timeout=timeout, cwd=folder
        )
    if any(process.returncode for process in done):
        raise RuntimeError("\n".join(process.stderr for process in done))
    by_host = [json.loads((folder / f"host{host}.json").read_text()) for host in range(HOSTS)]
    return [row for rows in zip(*by_host, strict=True) for row in rows]


def main() -> None:
    import tempfile

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write the record here")
    parser.add_argument("--on-rank", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.on_rank is not None:
        on_rank(given.on_rank)
        return

    import torch

    from shardlab.launch import environment

    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(folder))
    print(f"{'strategy':20} host  interface MB  ledger MB  off by")
    for row in rows:
        name, host = row["strategy"], row["host"]
        seen, told = row["interface"] / 1e6, row["ledger"] / 1e6
        print(f"{name:20} {host:>4}  {seen:12.2f} {told:10.2f}  {seen / told - 1:+.2%}")
    if given.out is not None:
        found = environment.describe(torch.device("cpu"), "python benchmarks/between_hosts.py")
        record = {"environment": found, "hosts": HOSTS, "ranks_per_host": RANKS, "rows": rows}
        given.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
