"""How far the planner is off on one GPU, at batch sizes that it was not calibrated with.

    python benchmarks/plan_gpu.py [--sizes small,medium,large] [--out FILE]
    python benchmarks/plan_gpu.py --by-datasheet benchmarks/records/plan-gpu-h200.json

GPT-2 in fp32 and bf16, eager and compiled by blocks. Three batch sizes of each are measured, and
others are predicted from them; then these are measured too. ``single`` has
no collectives, so what is measured is its step as it runs in training: `shardlab compare` gives the
same time.

With --by-datasheet (no GPU needed) the eager rows of a record are predicted as if the device had
never been measured, and compared with what was.
"""

from __future__ import annotations

import argparse
import bisect
import json
import statistics
import time
from collections.abc import Sequence
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


def config_of(size: str, precision: str, compiled: str, batch: int) -> Any:
    from shardlab import config as configs

    return configs.load(
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


def by_datasheet(record: Path, device: str = "h200") -> None:
    from shardlab.plan.predict import Predictor

    rows = json.loads(record.read_text(encoding="utf-8"))["rows"]
    errors, inside = [], []
    with Predictor() as predictor:
        for row in (row for row in rows if row["compile"] == "none"):
            config = config_of(row["size"], row["precision"], "none", row["batch"])
            found, measured = predictor.predict(config, device), row["measured_s"]
            errors.append(found.step_s / measured - 1)
            inside.append(found.low_s <= measured <= found.high_s)
            what = f"{row['size']:7}{row['precision']:5}{row['batch']:4}"
            times = f"predicted {found.step_s * 1e3:8.1f} ms  measured {measured * 1e3:8.1f} ms"
            print(f"{what}  {times}  {errors[-1]:+.1%}", flush=True)
    mean = statistics.mean(map(abs, errors))
    print(f"{len(errors)} points: mean {mean:.1%}, worst {max(map(abs, errors)):.1%}, "
          f"{statistics.mean(inside):.0%} inside the interval")  # fmt: skip


def step_of(size: str, precision: str, compiled: str, batch: int) -> Any:
    import torch

    from shardlab.plan import emulate
    from shardlab.training import builders

    config = config_of(size, precision, compiled, batch)
    build = builders.build_workload

    def on_the_gpu(config: Any) -> Any:
        """The same workload, whose model is filled with numbers where that is fast."""
        workload = build(config)

        def make() -> Any:
            with torch.device("cuda"):
                return workload.make_model()

        return replace(workload, make_model=make)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(builders, "build_workload", on_the_gpu))
        step = emulate.emulate(config, 0.4)
    torch.cuda.empty_cache()
    torch._dynamo.reset()  # each batch is compiled for itself, as in a run of its own
    return step


def at_batch(sizes: Sequence[int], seconds: Sequence[float], batch: int) -> float:
    """The time at another batch, from the times at ``sizes``.

    A device that is kept busy takes a fixed time and one for each sample: a straight line through
    the two nearest sizes. At small batches it may wait for the host instead, which takes as long
    for any batch: where the smallest lies above the line through the next two, its time is that of
    the host, and holds until the line reaches it.
    """

    def line(right: int, at: int) -> float:
        slope = (seconds[right] - seconds[right - 1]) / (sizes[right] - sizes[right - 1])
        return seconds[right] + slope * (at - sizes[right])

    right = min(max(1, bisect.bisect_left(sizes, batch)), len(sizes) - 1)
    if right == 1 and len(sizes) > 2 and line(2, sizes[0]) < seconds[0]:
        return max(seconds[0], line(2, batch))
    return max(0.0, line(right, batch))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", default="small,medium,large")
    parser.add_argument("--precisions", default="bf16,fp32")
    parser.add_argument("--compile", default="none,blocks")
    parser.add_argument("--limit-s", type=float, default=1e9, help="stop after so many seconds")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--by-datasheet", type=Path, metavar="RECORD")
    given = parser.parse_args()
    if given.by_datasheet is not None:
        by_datasheet(given.by_datasheet)
        return
    import torch

    from shardlab.launch import environment

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
        seconds = [sum(work.seconds or 0.0 for work in step.works()) for _, step in known]
        for batch in others:
            predicted = at_batch(first, seconds, batch)
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
