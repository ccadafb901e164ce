"""How long a command takes to its first result, and where the time goes.

    python benchmarks/startup.py [--rounds 5] [--out FILE]

Each command runs with SHARDLAB_LOG_LEVEL=debug, and the lines that it prints are stamped as they
arrive. What lies between two of them is a share: the interpreter and the command line; the start of
the ranks, which import PyTorch; and what the ranks do up to the first step or verdict. Prints the
median of the whole with p10–p90, and its three largest shares.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from shardlab import stats
from shardlab.launch import environment

# The command, and the lines that end its shares; the last one is the first result.
COMMANDS: dict[str, tuple[list[str], dict[str, str]]] = {
    "train": (
        ["train", "--size", "tiny", "--steps", "2", "--data", "synthetic", "--out", "run"],
        {
            "interpreter and command line": r"shardlab \d",
            "start of the ranks": r"ranks are ready",
            "data, model, strategy, first step": r"^step 1/",
        },
    ),
    "compare": (
        ["compare", "--size", "tiny", "--strategies", "simple_ddp,zero1", "--steps", "3"],
        {
            "interpreter and command line": r"shardlab \d",
            "start of the ranks": r"ranks are ready",
            "checks of machine and model": r"^\[0/",
            "first timed strategy": r"^\[1/",
        },
    ),
    "learn check": (
        ["learn", "check", "simple_ddp"],
        {
            "interpreter and command line": r"shardlab \d",
            "ranks and the verdict": r"^not yet",
        },
    ),
}


def timed(command: list[str], ends: dict[str, str], folder: str) -> dict[str, float]:
    """Seconds of each share."""
    if command[0] == "learn":  # an exercise that nobody has worked on: not yet right
        begin = [sys.executable, "-m", "shardlab", "learn", "start", command[-1]]
        subprocess.run(begin, cwd=folder, check=True, capture_output=True)
    shares: dict[str, float] = {}
    waiting = list(ends.items())
    environ = {**os.environ, "SHARDLAB_LOG_LEVEL": "debug", "PYTHONUNBUFFERED": "1"}
    start = last = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-m", "shardlab", *command], cwd=folder, env=environ, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            if waiting and re.search(waiting[0][1], line):
                now = time.perf_counter()
                shares[waiting.pop(0)[0]] = now - last
                last = now
        process.wait()
    if waiting:
        raise SystemExit(f"{' '.join(command)}: no line like {waiting[0][1]!r}")
    return {"whole": last - start, **shares}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    result: dict[str, Any] = {}
    for name, (command, ends) in COMMANDS.items():
        rows: list[dict[str, float]] = []
        for _ in range(arguments.rounds):
            with tempfile.TemporaryDirectory() as folder:
                rows.append(timed(command, ends, folder))
        found = {share: stats.spread([row[share] for row in rows]) for share in rows[0]}
        result[name] = {"command": f"shardlab {' '.join(command)}", "seconds": found}
        whole = found.pop("whole")
        print(f"{name}: {whole['median']:.2f} s [{whole['p10']:.2f}, {whole['p90']:.2f}]")
        for share in sorted(found, key=lambda s: -found[s]["median"])[:3]:
            print(f"  {found[share]['median']:6.2f} s  {share}")
        found["whole"] = whole
    result["env"] = environment.describe(torch.device("cpu"), " ".join(["python", *sys.argv]))
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
