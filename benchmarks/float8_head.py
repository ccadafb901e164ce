"""What GPT-2's float8 head costs in loss: training curves of both heads on a GPU.

    python benchmarks/float8_head.py [--steps 1000] [--seeds 3] [--batch 16] [--size small]
                                     [--data auto] [--out FILE] [--svg FILE]

For each seed both heads see the same samples in the same order, from the same weights, in bf16 and
compiled as one: only the head's three products differ. The held-out loss at the end is computed in
bf16 for both. Prints the loss over the last tenth of the steps, the held-out loss, and how both
differ from the plain head's with the same seed; how far two seeds differ says what is chance.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from shardlab import config as configs
from shardlab.report.charts import line, ticks
from shardlab.run import assemble, environment, loop
from shardlab.run.evaluate import Evaluation
from shardlab.run.ranks import Ranks
from shardlab.workloads.gpt2 import HEADS

POINTS = 50  # of a curve


def train(world: Any, values: dict[str, Any]) -> dict[str, Any]:
    """On a rank: means of the losses over equal stretches, the last tenth's, and the held-out."""
    config = configs.from_dict(values)
    torch._dynamo.reset()
    workload = assemble.build_workload(config)
    strategy = assemble.build_strategy(config, workload, world)
    losses = []
    for microbatches in loop.Batches(workload, config, world):
        losses.append(strategy.gradients(microbatches).detach())
        strategy.step()
    found = torch.stack(losses).float()  # read from the GPU once, at the end
    assert workload.evaluate is not None
    evaluate = assemble.in_precision(workload.evaluate, config.precision.compute)
    evaluation = Evaluation(strategy, workload, world, evaluate, config.training.global_batch)
    return {
        "curve": [round(float(part.mean()), 4) for part in found.chunk(POINTS)],
        "final_loss": float(found[-max(1, len(found) // 10) :].mean()),
        "held_out_loss": evaluation()["loss"],
        "data": workload.data,
    }


def describe(world: Any) -> dict[str, Any]:
    return environment.describe(world.device, " ".join(["python", *sys.argv]))


def difference(runs: dict[str, list[dict[str, Any]]], key: str) -> list[float]:
    """The float8 head's less the plain one's, by seed."""
    both = zip(runs["float8"], runs["plain"], strict=True)
    return [ours[key] - plain[key] for ours, plain in both]


def drawing(result: dict[str, Any]) -> str:
    """The losses of both heads, and what they differ by for each seed."""
    runs, steps = result["runs"], result["steps"]
    curves = {
        f"{head}, seed {seed}": one["curve"]
        for head, found in runs.items()
        for seed, one in enumerate(found)
    }
    pairs = zip(runs["float8"], runs["plain"], strict=True)
    apart = {
        f"seed {seed}": [a - b for a, b in zip(ours["curve"], plain["curve"], strict=True)]
        for seed, (ours, plain) in enumerate(pairs)
    }
    parts = []
    panels = {"loss": curves, "loss with float8 less loss without": apart}
    for column, (title, lines) in enumerate(panels.items()):
        values = [value for found in lines.values() for value in found]
        low, high = min(0.0, *values), max(values)
        parts.append(f'<g transform="translate({60 + 330 * column} 30) scale(2.6 2)">')
        parts.append('<rect width="100" height="100" fill="none" stroke="#999" stroke-width=".5"/>')
        parts.append(f'<text x="50" y="-4" class="middle">{title}</text>')
        for tick in ticks(0, steps, 5):
            parts.append(f'<text x="{tick.at}" y="107" class="middle">{tick.text}</text>')
        for tick in ticks(low, high):
            parts.append(f'<text x="-2" y="{102 - tick.at}" class="end">{tick.text}</text>')
        for name, found in lines.items():
            path = line(
                (100 * (i + 0.5) / len(found), 100 - 100 * (value - low) / (high - low))
                for i, value in enumerate(found)
            )
            colour = "#c40" if name.startswith("float8") else "#06a"
            dash = ' stroke-dasharray="2 1"' if name.startswith("float8") else ""
            shape = f'd="{path}" fill="none" stroke="{colour}" stroke-width=".6"{dash}'
            parts.append(f"<path {shape}><title>{name}</title></path>")
        parts.append("</g>")
    for column, (colour, name) in enumerate((("#06a", "bf16 head"), ("#c40", "float8 head"))):
        parts.append(
            f'<text x="{180 + 70 * column}" y="50" class="key" fill="{colour}">{name}</text>'
        )
    style = "text{font:5px sans-serif;fill:#777}.middle{text-anchor:middle}.end{text-anchor:end}"
    style += ".key{font-size:11px;fill:inherit}"
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="690" height="270"><style>{style}</style>\n'
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
    runs: dict[str, list[dict[str, Any]]] = {head: [] for head in HEADS}
    with Ranks(common.launch, 1) as ranks:
        result = {"env": ranks.run(describe)[0], "config": common.to_dict(), "runs": runs}
        result["steps"] = arguments.steps
        for seed in range(arguments.seeds):
            for head, found in runs.items():
                overrides = {"training.seed": seed, "model.options": {"head": head}}
                config = common.with_overrides(overrides)
                found.append(ranks.run(train, config.to_dict())[0])
                last = found[-1]
                print(
                    f"seed {seed}  {head:6}  loss {last['final_loss']:.4f}  "
                    f"held out {last['held_out_loss']:.4f}",
                    flush=True,
                )
            if arguments.out:  # a run that is ended early leaves what it has
                arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for key in ("final_loss", "held_out_loss"):
        by_seed = difference(runs, key)
        between = [abs(a[key] - b[key]) for a, b in pairwise(runs["plain"])] or [float("nan")]
        print(
            f"{key}: float8 less plain {statistics.mean(by_seed):+.4f} "
            f"({min(by_seed):+.4f} to {max(by_seed):+.4f}); two seeds of the plain head differ by "
            f"{statistics.mean(between):.4f}"
        )
    if arguments.svg:
        arguments.svg.write_text(drawing(result), encoding="utf-8")


if __name__ == "__main__":
    main()
