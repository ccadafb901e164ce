"""How far the planner is off on this machine, at points that it was not calibrated with.

    python benchmarks/plan_error.py [--rounds 3] [--only loop2,4gbit] [--out FILE]

Needs root: links are those of network namespaces (tests/hosts.py), one rank on each, and all of
them share this machine's cores. Calibrated: what Gloo's collectives cost two ranks on one machine
and over 1 Gbit/s, and a rank's own work, which is emulated alone for every point. Held out: steps
of more ranks, over other links, at other batch sizes and sequence lengths. Every point is predicted
from the calibration, then measured as `shardlab compare` measures it.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
OWN = f"{ROOT / 'benchmarks' / 'plan_model.py'}:workload"
GPT = {"model.workload": "gpt2", "model.size": "mini"}
RESNET = {"model.workload": "resnet_cifar10", "model.options": {"width": 16}}
# Workloads with the samples of a rank.
SHAPES: dict[str, tuple[dict[str, Any], int]] = {
    "gpt": ({**GPT, "data.seq_len": 128}, 6),
    "gpt-short": ({**GPT, "data.seq_len": 64}, 16),
    "resnet": (RESNET, 32),
    "resnet-24": (RESNET, 24),
    "own": ({"model.workload": OWN}, 256),
    "own-128": ({"model.workload": OWN}, 128),
}
USUAL = ("gpt", "resnet", "own")
OTHERS = ("gpt-short", "resnet-24", "own-128")
FEW = ["bucket_ddp_async", "zero2", "zero3", "pytorch_ddp", "pytorch_zero3"]
SIMPLE = ["simple_ddp", "simple_ddp_ga", "simple_ddp_hook", "simple_ddp_async"]
ALL_STRATEGIES = [*FEW, *SIMPLE, "zero1", "pytorch_zero1", "pytorch_zero2"]
# Name: ranks, rate of the links, delay in seconds, shapes.
CONDITIONS: dict[str, tuple[int, str | None, float, tuple[str, ...]]] = {
    "loop2": (2, None, 0.0, USUAL),
    "1gbit": (2, "1gbit", 0.0, USUAL),
    "0.5gbit": (2, "500mbit", 0.0, USUAL),
    "2gbit": (2, "2gbit", 0.0, USUAL),
    "4gbit": (2, "4gbit", 0.0, USUAL),
    "1gbit+5ms": (2, "1gbit", 0.005, USUAL),
    "loop3": (3, None, 0.0, USUAL),
    "loop4": (4, None, 0.0, USUAL),
    "loop2-others": (2, None, 0.0, OTHERS),
}
CALIBRATED = ("loop2", "1gbit")
RATES = {"500mbit": 0.5e9 / 8, "1gbit": 1e9 / 8, "2gbit": 2e9 / 8, "4gbit": 4e9 / 8}
WARMUP, STEPS = 1, 3  # of a visit
LAUNCHES = 2  # of the ranks: a process may be slower than another for all its life


def config_of(shape: str, strategy: str, ranks: int) -> Any:
    from shardlab import config as configs

    settings, samples = SHAPES[shape]
    more = {"strategy.name": strategy, "launch.world": ranks, "training.steps": WARMUP + STEPS}
    return configs.load(None, {**settings, **more, "training.global_batch": samples * ranks})


def cells(condition: str) -> list[tuple[str, str]]:
    shapes = CONDITIONS[condition][3]
    return [(s, t) for s in shapes for t in (ALL_STRATEGIES if s == shapes[0] else FEW)]


# ------------------------------------------------------------------ in the ranks


def on_rank(task: str, out: Path) -> None:
    """``task``: "calibrate", or the name of a condition and how many rounds, as in "loop2 2"."""
    from shardlab import comm
    from shardlab import config as configs
    from shardlab import world as worlds
    from shardlab.measure import compare
    from shardlab.plan import calibrate

    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    rank, size, local_rank, local_size = (int(os.environ[name]) for name in names)
    launch = configs.load(None, {}).launch
    world: Any = worlds.join(launch, rank, size, local_rank, local_size)
    found: Any
    if task == "calibrate":
        found = calibrate.on_rank(world)
    else:
        condition, rounds = task.split()
        found = []
        for number in range(int(rounds)):
            for shape, strategy in cells(condition)[:: -1 if number % 2 else 1]:
                values = config_of(shape, strategy, world.size).to_dict()
                result = compare.time_cell(world, values, WARMUP)
                assert result is not None
                ms = statistics.median(result["slowest_ms"][WARMUP:])
                found.append([shape, strategy, ms])
    if world.rank == 0:
        out.write_text(json.dumps(found))
    comm.barrier(world.group)
    # PyTorch's threads are not taken down: after hundreds of strategies in one process that has
    # ended in an abort, once the result was there.
    os._exit(0)


def run(task: str, ranks: int, rate: str | None, delay_s: float) -> Any:
    """The task's result, from that many ranks."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        words = [str(Path(__file__).resolve()), "--on-rank", task, "--out", str(out)]
        if rate is None:
            launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            command = [*launcher, f"--nproc-per-node={ranks}", *words]
            variables = {**os.environ, "OMP_NUM_THREADS": "1"}
            subprocess.run(command, env=variables, check=True, cwd=folder, timeout=1500)
        else:
            sys.path.insert(0, str(ROOT / "tests"))
            hosts: Any = importlib.import_module("hosts")
            with hosts.made(ranks, rate=rate, delay_s=delay_s) as made:
                for done in made.torchrun(*words, timeout=1500, cwd=Path(folder)):
                    if done.returncode:
                        raise RuntimeError(done.stderr)
        return json.loads(out.read_text())


