"""What a trace costs: recorded steps beside unrecorded ones of the same run, by option.

    python benchmarks/capture_cost.py [--out FILE]

Windows of three recorded steps alternate with three that are left alone, so that a machine that
slows down slows both. Prints for each option the medians, their ratio with the quartiles of the
single windows' ratios, bytes per step, and how well the size was estimated before; and what a
step outside the windows pays for the capture being there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from shardlab import config as configs
from shardlab.launch.ranks import Ranks

OPTIONS = ("none", "shapes", "memory", "stacks")
WINDOWS = 16


def measure(world: Any, config: configs.Config) -> dict[str, Any]:
    from shardlab.training import run as running

    result = running.train_rank(world, config, "benchmark")
    rows = Path(result["folder"]) / f"rank{world.rank}.jsonl"
    return {**result, "rows": [json.loads(line) for line in rows.read_text().splitlines()]}


def describe(world: Any) -> dict[str, Any]:
    from shardlab.launch import environment

    return environment.describe(world.device, "python benchmarks/capture_cost.py")


def outside(_world: Any) -> float:
    """Microseconds of a boundary between two steps outside the windows."""
    from shardlab.trace.capture import Capture

    capture: Any = SimpleNamespace(
        profile=configs.ProfileConfig(enabled=True), _step=None, _profiler=None
    )
    times = []
    for _ in range(20):
        start = time.perf_counter()
        for step in range(100, 10_100):
            Capture.boundary(capture, step)
        times.append((time.perf_counter() - start) / 10_000 * 1e6)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--strategy", default="pytorch_ddp")
    parser.add_argument("--size", default="tiny", help="of gpt2; the smaller, the more it costs")
    args = parser.parse_args()
    results: dict[str, Any] = {
        "windows": WINDOWS,
        "strategy": args.strategy,
        "size": args.size,
        "options": {},
    }
    with (
        Ranks(configs.LaunchConfig(device="cpu"), 2) as ranks,
        tempfile.TemporaryDirectory() as tmp,
    ):
        results["env"] = ranks.run(describe)[0]
        for option in OPTIONS:
            values = {
                "model.size": args.size,
                "launch.world": 2,
                "strategy.name": args.strategy,
                "training.steps": 7 * WINDOWS,
                "profile.enabled": True,
                "profile.wait": 3,
                "profile.repeat": WINDOWS,
                "output.dir": f"{tmp}/{option}",
            }
            if option != "none":
                values[f"profile.{option}"] = True
            config = configs.load(None, values)
            both = ranks.run(measure, config)
            results["options"][option] = summary(both)
            print(option, json.dumps(results["options"][option]))
        results["outside_us_per_step"] = ranks.run(outside)[0]
    print(f"outside the windows: {results['outside_us_per_step']:.2f} µs a step")
    if args.out:
        args.out.write_text(json.dumps(results, indent=1) + "\n")


def summary(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """A step is as long as its slowest rank took. The first window is warm-up."""
    steps = zip(*([row["step_ms"] for row in rank["rows"]] for rank in ranks), strict=True)
    slowest = [max(times) for times in steps]
    plain, recorded, ratios = [], [], []
    for begin in range(7, len(slowest), 7):
        window = slowest[begin : begin + 7]
        left, right = window[:3], window[4:]  # three left alone, a warm-up, three recorded
        plain += left
        recorded += right
        ratios.append(statistics.median(right) / statistics.median(left))
    traces = ranks[0]["traces"]
    quartiles = statistics.quantiles(ratios, n=4)
    return {
        "plain_ms": statistics.median(plain),
        "recorded_ms": statistics.median(recorded),
        "ratio": statistics.median(ratios),
        "ratio_quartiles": [quartiles[0], quartiles[2]],
        "bytes_per_step_and_rank": traces["bytes"] / (2 * 3 * WINDOWS),
        "estimated_over_real": traces["estimated_bytes"] / traces["bytes"],
    }


if __name__ == "__main__":
    main()
