"""What GPT-2's float8 head costs in loss: training curves of both heads on a GPU.

    python benchmarks/float8_head.py [--steps 1000] [--seeds 3] [--batch 16] [--size small]
                                     [--data auto] [--out FILE] [--svg FILE]

For each seed both heads see the same samples in the same order, from the same weights, in bf16 and
compiled as one: only the head's three products differ. The plain head is trained twice. A GPU does
not add up in the same order each time, so the second run differs from the first, and that is
chance. The held-out loss at the end is computed in bf16 for all. Prints the loss over the last
tenth of the steps, the held-out loss, and how far they are from the first plain run's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from itertools import product
from pathlib import Path
from typing import Any

import torch

from shardlab import config as configs
from shardlab.launch import environment
from shardlab.launch.ranks import Ranks
from shardlab.report.charts import line, ticks
from shardlab.training import builders, loop
from shardlab.training.evaluate import Evaluation

RUNS = {"plain": "plain", "float8": "float8", "plain again": "plain"}  # the head of each
COLOURS = {"plain": "#06a", "float8": "#c40", "plain again": "#6ad"}
POINTS = 50  # of a curve


def train(world: Any, values: dict[str, Any]) -> dict[str, Any]:
    """On a rank: means of the losses over equal stretches, the last tenth's, and the held-out."""
    config = configs.from_dict(values)
    torch._dynamo.reset()
    workload = builders.build_workload(config)
    strategy = builders.build_strategy(config, workload, world)
    losses = []
    for microbatches in loop.Batches(workload, config, world):
        losses.append(strategy.gradients(microbatches).detach())
        strategy.step()
    found = torch.stack(losses).float()  # read from the GPU once, at the end
    assert workload.evaluate is not None
    evaluate = builders.in_precision(workload.evaluate, config.precision.compute)
    evaluation = Evaluation(strategy, workload, world, evaluate, config.training.global_batch)
    return {
        "curve": [round(float(part.mean()), 4) for part in found.chunk(POINTS)],
        "final_loss": float(found[-max(1, len(found) // 10) :].mean()),
        "held_out_loss": evaluation()["loss"],
        "data": workload.data,
    }


def describe(world: Any) -> dict[str, Any]:
    return environment.describe(world.device, " ".join(["python", *sys.argv]))


def drawing(result: dict[str, Any]) -> str:
    """The losses of all runs, and what they are from the first plain run's of the same seed."""
    runs = {kind: [one["curve"] for one in found] for kind, found in result["runs"].items()}
    apart = {
        kind: [
            [a - b for a, b in zip(mine, plain, strict=True)]
            for mine, plain in zip(found, runs["plain"], strict=True)
        ]
        for kind, found in runs.items()
        if kind != "plain"
    }
    parts = []
    panels = {"loss": runs, "loss less that of the plain head": apart}
    for column, (title, kinds) in enumerate(panels.items()):
        values = [value for curves in kinds.values() for curve in curves for value in curve]
        low, high = min(0.0, *values), max(values)
        parts.append(f'<g transform="translate({60 + 330 * column} 30) scale(2.6 2)">')
        parts.append('<rect width="100" height="100" fill="none" stroke="#999" stroke-width=".5"/>')
        parts.append(f'<text x="50" y="-4" class="middle">{title}</text>')
        for tick in ticks(0, result["steps"], 5):
            parts.append(f'<text x="{tick.at:.2f}" y="107" class="middle">{tick.text}</text>')
        for tick in ticks(low, high):
            parts.append(f'<text x="-2" y="{102 - tick.at:.2f}" class="end">{tick.text}</text>')
        for kind, curves in kinds.items():
            for seed, curve in enumerate(curves):
                path = line(
                    (100 * (i + 0.5) / len(curve), 100 - 100 * (value - low) / (high - low))
                    for i, value in enumerate(curve)
                )
                shape = f'd="{path}" fill="none" stroke="{COLOURS[kind]}" stroke-width=".5"'
                parts.append(f"<path {shape}><title>{kind}, seed {seed}</title></path>")
        parts.append("</g>")
    for row, (kind, colour) in enumerate(COLOURS.items()):
        parts.append(f'<text x="230" y="{50 + 14 * row}" style="fill:{colour}">{kind}</text>')
    style = "text{font:11px sans-serif}g text{font-size:5px;fill:#777}"
    style += ".middle{text-anchor:middle}.end{text-anchor:end}"
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="690" height="250"><style>{style}</style>\n'
        f"{body}\n</svg>\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--size", default="small")
    parser.add_argument("--data", default="auto")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--svg", type=Path)
    arguments = parser.parse_args()
    common = configs.load(
        None,
        {
            "model.size": arguments.size,
            "data.source": arguments.data,
            "strategy.name": "single",
            "precision.compute": "bf16",
            "training.compile": "model",
            "training.global_batch": arguments.batch,
            "training.steps": arguments.steps,
            "training.optimizer": "adamw",
            "training.learning_rate": 6e-4,
            "training.weight_decay": 0.1,
            "training.clip_norm": 1.0,
            "training.schedule": "cosine",
            "training.warmup_steps": arguments.steps // 10,
            "training.min_rate": 0.1,
            "launch.world": 1,
            "launch.device": "cuda",
        },
    )
    runs: dict[str, list[dict[str, Any]]] = {kind: [] for kind in RUNS}
    with Ranks(common.launch, 1) as ranks:
        result = {"env": ranks.run(describe)[0], "steps": arguments.steps, "runs": runs}
        result["config"] = common.to_dict()
        for seed in range(arguments.seeds):
            for kind, found in runs.items():
                overrides = {"training.seed": seed, "model.options": {"head": RUNS[kind]}}
                config = common.with_overrides(overrides)
                found.append(ranks.run(train, config.to_dict())[0])
                losses = f"loss {found[-1]['final_loss']:.4f}  held out "
                losses += f"{found[-1]['held_out_loss']:.4f}"
                print(f"seed {seed}  {kind:11}  {losses}", flush=True)
            if arguments.out:  # a run that is ended early leaves what it has
                arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for key, kind in product(("final_loss", "held_out_loss"), RUNS):
        pairs = zip(runs[kind], runs["plain"], strict=True)
        apart = [mine[key] - plain[key] for mine, plain in pairs]
        print(f"{key}, {kind} less plain: {statistics.mean(apart):+.4f}, by seed", end="")
        print("".join(f" {value:+.4f}" for value in apart))
    if arguments.svg:
        arguments.svg.write_text(drawing(result), encoding="utf-8")


if __name__ == "__main__":
    main()
