"""How far is the memory that `shardlab memory` estimates from what is measured?

    python benchmarks/memory_estimate.py [--worlds 1,2,4] [--out FILE]

Every strategy, at each number of ranks, on GPT-2 mini and midi and on a narrow ResNet-18: the peak
of a step as estimated, without running it, beside the peak that was measured on real ranks.

    python benchmarks/memory_estimate.py --device cuda --workloads gpt2-small --batches 1,16,64

is for a machine with a GPU (ranks share it, over Gloo).

    python benchmarks/memory_estimate.py --mesh --worlds 2,4

does it for the strategies that cut the model, and for combinations of them, with four micro-batches
in a step: on GPT-2 tiny and mini with two blocks for each rank, and on a Llama of the tests.

    python benchmarks/memory_estimate.py --kernels --worlds 1

does it for models of one kind of layer each (kernel_models.py), whose CPU kernels take memory for
themselves.

    python benchmarks/memory_estimate.py --records benchmarks/records/h200-ladder-w*.json

does the same for a GPU that is not here: beside what a comparison has measured on one (GPT-2 small,
float32, 256 tokens), with the operators of this machine's CPU standing in for the GPU's.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import kernel_models

from shardlab import config as configs
from shardlab.launch.rank_set import RankSet
from shardlab.measure import estimate
from shardlab.naming import MESH_STRATEGIES, STRATEGIES

WORKLOADS: dict[str, dict[str, Any]] = {
    "gpt2-mini": {"model.size": "mini", "training.global_batch": 8},
    "gpt2-midi": {"model.size": "midi", "training.global_batch": 8},
    "resnet18w16": {
        "model.workload": "resnet_cifar10",
        "model.options.width": 16,
        "data.source": "synthetic",
    },
    "gpt2-small": {"model.size": "small", "data.source": "synthetic"},
    "gpt2-tiny": {"model.size": "tiny"},
    "llama": {"model.workload": "tests/models/people.py:llama"},
}
WORKLOADS |= {
    name: {"model.workload": f"{Path(__file__).parent / 'kernel_models.py'}:{name}"}
    for name in kernel_models.MODELS
}
ON_CPU = ["gpt2-mini", "gpt2-midi", "resnet18w16"]
ON_MESH = ["gpt2-tiny", "gpt2-mini", "llama"]
BATCH = {
    "gpt2-mini": 4, "gpt2-midi": 2, "resnet18w16": 16, "gpt2-small": 1, "gpt2-tiny": 4, "llama": 4,
    **dict.fromkeys(kernel_models.MODELS, 8),
}  # samples of a rank  # fmt: skip
# By the number of ranks. The first three of four share the data as well.
COMBINED = {
    2: ["pytorch_pipeline:schedule=zero_bubble"],
    4: ["zero1:tensor=2", "zero3:tensor=2", "zero2:context=2", "zero1:tensor=2:pipeline=2",
        "zero2:context=2:pipeline=2", "pipeline_gpipe:pipeline=2",
        "pytorch_tensor_parallel:tensor=2"],
}  # fmt: skip
COMMAND = " ".join(["python benchmarks/memory_estimate.py", *sys.argv[1:]])


def describe(world: Any) -> dict[str, Any]:
    from shardlab.launch import environment

    return environment.describe(world.device, COMMAND)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worlds", default="1,2,4")
    parser.add_argument("--workloads")
    parser.add_argument("--mesh", action="store_true", help="the strategies that cut the model")
    parser.add_argument("--kernels", action="store_true", help="models of one kind of layer")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--batches", help="samples of a rank, comma-separated")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--strategies")
    parser.add_argument("--records", type=Path, nargs="+", help="compare.json of a GPU")
    args = parser.parse_args()
    if args.records:
        found = [row for path in args.records for row in of_record(path)]
        conclude(found, {"records": [path.name for path in args.records]}, args.out)
        return
    found = []
    env: dict[str, Any] = {}
    for world in map(int, args.worlds.split(",")):
        with RankSet(configs.LaunchConfig(device=args.device), world, estimate.LIMIT_S) as ranks:
            env = env or ranks.run(describe)[0] | {"command": COMMAND}  # as typed

            def measure(
                config: configs.Config, longest: Sequence[int], ranks: RankSet = ranks
            ) -> dict[str, Any]:
                target = f"{estimate.__name__}:weigh"
                weights: dict[str, Any] = ranks.run(target, config, longest)[0]
                return weights

            names = list(STRATEGIES)
            if args.mesh:
                names = [*MESH_STRATEGIES, *COMBINED.get(world, ())]
            if args.kernels:
                names = ["single" if world == 1 else "simple_ddp"]
            if args.strategies:
                names = args.strategies.split(",")
            names = [name for name in names if name != "single" or world == 1]
            for workload, batch in cases(args):
                config = configs.load(
                    None,
                    {
                        **WORKLOADS[workload],
                        "launch.device": args.device,
                        "precision.compute": args.precision,
                        **(on_mesh(workload, world) if args.mesh else {}),
                    },
                )
                rows = estimate.rows_of(config, names, world, batch)
                result = estimate.estimate(rows, args.device, None, COMMAND, measure)
                for row in result["rows"]:
                    found.append({"workload": workload, "precision": args.precision, **row})
                    tell(found[-1])
                conclude(found, {"env": env}, args.out)  # cut short, it leaves what it has


def on_mesh(workload: str, world: int) -> dict[str, Any]:
    """Micro-batches for a pipeline, blocks for those that give each rank two stages, and a head of
    attention for each rank."""
    shape = {"model.options.layers": 2 * world}
    if world > 2:
        shape["model.options.heads"] = world
    parts = {"training.global_batch": 8, "training.micro_batch": 2}
    return {**parts, **(shape if workload.startswith("gpt2") else {})}


def cases(args: argparse.Namespace) -> Iterator[tuple[str, int]]:
    names = ON_MESH if args.mesh else [*kernel_models.MODELS] if args.kernels else ON_CPU
    if args.workloads:
        names = args.workloads.split(",")
    for workload in names:
        for batch in map(int, args.batches.split(",")) if args.batches else [BATCH[workload]]:
            yield workload, batch


def of_record(path: Path) -> Iterator[dict[str, Any]]:
    """Each cell of a comparison on a GPU, estimated here."""
    result = json.loads(path.read_text())
    model, data = result["config"]["model"], result["config"]["data"]
    config = configs.load(
        None,
        {
            "model.workload": model["workload"],
            "model.size": model["size"],
            "data.source": "synthetic",
            "data.seq_len": data["seq_len"],
            "precision.compute": result["config"]["precision"]["compute"],
            "launch.backend": result["env"]["backend"],
        },
    )
    for cell in result["cells"]:
        times = cell["accumulate"]
        config = config.with_overrides({"training.global_batch": times}).in_parts(times)
        batch = result["global_batch"] // (cell["world"] * cell["accumulate"])
        rows = estimate.rows_of(config, [cell["strategy"]], cell["world"], batch)
        (row,) = estimate.estimate(rows, "cuda", None, COMMAND)["rows"]
        row["measured_step_bytes"] = cell["peak_bytes"]
        row["error"] = estimate.errors(row["step_bytes"], cell["peak_bytes"])
        row |= {"workload": path.stem}
        tell(row)
        yield row


def conclude(found: list[dict[str, Any]], about: dict[str, Any], out: Path | None) -> None:
    possible = [row for row in found if row["status"] != "skipped"]
    errors = [abs(row["error"]["total"]) for row in possible if row["error"]]
    worst = max(errors, default=float("nan"))
    within = sum(error <= 0.05 for error in errors)
    print(f"{within} of {len(possible)} within 5%; largest error {worst:.1%}")
    if out:
        record = {**about, "within_5_percent": within, "of": len(possible),
                  "largest_error": worst, "rows": found}  # fmt: skip
        out.write_text(json.dumps(record, indent=1) + "\n")


def tell(row: dict[str, Any]) -> None:
    place = f"{row['workload']:12} {row['label']:34} world {row['world']} batch {row['batch']}"
    if row["error"] is None:
        print(place, row["reason"] or row["unmeasured"], flush=True)
        return
    terms = " ".join(f"{k[:5]} {v:+.1%}" for k, v in row["error"].items() if abs(v) >= 0.001)
    mib = row["step_bytes"]["total"] / 2**20, row["measured_step_bytes"]["total"] / 2**20
    print(f"{place}  {mib[0]:8.2f} {mib[1]:8.2f} MiB  {terms}", flush=True)


if __name__ == "__main__":
    main()
