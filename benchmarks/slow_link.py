"""Time to a held-out loss at 100 Mbit/s between two hosts: workers beside pytorch_ddp.

    python benchmarks/slow_link.py [--rate 100mbit] [--seeds 5] [--out FILE]

Needs root: the hosts are network namespaces of this machine (`tests/support/hosts.py`),
with one rank each
and a link of that rate. They run `shardlab compare --to-loss` under torchrun: a GPT of 0.44 million
parameters on real text. The record is its to_loss.json with the link beside it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

STRATEGIES = (
    "pytorch_ddp,local_sgd:every=10,diloco:every=10,diloco:every=10:outer_momentum=0.5,"
    "streaming_diloco:every=10:outer_momentum=0.5"
)
COMPARE = [
    "compare", "--strategies", STRATEGIES, "--to-loss", "3.2", "--steps", "150",
    "--size", "tiny", "--set", "model.options.dim=128", "--global-batch", "16",
    "--set", "training.learning_rate=0.001", "--set", "training.evaluate_every=5",
    "--set", "training.evaluate_samples=64", "--out", "found",
]  # fmt: skip


def measure(rate: str, seeds: int, timeout: float = 600) -> tuple[dict[str, Any], str]:
    """The content of to_loss.json, and what the first host printed."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
    hosts: Any = importlib.import_module("hosts")
    with tempfile.TemporaryDirectory() as folder, hosts.made(2, rate=rate) as made:
        command = ["-m", "shardlab", *COMPARE, "--seeds", str(seeds)]
        first, *others = made.torchrun(*command, timeout=timeout, cwd=Path(folder))
        if first.returncode or any(process.returncode for process in others):
            raise RuntimeError("\n".join(process.stderr for process in (first, *others)))
        result: dict[str, Any] = json.loads(Path(folder, "found", "to_loss.json").read_text())
    return result, first.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rate", default="100mbit", help="of each host's link, as tc writes it")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write the record here")
    parser.add_argument("--conditions", default="", help="for the record: what else was running")
    given = parser.parse_args()
    result, text = measure(given.rate, given.seeds)
    print(text)
    if given.out is not None:
        command = f"python benchmarks/slow_link.py --rate {given.rate} --seeds {given.seeds}"
        about = {"command": command, "conditions": given.conditions, "rate": given.rate, "hosts": 2}
        record = {**about, "to_loss": result}
        given.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
