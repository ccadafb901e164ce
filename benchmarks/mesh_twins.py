"""Our tensor and pipeline parallelism against PyTorch's own, side by side on 2 and 4 Gloo ranks.

    python benchmarks/mesh_twins.py [--ranks 2,4] [--pairs tensor_parallel] [--out FILE]

Both strategies of a pair live in the same ranks and take turns, step by step, on the same batches
of a GPT with 8 blocks, as in ladder.py. Prints the median step of each, the ratio of speeds with
its 95% bootstrap interval, and the peak of tensor memory on the fullest rank.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from ladder import WARMUP, summary, take_turns

from shardlab import config as configs
from shardlab.launch.ranks import Ranks
from shardlab.specs import parse_spec

PAIRS = {
    "tensor_parallel": "pytorch_tensor_parallel",
    "pipeline_gpipe": "pytorch_pipeline:schedule=gpipe",
    "pipeline_1f1b": "pytorch_pipeline:schedule=1f1b",
    "pipeline_interleaved": "pytorch_pipeline:schedule=interleaved",
    "pipeline_zero_bubble": "pytorch_pipeline:schedule=zero_bubble",
}
MICRO = 8  # micro-batches of a pipeline
MODEL = {"layers": 8, "heads": 8, "dim": 256, "context": 64, "vocab": 512}


def settings(spec: str, ranks: int, steps: int) -> configs.Config:
    name, options = parse_spec(spec)
    return configs.load(
        None,
        {
            "model.options": MODEL,
            "data.seq_len": MODEL["context"],
            "training.global_batch": MICRO,
            "training.steps": WARMUP + steps,
            "launch.world": ranks,
            "launch.device": "cpu",
            "strategy.name": name,
            "strategy.options": options,
        },
    ).in_parts(1 if "tensor" in name else MICRO)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    rows, env = [], None
    for size in (int(text) for text in arguments.ranks.split(",")):
        names = arguments.pairs.split(",")
        launch = settings(names[0], size, arguments.steps).launch
        with Ranks(launch, size) as ranks:
            for name in names:
                both = [settings(s, size, arguments.steps).to_dict() for s in (name, PAIRS[name])]
                result = ranks.run(take_turns, *both)[0]
                weigh = "shardlab.measure.compare:weigh_cell"
                peaks = [ranks.run(weigh, configs.from_dict(values))[0]["total"] for values in both]
                env = env or result["env"]
                row = {"ranks": size, "ours": name, "theirs": PAIRS[name], **summary(result)}
                row |= {"ours_peak_bytes": peaks[0], "theirs_peak_bytes": peaks[1]}
                rows.append(row)
                low, high = row["speed_ratio_95"]
                print(
                    f"{size} {name:>20} {row['ours_ms']['median']:6.0f} ms, theirs "
                    f"{row['theirs_ms']['median']:6.0f} ms: {row['speed_ratio']:.2f}x "
                    f"[{low:.2f}, {high:.2f}], peak {peaks[0] / 2**20:.1f} and "
                    f"{peaks[1] / 2**20:.1f} MiB",
                    flush=True,
                )
    return {"model": MODEL, "micro_batches": MICRO, "env": env, "pairs": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", default=",".join(PAIRS), help="ours, comma-separated")
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    result = run(arguments)
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
