"""Batches prepared ahead by a thread against batches made when they are asked for.

    python benchmarks/prefetch.py [--workload resnet_cifar10] [--set KEY=VALUE ...] [--out FILE]

One strategy in one set of ranks takes its batches from two loaders in turn, step by step, so that
a machine that slows down slows both. Counted is a step with the wait for its batch, as long as the
slowest rank took. Prints medians with p10–p90, of the wait as well, and the ratio with its 95%
bootstrap interval.
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

WARMUP = 4


def take_turns(world: Any, values: dict[str, Any], depth: int) -> dict[str, Any]:
    """Waits and whole steps in ms, of depth 0 ("plain") and ``depth`` ("ahead")."""
    import torch

    from shardlab import comm
    from shardlab.launch import environment
    from shardlab.ledger import LEDGER
    from shardlab.training import builders, loop

    config = configs.from_dict(values)
    workload = builders.build_workload(config)
    strategy = builders.build_strategy(config, workload, world)
    loaders = {
        kind: loop.Batches(workload, config.with_overrides({"data.prefetch": n}), world)
        for kind, n in (("plain", 0), ("ahead", depth))
    }
    waits: dict[str, list[float]] = {kind: [] for kind in loaders}
    wholes: dict[str, list[float]] = {kind: [] for kind in loaders}
    LEDGER.reset(full_steps=0)
    for i in range(config.training.steps):
        LEDGER.step = i
        for kind in ("plain", "ahead") if i % 2 else ("ahead", "plain"):
            comm.barrier(world.group)
            start = time.perf_counter()
            microbatches = next(loaders[kind])
            waited = time.perf_counter()
            strategy.gradients(microbatches)
            strategy.step()
            if world.device.type == "cuda":
                torch.cuda.synchronize(world.device)
            done = time.perf_counter()
            if i >= WARMUP:
                waits[kind].append((waited - start) * 1e3)
                wholes[kind].append((done - start) * 1e3)
    for running in loaders.values():
        running.close()
    env = environment.describe(world.device, " ".join(["python", *sys.argv]))
    return {"waits": _slowest(world, waits), "wholes": _slowest(world, wholes), "env": env}


def _slowest(world: Any, times: dict[str, list[float]]) -> dict[str, list[float]]:
    return {k: [max(r) for r in zip(*world.gather(t), strict=True)] for k, t in times.items()}


def summary(result: dict[str, Any]) -> dict[str, Any]:
    import numpy as np

    from shardlab.stats import spread

    plain, ahead = result["wholes"]["plain"], result["wholes"]["ahead"]
    draw = np.random.default_rng(0)
    medians = [np.median(draw.choice(t, (4000, len(t))), axis=1) for t in (plain, ahead)]
    low, high = np.percentile(medians[0] / medians[1], [2.5, 97.5])
    return {
        "step_ms": {kind: spread(times) for kind, times in result["wholes"].items()},
        "wait_ms": {kind: spread(times) for kind, times in result["waits"].items()},
        "speed_ratio": float(np.median(plain) / np.median(ahead)),
        "speed_ratio_95": [float(low), float(high)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--workload", default="gpt2")
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    given = dict(item.split("=", 1) for item in arguments.set)
    config = configs.load(
        None,
        {
            "model.workload": arguments.workload,
            "training.steps": WARMUP + arguments.steps,
            "launch.world": arguments.world,
            **{key: configs.parse_value(value) for key, value in given.items()},
        },
    )
    with Ranks(config.launch, arguments.world) as ranks:
        result = ranks.run(take_turns, config.to_dict(), arguments.depth)[0]
    row = {"workload": arguments.workload, "depth": arguments.depth, **summary(result)}
    for kind in ("plain", "ahead"):
        step, wait = row["step_ms"][kind], row["wait_ms"][kind]
        print(
            f"{kind:6} {step['median']:8.2f} ms/step ({step['p10']:.2f}–{step['p90']:.2f}), of it "
            f"waiting {wait['median']:.2f} ({wait['p10']:.2f}–{wait['p90']:.2f})"
        )
    low, high = row["speed_ratio_95"]
    print(f"ahead is {row['speed_ratio']:.3f} times as fast (95%: {low:.3f}–{high:.3f})")
    if arguments.out:
        arguments.out.write_text(json.dumps({**row, "env": result["env"]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
