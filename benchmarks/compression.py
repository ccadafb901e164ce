"""What compressed gradients cost in loss and save in bytes: GPT-2 tiny on real text, two ranks.

    python benchmarks/compression.py [--steps 300] [--seeds 3] [--optimizer adamw] [--out FILE]

Every setting sees the same samples in the same order, from the same weights, for each seed. The
loss is that of fresh text (no sample comes twice), averaged over the last tenth of the steps; the
difference to "none" is taken seed by seed. Bytes are those of the gradients' collectives in one
step, from the ledger; PyTorch calls its own from hooks, so they are not in it. "forgetful" is
PowerSGD without error feedback, "late" with the first ten steps exact. Nothing is timed: on one
machine bytes cost next to nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from shardlab import config as configs
from shardlab.run.ranks import Ranks

OURS, TWIN = "simple_ddp_ga", "pytorch_ddp"
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "none": (OURS, {"compress": "none"}),
    "fp16": (OURS, {"compress": "fp16"}),
    "bf16": (OURS, {"compress": "bf16"}),
    "powersgd rank 2": (OURS, {"compress": "powersgd", "powersgd_rank": 2}),
    "powersgd rank 4": (OURS, {"compress": "powersgd", "powersgd_rank": 4}),
    "powersgd rank 2, late": (OURS, {"compress": "powersgd", "powersgd_rank": 2}),
    "powersgd rank 2, forgetful": (OURS, {"compress": "powersgd", "powersgd_rank": 2}),
    "PyTorch's fp16": (TWIN, {"compress": "fp16"}),
    "PyTorch's powersgd rank 2": (TWIN, {"compress": "powersgd", "powersgd_rank": 2}),
    "PyTorch's powersgd rank 4": (TWIN, {"compress": "powersgd", "powersgd_rank": 4}),
}
LEARNING_RATES = {"adamw": 1e-3, "adam": 1e-3, "sgd": 0.1}
POINTS = 40  # of a loss curve


def train(world: Any, values: dict[str, Any], name: str) -> dict[str, Any]:
    """On a rank: the loss of each step, and the bytes that the last one's gradients took."""
    from shardlab import comm
    from shardlab.run import assemble, loop
    from shardlab.strategies.compress import Compressor

    config = configs.from_dict(values)
    workload = assemble.build_workload(config)
    strategy: Any = assemble.build_strategy(config, workload, world)
    losses, rows = [], []
    comm.LEDGER.reset()
    chosen = strategy.compressor if "late" in name else None
    for step, microbatches in enumerate(loop.Batches(workload, config, world)):
        if chosen is not None:
            strategy.compressor = chosen if step >= 10 else Compressor()
        losses.append(float(strategy.gradients(microbatches)))
        strategy.step()
        rows = comm.LEDGER.take()
        if "forgetful" in name:
            for unsent in strategy.compressor.unsent.values():
                unsent.zero_()
    sent = sum(row["bytes"] for row in rows if row["label"].startswith("grad "))
    return {"losses": losses, "gradient_bytes": sent or None}


def describe(world: Any, command: str) -> dict[str, Any]:
    from shardlab.run import environment

    return environment.describe(world.device, command)


def curve(losses: list[float]) -> list[float]:
    """Means over equal stretches of the run."""
    width = max(1, len(losses) // POINTS)
    return [round(statistics.mean(losses[i : i + width]), 4) for i in range(0, len(losses), width)]


def summarize(runs: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    finals: dict[str, list[float]] = {}
    for name, by_seed in runs.items():
        tails = [run["losses"][-max(1, len(run["losses"]) // 10) :] for run in by_seed]
        finals[name] = [statistics.mean(tail) for tail in tails]
    rows = []
    for name, by_seed in runs.items():
        differences = [a - b for a, b in zip(finals[name], finals["none"], strict=True)]
        rows.append(
            {
                "setting": name,
                "strategy": SETTINGS[name][0],
                "options": SETTINGS[name][1],
                "gradient_bytes_per_step": by_seed[0]["gradient_bytes"],
                "final_loss": statistics.mean(finals[name]),
                "difference": statistics.mean(differences),
                "difference_by_seed": differences,
                "curves_by_seed": [curve(run["losses"]) for run in by_seed],
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--optimizer", choices=list(LEARNING_RATES), default="adamw")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    common = configs.load(
        None,
        {
            "model.size": "tiny",
            "training.steps": arguments.steps,
            "training.optimizer": arguments.optimizer,
            "training.learning_rate": LEARNING_RATES[arguments.optimizer],
            "training.momentum": 0.9 if arguments.optimizer == "sgd" else 0.0,
            "training.schedule": "cosine",
            "training.warmup_steps": arguments.steps // 20,
            "training.min_rate": 0.1,
            "launch.world": 2,
            "launch.device": "cpu",
        },
    )
    command = f"python benchmarks/compression.py --steps {arguments.steps} --seeds "
    command += f"{arguments.seeds} --optimizer {arguments.optimizer}"
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in SETTINGS}
    with Ranks(common.launch, 2) as ranks:
        env = ranks.run(describe, command)[0]
        for seed in range(arguments.seeds):
            for name, (strategy, options) in SETTINGS.items():
                config = common.with_overrides(
                    {
                        "strategy.name": strategy,
                        "strategy.options": options,
                        "training.seed": seed,
                    }
                )
                runs[name].append(ranks.run(train, config.to_dict(), name)[0])
    rows = summarize(runs)
    print(f"{'':28} {'bytes/step':>10} {'loss':>7} {'difference':>11}  by seed")
    for row in rows:
        sent = row["gradient_bytes_per_step"]
        each = " ".join(f"{d:+.4f}" for d in row["difference_by_seed"])
        print(
            f"{row['setting']:28} {'-' if sent is None else sent:>10} {row['final_loss']:7.4f} "
            f"{row['difference']:+11.4f}  {each}"
        )
    if arguments.out:
        result = {"env": env, "config": common.to_dict(), "rows": rows}
        arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