# ------------------------------------------------------------------ here


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default=",".join(CONDITIONS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--on-rank", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.on_rank is not None:
        on_rank(given.on_rank, given.out)
        return
    import torch

    from shardlab.measure.estimate import Simulator
    from shardlab.plan import buckets, gloo, predict
    from shardlab.run import environment

    begin = time.monotonic()
    near = [point for _ in range(2) for point in run("calibrate", 2, None, 0.0)]
    far = [point for _ in range(2) for point in run("calibrate", 2, "1gbit", 0.0)]
    prices = gloo.Gloo(gloo.measured(near), gloo.measured(far, RATES["1gbit"]))
    cores = environment.usable_cores()
    steps: dict[Any, list[Any]] = {}  # emulated; by shape, strategy, ranks, and link
    rows: list[dict[str, Any]] = []
    for condition in given.only.split(","):
        ranks, rate, delay_s, _ = CONDITIONS[condition]
        here = predict.Here(prices, cores / ranks, RATES[rate] if rate else None, delay_s)
        # A rank with a link thinks that it has a machine for itself.
        link = dataclasses.replace(here, cores=cores / (1 if rate else ranks)).link(ranks)
        asked = {}
        for shape, strategy in cells(condition):
            measures = link if strategy == buckets.MEASURES else None
            asked[shape, strategy] = shape, strategy, ranks, measures
        times: dict[tuple[str, str], list[float]] = defaultdict(list)
        # The machine is slower for some seconds now and then. So both are done twice, by turns, and
        # of the emulations the faster one counts.
        for _ in range(LAUNCHES):
            with ExitStack() as stack:
                beside = [stack.enter_context(Simulator()) for _ in range(min(ranks, cores))]
                for key in asked.values():
                    if len(steps.get(key, [])) < LAUNCHES:
                        config = config_of(*key[:3])
                        step = predict.side_by_side(beside, config, 1.0, key[3])
                        steps.setdefault(key, []).append(step)
            for shape, strategy, ms in run(f"{condition} {given.rounds}", ranks, rate, delay_s):
                times[shape, strategy].append(ms)
        for (shape, strategy), measured in times.items():
            emulated = min(
                steps[asked[shape, strategy]], key=lambda s: statistics.median(s.totals_s)
            )
            prediction = predict.on_this_machine(here, emulated)
            ms = statistics.median(measured)
            row = {"condition": condition, "shape": shape, "strategy": strategy, "ranks": ranks}
            row |= {"predicted_ms": prediction.step_s * 1e3, "measured_ms": ms, "rounds": measured}
            row |= {"error": prediction.step_s * 1e3 / ms - 1}
            row |= {"inside": prediction.low_s * 1e3 <= ms <= prediction.high_s * 1e3}
            rows.append(row)
            print(f"{condition:13}{shape:10}{strategy:18}{row['predicted_ms']:8.1f} ms predicted "
                  f"{ms:8.1f} measured {row['error']:+.1%}", flush=True)  # fmt: skip
    summary: dict[str, Any] = {
        name: summary_of([row for row in rows if (row["condition"] in CALIBRATED) == is_calibrated])
        for name, is_calibrated in (("calibrated", True), ("held_out", False))
    }
    summary["by_condition"] = {
        name: summary_of([row for row in rows if row["condition"] == name])
        for name in given.only.split(",")
    }
    for name, numbers in summary.items():
        print(name, numbers)
    print(f"{time.monotonic() - begin:.0f} s")
    if given.out is not None:
        command = f"python benchmarks/plan_error.py --rounds {given.rounds} --only {given.only}"
        found = environment.describe(torch.device("cpu"), command)
        record = {"command": command, "environment": found, "summary": summary, "rows": rows}
        given.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def summary_of(rows: list[dict[str, Any]]) -> dict[str, float]:
    if not rows:
        return {"points": 0}
    errors = sorted(abs(row["error"]) for row in rows)
    # Where two strategies differ by more than a tenth, is the faster one said to be?
    right = total = 0
    for one in rows:
        for other in rows:
            same = all(one[key] == other[key] for key in ("condition", "shape"))
            if same and one["measured_ms"] * 1.1 < other["measured_ms"]:
                total += 1
                right += one["predicted_ms"] < other["predicted_ms"]
    middle = len(rows[0]["rounds"]) // 2  # where the second launch begins
    repeats = [[statistics.median(half) for half in (r["rounds"][:middle], r["rounds"][middle:])]
               for r in rows]  # fmt: skip
    return {
        "points": len(rows),
        "launches_differ": statistics.mean(abs(one / other - 1) for one, other in repeats),
        "mean_error": statistics.mean(errors),
        "p95_error": errors[int(0.95 * (len(errors) - 1))],
        "inside_interval": statistics.mean(row["inside"] for row in rows),
        "order_right": right / total if total else 1.0,
    }


if __name__ == "__main__":
    main()
