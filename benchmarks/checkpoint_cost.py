"""What a checkpoint costs: ours, sharded and asynchronous, beside the usual ways, taking turns.

    python benchmarks/checkpoint_cost.py [--size midi] [--rounds 8] [--out FILE]

Two CPU ranks, FSDP2 (``pytorch_zero3``), after a step with AdamW. Each round does, in turn:

    ours           this project's checkpoint: each rank its shards, hashed, on the disk (fsync)
    asynchronous   the same with a thread; what is timed is how long the run waits
    dcp            PyTorch's distributed checkpoint with its own planner and storage (fsync)

Prints the median of each, and ours as a multiple of dcp with its 95% interval.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardlab import config as configs
from shardlab import stats
from shardlab.launch.ranks import Ranks


def measure(world: Any, values: dict[str, Any], folder: str, rounds: int) -> dict[str, Any]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    from shardlab.checkpoint.save import About, Checkpoints
    from shardlab.config import CheckpointConfig
    from shardlab.launch import environment
    from shardlab.training import builders, loop

    config = configs.from_dict(values)
    workload = builders.build_workload(config)
    strategy: Any = builders.build_strategy(config, workload, world)
    (microbatches,) = loop.Batches(workload, config, world)
    strategy.gradients(microbatches)
    strategy.step()
    where = Path(folder)
    about = About({}, config.strategy.name, None)
    ours = Checkpoints(where / "ours", CheckpointConfig(every=1), world, strategy, about)
    settings = CheckpointConfig(every=1, asynchronous=True)
    threaded = Checkpoints(where / "threaded", settings, world, strategy, about)
    number = 0

    def by_dcp() -> None:
        model, optimizer = get_state_dict(strategy.model, strategy.optimizer)
        state = {"model": model, "optimizer": optimizer}
        writer = dcp.FileSystemWriter(where / f"dcp-{number}")
        dcp.save(state, storage_writer=writer, process_group=world.group)

    kinds: dict[str, Callable[[], object]] = {
        "ours": lambda: ours.save(number, {}),
        "asynchronous": lambda: threaded.save(number, {}),
        "dcp": by_dcp,
    }
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(1, rounds + 2):
        for kind, save in kinds.items():
            world.gather(None)
            start = time.perf_counter()
            save()
            taken = time.perf_counter() - start
            threaded.wait()
            shutil.rmtree(where / f"dcp-{number - 1}", ignore_errors=True)
            if number > 1:  # the first round also pays for imports
                seconds[kind].append(max(world.gather(taken)))
    assert ours.last is not None
    against = {
        "dcp": {
            "ratio": stats.ratio([seconds["ours"]], [seconds["dcp"]]),
            "interval_95": stats.ratio_interval(
                [[s] for s in seconds["ours"]], [[s] for s in seconds["dcp"]], paired=True
            ),
        }
    }
    return {
        "env": environment.describe(world.device, "python benchmarks/checkpoint_cost.py"),
        "size": config.model.size,
        "bytes": ours.last.bytes,
        "seconds": {kind: stats.spread(times) for kind, times in seconds.items()},
        "ours_as_a_multiple_of": against,
        "run_waits_asynchronous_over_ours": stats.ratio(
            [seconds["asynchronous"]], [seconds["ours"]]
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", default="midi")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    config = configs.load(
        None,
        {
            "model.size": arguments.size,
            "data.source": "synthetic",
            "training.steps": 1,
            "strategy.name": "pytorch_zero3",
            "launch.world": 2,
            "launch.device": "cpu",
        },
    )
    with tempfile.TemporaryDirectory() as folder, Ranks(config.launch, 2) as ranks:
        result = ranks.run(measure, config.to_dict(), folder, arguments.rounds)[0]
    print(json.dumps(result, indent=1))
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
