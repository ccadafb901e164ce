"""Our rungs against PyTorch's own: speed and peak memory, side by side on Gloo ranks.

    python benchmarks/ladder.py [--link 4gbit] [--pairs zero1,zero2] [--world 2] [--out FILE]

Both strategies of a pair live in the same ranks and take turns, step by step, on the same
batches of a GPT with 10.8 M parameters, so that a machine that slows down slows both. So does a
third, which computes and updates on each rank alone and sends nothing: no strategy that updates all
parameters can be faster. Prints the median step of each, the ratio of speeds with its 95% bootstrap
interval, and the peak of tensor memory. With --link (Linux, root) all of it runs in a private
network namespace whose loopback is limited to that rate: there, communication is slow but costs the
CPU little. With --unfused, Adam updates as PyTorch does by default on a CPU, in several passes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from shardlab import config as configs
from shardlab.launch.ranks import Ranks

PAIRS = {
    "bucket_ddp_async": ("pytorch_ddp", 1.00),
    "zero1": ("pytorch_zero1", 1.05),
    "zero2": ("pytorch_zero2", 1.05),
    "zero3": ("pytorch_zero3", 1.05),
}
WARMUP = 3


class Alone:
    """A rank that computes its share and updates all parameters by that, and sends nothing."""

    def __init__(self, config: Any, workload: Any) -> None:
        from shardlab.training import builders

        self.model, self.loss = workload.make_model(), workload.loss
        made = builders.make_optimizer(config.training, workload, self.model)
        self.optimizer = made(dict(self.model.named_parameters()))

    def gradients(self, microbatches: Any) -> Any:
        count = sum(batch.count for batch in microbatches)
        total = 0.0
        for batch in microbatches:
            loss = self.loss(self.model, batch)
            (loss / count).backward()
            total = total + loss.detach()
        return total / count

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def settle(self) -> None:
        """Nothing is under way."""


def take_turns(world: Any, ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """Step times, as long as the slowest rank took: {"ours": [...], "theirs": …, "alone": …}."""
    from shardlab import comm
    from shardlab.launch import environment
    from shardlab.ledger import LEDGER
    from shardlab.training import builders, loop

    settings = {"ours": configs.from_dict(ours), "theirs": configs.from_dict(theirs)}
    config = settings["ours"]
    workload = builders.build_workload(config)
    turns: dict[str, Any] = {
        kind: builders.build_strategy(c, workload, world) for kind, c in settings.items()
    }
    turns["alone"] = Alone(config, workload)
    times: dict[str, list[float]] = {kind: [] for kind in turns}
    losses: dict[str, float] = {}
    LEDGER.reset(full_steps=0)  # as in a comparison's timed steps: totals only
    for i, microbatches in enumerate(loop.Batches(workload, config, world)):
        LEDGER.step = i
        for kind in turns if i % 2 else reversed(turns):
            comm.barrier(world.group)
            start = time.perf_counter()
            losses[kind] = float(turns[kind].gradients(microbatches))
            turns[kind].step()
            turns[kind].settle()  # what a strategy leaves under way is its own to pay for
            if i >= WARMUP:
                times[kind].append((time.perf_counter() - start) * 1e3)
    slowest = {
        kind: [max(ranks) for ranks in zip(*world.gather(mine), strict=True)]
        for kind, mine in times.items()
    }
    env = environment.describe(world.device, " ".join(["python", *sys.argv]))
    return {"times": slowest, "losses": losses, "env": env}


def summary(result: dict[str, Any]) -> dict[str, Any]:
    from shardlab import stats

    ours, theirs = result["times"]["ours"], result["times"]["theirs"]
    return {
        "ours_ms": stats.spread(ours),
        "theirs_ms": stats.spread(theirs),
        "alone_ms": stats.spread(result["times"]["alone"]),
        "speed_ratio": stats.ratio([theirs], [ours]),
        "speed_ratio_95": list(stats.ratio_interval([theirs], [ours])),
        "losses": result["losses"],
    }


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    from shardlab.specs import parse_spec

    overrides = {
        "model.size": arguments.size,
        "data.seq_len": arguments.seq_len,
        "training.global_batch": arguments.global_batch,
        "training.steps": WARMUP + arguments.steps,
        "launch.world": arguments.world,
        **({"training.optimizer_options": {"fused": False}} if arguments.unfused else {}),
    }
    rows, env = [], None
    for name in arguments.pairs.split(","):
        ours_name, options = parse_spec(name)
        twin, target = PAIRS[ours_name]
        ours = configs.load(
            None, {**overrides, "strategy.name": ours_name, "strategy.options": options}
        )
        theirs = configs.load(None, {**overrides, "strategy.name": twin})
        with Ranks(ours.launch, arguments.world) as ranks:
            result = ranks.run(take_turns, ours.to_dict(), theirs.to_dict())[0]
            weigh = "shardlab.measure.compare:weigh_cell"
            peaks = [ranks.run(weigh, c)[0]["total"] for c in (ours, theirs)]
        env = env or result["env"]
        row = {"ours": name, "theirs": twin, "target": target, **summary(result)}
        row |= {"ours_peak_bytes": peaks[0], "theirs_peak_bytes": peaks[1]}
        rows.append(row)
        low, high = row["speed_ratio_95"]
        ms = [row[kind]["median"] for kind in ("ours_ms", "theirs_ms", "alone_ms")]
        print(
            f"{name:>24} {ms[0]:.1f} ms  {twin} {ms[1]:.1f} ms  alone {ms[2]:.1f} ms  "
            f"speed {row['speed_ratio']:.3f}x [{low:.3f}, {high:.3f}] target {target:.2f}  "
            f"peak {peaks[0] / 2**20:.1f} / {peaks[1] / 2**20:.1f} MiB",
            flush=True,
        )
    return {"link": arguments.link, "settings": overrides, "env": env, "pairs": rows}


def inside_a_slow_link(rate: str) -> None:
    """Run this command again in a network namespace whose loopback has that rate."""
    for tool in ("unshare", "ip", "tc"):
        if shutil.which(tool) is None:
            sys.exit(f"--link needs {tool} (packages util-linux and iproute2)")
    limit = f"tc qdisc add dev lo root tbf rate {rate} burst 1mb latency 100ms"
    script = f'ip link set lo up && {limit} && exec "$@"'
    os.environ["SHARDLAB_SLOW_LINK"] = rate
    os.execvp("unshare", ["unshare", "--net", "sh", "-c", script, "sh", sys.executable, *sys.argv])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", default=",".join(PAIRS), help="ours, comma-separated")
    parser.add_argument("--link", help="limit the loopback, e.g. 4gbit")
    parser.add_argument("--world", type=int, default=2, help="ranks")
    parser.add_argument("--size", default="midi")
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--global-batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--unfused", action="store_true", help="Adam as PyTorch's default")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.link and "SHARDLAB_SLOW_LINK" not in os.environ:
        inside_a_slow_link(arguments.link)
    result = run(arguments)
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
