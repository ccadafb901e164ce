"""context_parallel on two ranks beside one process: time of a step and peak memory, by length.

    python benchmarks/ring_attention.py [--lengths 512 1024 2048 4096] [--rounds 5] [--out FILE]

A GPT-2 of two layers takes a step with one sequence, in turn: one process with one thread, one
process with as many threads as there are ranks (the same cores), and the ranks of
``context_parallel`` with one thread each. A step is as long as the slowest rank took. The peak is
of one rank and without the model: what a step takes beyond the memory that was in use before it,
which is activations, gradients and buffers. Prints medians, and how many times as fast the ranks
were as each.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from shardlab import config as configs
from shardlab.launch.ranks import Ranks

SHAPE = {"layers": 2, "heads": 4, "dim": 128, "vocab": 256}
WARMUP = 1
KINDS = ("one thread", "same cores", "context_parallel")


def take_turns(world: Any, length: int, rounds: int) -> dict[str, Any]:
    """The seconds of each step and the peak of bytes, for one process and for the ring."""
    import torch

    from shardlab import comm
    from shardlab.launch import environment
    from shardlab.ledger import LEDGER
    from shardlab.measure import memory
    from shardlab.training import builders, loop

    def built(strategy: str, of: Any) -> tuple[Any, Any]:
        config = configs.load(
            None,
            {
                "model.workload": "gpt2",
                "model.options": {**SHAPE, "context": length},
                "data.source": "synthetic",
                "strategy.name": strategy,
                "training.global_batch": 1,
                "training.steps": 1,
                "launch.world": of.size,
            },
        )
        workload = builders.build_workload(config)
        made = builders.build_strategy(config, workload, of)
        (microbatches,) = loop.Batches(workload, config, of)
        return made, microbatches

    alone = world.first(1)
    ring = built("context_parallel", world)
    one = None if alone is None else built("single", alone)
    LEDGER.reset(full_steps=0)

    def step(of: tuple[Any, Any]) -> None:
        strategy, microbatches = of
        strategy.gradients(microbatches)
        strategy.step()

    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for i in range(WARMUP + rounds):
        LEDGER.step = i
        for kind in KINDS:
            comm.barrier(world.group)
            torch.set_num_threads(world.size if kind == "same cores" else 1)
            start = time.perf_counter()
            if kind == "context_parallel":
                step(ring)
            elif one is not None:
                step(one)
            taken = max(world.gather(time.perf_counter() - start if _runs(kind, one) else 0.0))
            if i >= WARMUP:
                seconds[kind].append(taken)
    torch.set_num_threads(1)
    peak = {"context_parallel": memory.peak_bytes(world.device, lambda: step(ring))[1]}
    if one is not None:
        peak["one thread"] = memory.peak_bytes(world.device, lambda: step(one))[1]
    env = environment.describe(world.device, " ".join(["python", *sys.argv]))
    return {"seconds": seconds, "peak_bytes": peak, "env": env}


def _runs(kind: str, one: Any) -> bool:
    return kind == "context_parallel" or one is not None


def summary(length: int, results: list[dict[str, Any]]) -> dict[str, Any]:
    from shardlab.stats import spread

    seconds = results[0]["seconds"]
    times = {kind: spread([1e3 * t for t in seconds[kind]]) for kind in KINDS}
    ring = times["context_parallel"]["median"]
    return {
        "length": length,
        "step_ms": times,
        "times_as_fast": {kind: times[kind]["median"] / ring for kind in KINDS[:2]},
        "peak_bytes": {
            "one process": results[0]["peak_bytes"]["one thread"],
            "context_parallel": max(r["peak_bytes"]["context_parallel"] for r in results),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows, env = [], {}
    launch = configs.load(None, {"launch.world": arguments.world, "launch.device": "cpu"}).launch
    with Ranks(launch, arguments.world) as ranks:
        for length in arguments.lengths:
            results = ranks.run(take_turns, length, arguments.rounds)
            env = results[0]["env"]
            row = summary(length, results)
            rows.append(row)
            ms, fast, peak = row["step_ms"], row["times_as_fast"], row["peak_bytes"]
            print(
                f"{length:6,} tokens: "
                + ", ".join(f"{kind} {ms[kind]['median']:.0f} ms" for kind in KINDS)
                + f" ({fast['one thread']:.2f}x, {fast['same cores']:.2f}x); peak "
                f"{peak['one process'] / 2**20:.1f} and "
                f"{peak['context_parallel'] / 2**20:.1f} MiB"
            )
    if arguments.out:
        found = {"shape": SHAPE, "world": arguments.world, "rows": rows, "env": env}
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
