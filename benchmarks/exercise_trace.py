"""The trace of the exercise ``read_trace``: two ranks, one of which gets its data late.

    python benchmarks/exercise_trace.py DIR

A small GPT under ``bucket_ddp_async``, recorded from its very first step, with rank 1's batches
40 ms late. Written: DIR/traces/rank<r>/… and DIR/ledger.rank<r>.jsonl, with the machine's name and
paths left out; then the table of where the time went, to see that it shows what it should.
"""

from __future__ import annotations

import argparse
import gzip
import json
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from shardlab import config as configs
from shardlab.launch.ranks import Ranks

STEPS, LATE_S = 4, 0.04
CONFIG = {
    "model": {
        "workload": "gpt2",
        "size": "mini",
        "options": {"layers": 2, "dim": 256, "heads": 4, "context": 64},
    },
    "data": {"source": "synthetic", "prefetch": 0},
    "training": {"steps": STEPS, "global_batch": 16},
    "strategy": {
        "name": "bucket_ddp_async",
        "options": {"bucket_mb": 2.0, "first_bucket_mb": 1.0},
    },
    "launch": {"world": 2, "device": "cpu"},
}


class FromTheStart(configs.ProfileConfig, frozen=True):
    """No warm-up is thrown away: it is in the trace, and to leave it out is the reader's task."""

    def part(self, step: int) -> str:
        return "active" if 0 <= step < STEPS else "none"


def record(world: Any, values: dict[str, Any], folder: str) -> None:
    from shardlab.ledger import LEDGER
    from shardlab.trace.capture import Capture
    from shardlab.training import builders, loop
    from shardlab.training.recorder import Recorder

    config = configs.from_dict(values)
    workload = builders.build_workload(config)
    LEDGER.reset(full_steps=STEPS)
    strategy = builders.build_strategy(config, workload, world)
    own = Path(folder)
    capture = Capture(
        FromTheStart(enabled=True), world, LEDGER, strategy, own, config.strategy.name
    )
    with Recorder(own, world, LEDGER, STEPS, capture) as recorder:
        batches = loop.Batches(workload, config, world)
        loop.train(strategy, _late(batches) if world.rank == 1 else batches, recorder, range(STEPS))


def _late(batches: Iterable[Any]) -> Iterator[Any]:
    for batch in batches:
        time.sleep(LATE_S)
        yield batch


def publish(source: Path, target: Path) -> None:
    """Small: without the numbers in operators' args and the arrows between them, which are half of
    the file and which no question is about; and without what is of this machine alone."""
    for path in sorted(source.glob("traces/*/*.json.gz")):
        trace = json.loads(gzip.decompress(path.read_bytes()))
        trace["traceName"] = path.name.removesuffix(".gz")
        trace["host_name"] = "lab"
        trace["shardlab"] |= {"host": "lab", "run": "read_trace"}
        trace.pop("deviceProperties", None)
        trace["traceEvents"] = [
            {k: v for k, v in event.items() if k != "args" or event["ph"] == "M"}
            for event in trace["traceEvents"]
            if event["ph"] in "XM"
        ]
        out = target / path.relative_to(source)
        out.parent.mkdir(parents=True, exist_ok=True)
        data = json.dumps(trace, separators=(",", ":")).encode()
        out.write_bytes(gzip.compress(data, 9, mtime=0))
    for path in sorted(source.glob("ledger.rank*.jsonl")):
        (target / path.name).write_bytes(path.read_bytes())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    target = parser.parse_args().folder
    config = configs.from_dict(CONFIG)
    with tempfile.TemporaryDirectory() as scratch:
        with Ranks(config.launch, 2) as ranks:
            ranks.run(record, config.to_dict(), scratch)
        publish(Path(scratch), target)
    from shardlab import trace

    for row in trace.load(target).breakdown():
        print(row)


if __name__ == "__main__":
    main()
