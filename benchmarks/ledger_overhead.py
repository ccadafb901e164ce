"""What the ledger costs: steps with it and without, interleaved in one run of two ranks.

    python benchmarks/ledger_overhead.py [--out FILE]

"Without" calls torch.distributed directly, so the difference is all that ``shardlab.comm``
adds: the entry, its times, and the row that is written. Prints the median of each, the
ratio with its 95% interval, and how long the bookkeeping takes by itself.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from shardlab import config as configs
from shardlab.launch.ranks import Ranks

ROUNDS = 150


class _Done:
    def wait(self) -> None: ...


def measure(world: Any, values: dict[str, Any]) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    from shardlab import comm
    from shardlab.launch import environment
    from shardlab.ledger import LEDGER
    from shardlab.training import builders, loop

    config = configs.from_dict(values)
    workload = builders.build_workload(config)
    strategy = builders.build_strategy(config, workload, world)
    steps = loop.Batches(workload, config, world)
    counted = comm.all_reduce
    reductions = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}

    def bare(tensor: torch.Tensor, group: Any, *, op: str = "sum", **_: Any) -> Any:
        dist.all_reduce(tensor, reductions[op], group, async_op=True).wait()
        return _Done()

    times: dict[str, list[float]] = {"with": [], "without": []}
    for i, microbatches in enumerate(steps):
        kind = ("with", "without")[i % 2]
        comm.all_reduce = counted if kind == "with" else bare
        start = time.perf_counter()
        strategy.gradients(microbatches)
        strategy.step()
        for row in LEDGER.take():
            json.dumps(row)
        if i >= 6:
            times[kind].append((time.perf_counter() - start) * 1e3)

    # The bookkeeping alone: enter and finish entries of a collective that does nothing.
    calls = sum(1 for p in strategy.params.values()) + 3
    tensor = torch.zeros(1)
    start = time.perf_counter()
    for _ in range(1000):
        entry = LEDGER.open("all_reduce", tensor, world.group, "grad")
        entry.wait_ns = entry.done_ns = entry.ready_ns = time.perf_counter_ns()
    for row in LEDGER.take():
        json.dumps(row)
    each_us = (time.perf_counter() - start) * 1e3

    medians = {kind: statistics.median(t) for kind, t in times.items()}
    deciles = {kind: statistics.quantiles(t, n=10) for kind, t in times.items()}
    return {
        "env": environment.describe(world.device, "python benchmarks/ledger_overhead.py"),
        "collectives_per_step": calls,
        "step_ms": {
            k: {"median": medians[k], "p10": deciles[k][0], "p90": deciles[k][-1], "n": len(t)}
            for k, t in times.items()
        },
        "ratio": medians["with"] / medians["without"],
        "ratio_95": _interval(times["with"], times["without"]),
        "bookkeeping_us_per_collective": each_us,
        "bookkeeping_share_of_step": each_us * calls / 1e3 / medians["without"],
    }


def _interval(a: list[float], b: list[float]) -> list[float]:
    """95% bootstrap interval of the ratio of medians."""
    import numpy as np

    draw = np.random.default_rng(0)
    medians = [np.median(draw.choice(x, (2000, len(x))), axis=1) for x in (a, b)]
    return [float(q) for q in np.percentile(medians[0] / medians[1], [2.5, 97.5])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    config = configs.load(
        None, {"training.steps": 6 + 2 * ROUNDS, "strategy.name": "simple_ddp", "launch.world": 2}
    )
    with Ranks(config.launch, 2) as ranks:
        result = ranks.run(measure, config.to_dict())[0]
    print(json.dumps(result, indent=1))
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
