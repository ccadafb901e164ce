"""How far the planner is off on this machine, at points that it was not calibrated with.

    python benchmarks/plan_error.py [--rounds 4] [--only loop2,4gbit] [--out FILE] [--kept FILE]

Needs root: links are those of network namespaces (`tests/support/hosts.py`),
one rank on each, and all of
them share this machine's cores. Calibrated: what Gloo's collectives cost two ranks on one machine
and over 1 Gbit/s, and a rank's own work, which is emulated alone for every point. Held out: steps
of more ranks, over other links, at other batch sizes and sequence lengths. Steps are measured as
`shardlab compare` measures them.

The machine is slower for some minutes now and then, and a process may be slower than another for
all its life. So a round goes over everything once, with new processes: the calibration, the
emulations, and the steps of every condition. With `--kept` what was seen is kept after each round,
and what is there already is only predicted again.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
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
    "gpt-cut": ({**GPT, "data.seq_len": 128}, 8),
}
USUAL = ("gpt", "resnet", "own")
OTHERS = ("gpt-short", "resnet-24", "own-128")
FEW = ["bucket_ddp_async", "zero2", "zero3", "pytorch_ddp", "pytorch_zero3"]
SIMPLE = ["simple_ddp", "simple_ddp_ga", "simple_ddp_hook", "simple_ddp_async"]
ALL_STRATEGIES = [*FEW, *SIMPLE, "zero1", "pytorch_zero1", "pytorch_zero2"]
# Model-parallel ranks, with four micro-batches.
PIPELINES = [f"pipeline_{name}" for name in ("gpipe", "1f1b", "interleaved", "zero_bubble")]
CUT = ["tensor_parallel", "sequence_parallel", "context_parallel", "pytorch_tensor_parallel",
       *PIPELINES, "pytorch_pipeline"]  # fmt: skip
CUT_IN_TWO = ["pytorch_hsdp:shards=2", "zero1:tensor=2", "zero3:context=2"]
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
    "cut2": (2, None, 0.0, ("gpt-cut",)),
    "cut2-2gbit": (2, "2gbit", 0.0, ("gpt-cut",)),
    "cut4": (4, None, 0.0, ("gpt-cut",)),
}
CALIBRATED = ("loop2", "1gbit")
RATES = {"500mbit": 0.5e9 / 8, "1gbit": 1e9 / 8, "2gbit": 2e9 / 8, "4gbit": 4e9 / 8}
WARMUP, STEPS = 1, 3  # of a visit
Cell = tuple[str, str]  # shape and strategy


def config_of(shape: str, strategy: str, ranks: int) -> Any:
    from shardlab import config as configs
    from shardlab import specs

    settings, samples = SHAPES[shape]
    name, options = specs.parse_spec(strategy)
    more = {"strategy.name": name, "strategy.options": options, "launch.world": ranks}
    more |= {"training.steps": WARMUP + STEPS}
    config = configs.load(None, {**settings, **more, "training.global_batch": samples * ranks})
    return config.in_parts(4 if shape == "gpt-cut" else 1)


def cells(condition: str) -> list[Cell]:
    ranks, _, _, shapes = CONDITIONS[condition]
    if shapes == ("gpt-cut",):
        return [("gpt-cut", strategy) for strategy in (CUT if ranks == 2 else CUT_IN_TWO)]
    return [(s, t) for s in shapes for t in (ALL_STRATEGIES if s == shapes[0] else FEW)]


# ------------------------------------------------------------------ in the ranks


def on_rank(task: str, out: Path) -> None:
    """``task``: "calibrate", or the name of a condition."""
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
        found = []
        for shape, strategy in cells(task):
            config = config_of(shape, strategy, world.size)
            result = compare.time_cell(world, config, WARMUP)
            assert result is not None
            found.append([shape, strategy, statistics.median(result["slowest_ms"][WARMUP:])])
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
            sys.path.insert(0, str(ROOT / "tests" / "support"))
            hosts: Any = importlib.import_module("hosts")
            with hosts.made(ranks, rate=rate, delay_s=delay_s) as made:
                for done in made.torchrun(*words, timeout=1500, cwd=Path(folder)):
                    if done.returncode:
                        raise RuntimeError(done.stderr)
        return json.loads(out.read_text())


# ------------------------------------------------------------------ here


@dataclass
class Seen:
    """What the rounds so far have measured."""

    near: list[Any] = field(default_factory=list)  # points of the calibration, on one machine
    far: list[Any] = field(default_factory=list)  # over 1 Gbit/s
    keys: dict[str, dict[Cell, Any]] = field(default_factory=dict)  # of steps, by condition
    # Emulated: each time one of each stage.
    steps: dict[Any, list[Any]] = field(default_factory=lambda: defaultdict(list))
    times: dict[tuple[str, str, str], list[float]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def prices(self) -> Any:
        from shardlab.plan import gloo

        far = gloo.measured(self.far, RATES["1gbit"])
        return gloo.Gloo(gloo.measured(self.near), far)

    def here(self, condition: str) -> Any:
        from shardlab.launch import environment
        from shardlab.plan import predict

        ranks, rate, delay_s, _ = CONDITIONS[condition]
        cores = environment.usable_cores() / ranks
        return predict.MeasuredMachine(self.prices(), cores, RATES[rate] if rate else None, delay_s)


def one_round(seen: Seen, conditions: Sequence[str], number: int) -> None:
    from shardlab.launch import environment
    from shardlab.measure.estimate import Simulator
    from shardlab.plan import predict

    seen.near += run("calibrate", 2, None, 0.0)
    seen.far += run("calibrate", 2, "1gbit", 0.0)
    for condition in conditions:
        if condition not in seen.keys:
            seen.keys[condition] = keys_of(seen, condition)
        ranks, rate, delay_s, _ = CONDITIONS[condition]
        with ExitStack() as stack:
            cores = min(ranks, environment.usable_cores())
            beside = [stack.enter_context(Simulator()) for _ in range(cores)]
            for key in seen.keys[condition].values():
                if len(seen.steps[key]) <= number:  # another condition may have the same step
                    steps = predict.side_by_side(beside, config_of(*key[:3]), 1.0, key[3])
                    seen.steps[key].append(steps)
        for shape, strategy, ms in run(condition, ranks, rate, delay_s):
            seen.times[condition, shape, strategy].append(ms)


def keys_of(seen: Seen, condition: str) -> dict[Cell, Any]:
    """What the emulated steps of a condition depend on: shape, strategy, ranks, and for a strategy
    that measures its link, what it finds. (A rank with a link thinks that it has a machine for
    itself.)"""
    from shardlab.launch import environment
    from shardlab.plan import buckets

    ranks, rate, _, _ = CONDITIONS[condition]
    cores = environment.usable_cores() / (1 if rate else ranks)
    link = dataclasses.replace(seen.here(condition), cores=cores).link(ranks)
    return {
        (shape, strategy): (shape, strategy, ranks, link if strategy == buckets.MEASURES else None)
        for shape, strategy in cells(condition)
    }


def row_of(seen: Seen, here: Any, condition: str, cell: Cell) -> dict[str, Any]:
    from shardlab.plan import predict

    steps, times = seen.steps[seen.keys[condition][cell]], seen.times[(condition, *cell)]
    # Of each two emulations the faster one counts, for the other one may have been disturbed.
    pairs = [steps[i : i + 2] for i in range(0, len(steps), 2)]
    faster = [min(pair, key=lambda stages: sum(map(predict.own_work_s, stages))) for pair in pairs]
    found = [predict.on_this_machine(here, stages) for stages in faster]
    predicted, low, high = (
        1e3 * statistics.fmean(getattr(one, name) for one in found)
        for name in ("step_s", "low_s", "high_s")
    )
    ms = statistics.median(times)
    return {
        "condition": condition,
        "shape": cell[0],
        "strategy": cell[1],
        "ranks": CONDITIONS[condition][0],
        "predicted_ms": predicted,
        "measured_ms": ms,
        "rounds": times,
        "error": predicted / ms - 1,
        "inside": low <= ms <= high,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--only", default=",".join(CONDITIONS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--kept", type=Path)
    parser.add_argument("--on-rank", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.on_rank is not None:
        on_rank(given.on_rank, given.out)
        return
    import torch

    from shardlab.launch import environment

    conditions = given.only.split(",")
    begin, seen, done = time.monotonic(), Seen(), 0
    if given.kept is not None and given.kept.exists():
        done, seen = pickle.loads(given.kept.read_bytes())
    for number in range(done, given.rounds):
        one_round(seen, conditions, number)
        print(f"round {number + 1} of {given.rounds}, {time.monotonic() - begin:.0f} s", flush=True)
        if given.kept is not None:
            given.kept.write_bytes(pickle.dumps((number + 1, seen)))
    rows: list[dict[str, Any]] = []
    for condition in conditions:
        here = seen.here(condition)
        for cell in cells(condition):
            row = row_of(seen, here, condition, cell)
            rows.append(row)
            print(f"{condition:13}{cell[0]:10}{cell[1]:18}{row['predicted_ms']:8.1f} ms predicted "
                  f"{row['measured_ms']:8.1f} measured {row['error']:+.1%}")  # fmt: skip
    summary: dict[str, Any] = {
        name: summary_of([row for row in rows if (row["condition"] in CALIBRATED) == is_calibrated])
        for name, is_calibrated in (("calibrated", True), ("held_out", False))
    }
    summary["by_condition"] = {
        name: summary_of([row for row in rows if row["condition"] == name]) for name in conditions
    }
    for name, numbers in summary.items():
        print(name, numbers)
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
    repeats = [abs(one / other - 1) for row in rows for one, other in pairwise(row["rounds"])]
    return {
        "points": len(rows),
        "launches_differ": statistics.mean(repeats) if repeats else 0.0,
        "mean_error": statistics.mean(errors),
        "p95_error": errors[int(0.95 * (len(errors) - 1))],
        "inside_interval": statistics.mean(row["inside"] for row in rows),
        "order_right": right / total if total else 1.0,
    }


if __name__ == "__main__":
    main()
