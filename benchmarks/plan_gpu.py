"""How far the planner is off on one GPU, at batch sizes that it was not calibrated with.

    python benchmarks/plan_gpu.py [--sizes small,medium,large] [--out FILE]

GPT-2 in fp32 and bf16, eager and compiled by blocks. Three batch sizes of each are measured, and
others are predicted from them (plan.predict.at_batch); then these are measured too. ``single`` has
no collectives, so what is measured is its step as it runs in training: `shardlab compare` gives the
same time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

# Those that are measured first, and those that are predicted. In bf16 the smallest batches wait for
# the host, whose time is not the GPU's.
BATCHES = {
    ("small", "fp32"): ((2, 8, 32), (4, 20)),
    ("medium", "fp32"): ((1, 4, 16), (2, 10)),
    ("large", "fp32"): ((1, 3, 8), (2, 5)),
    ("small", "bf16"): ((8, 24, 64), (16, 40)),
    ("medium", "bf16"): ((4, 12, 32), (8, 20)),
    ("large", "bf16"): ((4, 8, 16), (6, 12)),
}


def step_of(size: str, precision: str, compiled: str, batch: int) -> Any:
    import torch

    from shardlab import config as configs
    from shardlab.plan import emulate
    from shardlab.run import assemble

    config = configs.load(
        None,
        {
            "model.workload": "gpt2",
            "model.size": size,
            "data.seq_len": 1024,
            "strategy.name": "single",
            "launch.world": 1,
            "training.global_batch": batch,
            "training.steps": 10,
            "training.compile": compiled,
            "precision.compute": precision,
        },
    )
    build = assemble.build_workload

    def on_the_gpu(config: Any) -> Any:
        """The same workload, whose model is filled with numbers where that is fast."""
        workload = build(config)

        def make() -> Any:
            with torch.device("cuda"):
                return workload.make_model()

        return replace(workload, make_model=make)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(assemble, "build_workload", on_the_gpu))
        step = emulate.emulate(config, 0.4)
    torch.cuda.empty_cache()
    torch._dynamo.reset()  # each batch is compiled for itself, as in a run of its own
    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", default="small,medium,large")
    parser.add_argument("--precisions", default="bf16,fp32")
    parser.add_argument("--compile", default="none,blocks")
    parser.add_argument("--limit-s", type=float, default=1e9, help="stop after so many seconds")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    import torch

    from shardlab.plan import predict
    from shardlab.run import environment

    begin = time.monotonic()
    rows: list[dict[str, Any]] = []
    plan = [
        (size, precision, compiled)
        for compiled in given.compile.split(",")
        for precision in given.precisions.split(",")
        for size in given.sizes.split(",")
    ]
    for size, precision, compiled in plan:
        if time.monotonic() - begin > given.limit_s:
            print(f"no time for {size} {precision} {compiled}")
            continue
        first, others = BATCHES[size, precision]
        known = [(batch, step_of(size, precision, compiled, batch)) for batch in first]
        for batch in others:
            predicted = sum(w.seconds or 0.0 for w in predict.at_batch(known, batch).works())
            measured = statistics.median(step_of(size, precision, compiled, batch).totals_s)
            error = predicted / measured - 1
            row = {"size": size, "precision": precision, "compile": compiled, "batch": batch}
            row |= {"calibrated": {b: statistics.median(s.totals_s) for b, s in known}}
            rows.append(row | {"predicted_s": predicted, "measured_s": measured, "error": error})
            what = f"{size:7}{precision:5}{compiled:7}{batch:4}"
            times = f"predicted {predicted * 1e3:8.1f} ms  measured {measured * 1e3:8.1f} ms"
            print(f"{what}  {times}  {error:+.1%}", flush=True)
    errors = [abs(row["error"]) for row in rows]
    summary = {"points": len(rows), "mean": statistics.mean(errors), "worst": max(errors)}
    print(f"{len(rows)} points: mean {summary['mean']:.1%}, worst {summary['worst']:.1%}")
    if given.out is not None:
        command = "python benchmarks/plan_gpu.py"
        found = environment.describe(torch.device("cuda"), command)
        record = {"command": command, "environment": found, "summary": summary, "rows": rows}
        given.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
