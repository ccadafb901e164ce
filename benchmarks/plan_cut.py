"""How far off `shardlab plan` is for model-parallel ranks: published runs of Megatron-LM.

    python benchmarks/plan_cut.py --runs runs.csv [--models megatron-22B,gpt3-175B] [--out FILE]

The runs (Korthikanti et al., table 5) are rows of a CSV file that is not part of the project. They
are GPTs on A100s with tensor and, but for the smallest, pipeline parallelism, with full or
selective recomputation. Each is predicted as a user would plan it: the lab's own GPT-2 of that
size, cut by the lab's own strategies, runs on tensors without content, and each operator has a
price. Selective recomputation repeats attention alone, as fused attention does by itself; so it is
predicted without checkpointing, with the sequence cut as well. Nothing is fitted to these runs.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import statistics
import time
from pathlib import Path
from typing import Any
from unittest import mock

from shardlab import config as configs
from shardlab.plan import predict

# Micro-batches of a pipeline that are simulated: enough for the time. A plan simulates as many as
# the peak of memory needs, which is not compared here.
MICRO = 3
SOURCE = "korthikanti-2022-tab5"


def read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return [row for row in csv.DictReader(file) if row["source"] == SOURCE]


def config_of(row: dict[str, str]) -> configs.Config:
    tp, pp, chunks = (
        int(row["tp"]),
        int(row["pp"]),
        re.search(r"interleaved (\d+)", row["strategy"]),
    )
    assert chunks is not None
    options: dict[str, Any] = {"tensor": tp, "sequence": "SP" in row["strategy"]}
    if pp > 1:
        options |= {"pipeline": pp}
        if int(chunks[1]) > 1:
            options |= {"schedule": "interleaved", "chunks": int(chunks[1])}
    batch, micro = int(row["global_batch"]), int(row["microbatch"])
    shape = {"layers": "layers", "heads": "heads", "dim": "hidden", "context": "seq"}
    return configs.load(
        None,
        {
            "model.options": {**{ours: int(row[key]) for ours, key in shape.items()},
                              "vocab": int(row["vocab"])},
            "data.source": "synthetic",
            "precision.compute": "bf16",  # an A100 is as fast in fp16
            "training.global_batch": batch,
            "training.micro_batch": micro,
            "training.activation_checkpointing": row["act_ckpt"] == "full",
            "training.steps": 3,
            "strategy.name": "zero1",
            "strategy.options": options,
            "launch.world": int(row["n_gpus"]),
        },
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--models", default="megatron-22B,gpt3-175B")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rows = [row for row in read(given.runs) if row["model"] in given.models.split(",")]
    found: list[dict[str, Any]] = []
    few = mock.patch.object(predict, "fewest_micro", lambda _name, _axes, micro: min(MICRO, micro))
    with few, predict.Predictor() as predictor:
        for row in rows:
            config, measured, begin = config_of(row), float(row["value"]), time.perf_counter()
            made = predictor.predict(config, "a100-80", "hdr")
            found.append({
                "model": row["model"], "recomputation": row["act_ckpt"],
                "strategy": config.strategy.label, "gpus": config.launch.world,
                "measured_s": measured, "predicted_s": made.step_s,
                "error": made.step_s / measured - 1,
                "inside": made.low_s <= measured <= made.high_s,
                "work_s": made.work_s, "exposed_s": made.wait_s, "bubble_s": made.bubble_s,
            })  # fmt: skip
            seconds = time.perf_counter() - begin
            print(f"{row['model']}, {row['act_ckpt']}: {made.step_s:.2f} s, measured {measured:.2f}"
                  f" ({found[-1]['error']:+.1%}), inside {found[-1]['inside']}; "
                  f"work {made.work_s:.2f}, exposed {made.wait_s:.2f}, bubble {made.bubble_s:.2f}; "
                  f"{seconds:.0f} s to simulate", flush=True)  # fmt: skip
            if given.out:
                report = {
                    "command": f"python benchmarks/plan_cut.py --runs runs.csv --models "
                    f"{given.models}",
                    "runs": found,
                    "mean_error": statistics.fmean(abs(one["error"]) for one in found),
                    "inside": sum(one["inside"] for one in found),
                }
                given.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
