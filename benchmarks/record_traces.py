"""The small real traces of tests/trace/recorded: recorded, and stripped of what names the machine.

    python benchmarks/record_traces.py DIR              # two Gloo ranks on the CPU
    python benchmarks/record_traces.py DIR --device cuda    # on one GPU: NCCL alone, two Gloo ranks
    python benchmarks/record_traces.py DIR --hta-python HTA/bin/python   # what HTA says of DIR's

Runs of ours, recorded by `shardlab train --profile`, and a plain loop under PyTorch's own profiler
that marks no steps, as many people's do. The model is GPT-2 with one layer, so that a step has few
events and a file some tens of kilobytes; nothing is left out of the files.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

SMALL = (
    "--size", "tiny", "--set", "model.options.layers=1", "--data", "synthetic", "--global-batch",
    "4", "--seed", "0", "--quiet", "--profile",
)  # fmt: skip
WINDOWS = ("--set", "profile.active=1", "--set", "profile.repeat=2", "--steps", "6")
# What is recorded, by device: the name of the folder, how many ranks, and the flags of `train`.
RUNS: dict[str, dict[str, tuple[str, ...]]] = {
    "cpu": {
        "gloo_fsdp": ("2", "pytorch_zero3", "--set", "profile.active=1", "--steps", "4"),
        "gloo_windows": ("2", "bucket_ddp_async", *WINDOWS),
    },
    "cuda": {
        "h200_nccl": ("1", "pytorch_ddp", "--set", "profile.active=2", "--steps", "5"),
        "h200_gloo": (
            "2", "pytorch_zero3", "--backend", "gloo", "--set", "profile.shapes=true",
            "--set", "profile.active=1", "--steps", "4",
        ),
    },
}  # fmt: skip
UNMARKED = {"cpu": ("gloo_unmarked", 2), "cuda": ("h200_unmarked", 1)}
HTA = """
import logging, sys, warnings
from pathlib import Path
logging.disable(logging.CRITICAL); warnings.simplefilter("ignore")
from hta.trace_analysis import TraceAnalysis
folder, out = Path(sys.argv[1]).resolve(), Path(sys.argv[2])
files = {rank: str(path) for rank, path in enumerate(sorted(folder.rglob("*.json.gz")))}
found = TraceAnalysis(trace_files=files, trace_dir="/")
ranks = list(files)
tables = {
    "temporal_breakdown": found.get_temporal_breakdown(visualize=False),
    "comm_comp_overlap": found.get_comm_comp_overlap(visualize=False),
    "kernel_type_breakdown": found.get_gpu_kernel_breakdown(visualize=False)[0],
    "idle_time_breakdown": found.get_idle_time_breakdown(ranks=ranks, visualize=False)[0],
}
out.mkdir(parents=True, exist_ok=True)
for name, table in tables.items():
    table.to_csv(out / f"{name}.csv")
"""


def plain_loop(folder: Path, device: str) -> None:
    """On each rank: two updates of a small model, recorded from outside, without step markers."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.profiler import ProfilerActivity, profile

    dist.init_process_group("gloo" if device == "cpu" else "nccl")
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).to(device)
    model = DistributedDataParallel(inner)
    optimizer = torch.optim.AdamW(model.parameters())
    activities = [ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(ProfilerActivity.CUDA)

    def update() -> None:
        optimizer.zero_grad()
        model(torch.randn(32, 64, device=device)).square().mean().backward()
        optimizer.step()

    update()
    update()
    with profile(activities=activities) as profiler:
        update()
        update()
        if device == "cuda":
            torch.cuda.synchronize()
        else:
            dist.barrier()  # on torch 2.13 a collective that ends later would crash the process
    profiler.export_chrome_trace(str(folder / f"rank{dist.get_rank()}.json.gz"))
    dist.destroy_process_group()


def publish(source: Path, target: Path) -> None:
    """The same events, in less space, without the machine's name and paths."""
    for path in sorted(source.rglob("*.json.gz")):
        trace = json.loads(gzip.decompress(path.read_bytes()))
        trace["traceName"] = path.name.removesuffix(".gz")
        trace["host_name"] = "lab"
        if "shardlab" in trace:
            trace["shardlab"] |= {"host": "lab", "run": target.name}
        out = target / path.relative_to(source)
        out.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(trace, separators=(",", ":"))
        out.write_bytes(gzip.compress(text.encode(), 9, mtime=0))
    for path in sorted(source.glob("ledger.rank*.jsonl")):
        target.mkdir(parents=True, exist_ok=True)
        (target / path.name).write_bytes(path.read_bytes())


def record(target: Path, device: str) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        for name, (world, strategy, *flags) in RUNS[device].items():
            out = Path(scratch) / name
            run = ("--strategy", strategy, "--world", world, "--device", device, *flags)
            command = (sys.executable, "-m", "shardlab", "train", *run, *SMALL, "--out", str(out))
            subprocess.run(command, check=True)
            publish(out, target / name)
        name, count = UNMARKED[device]
        out = Path(scratch) / name
        out.mkdir()
        start = ("torch.distributed.run", "--standalone", f"--nproc-per-node={count}")
        own = (__file__, str(out), "--device", device, "--plain")
        subprocess.run((sys.executable, "-m", *start, *own), check=True)
        publish(out, target / name)


def record_hta(target: Path, python: Path) -> None:
    """HTA's tables beside each GPU trace, with its rounding to microseconds and without."""
    for folder in sorted(target.glob("h200_*")):
        for name, env in (("hta", {}), ("hta_no_rounding", {"HTA_DISABLE_NS_ROUNDING": "1"})):
            command = (str(python), "-c", HTA, str(folder), str(folder / name))
            if subprocess.run(command, env={**os.environ, **env}, check=False).returncode:
                print(f"HTA fails on {folder.name} ({name}): no tables of it")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--hta-python", type=Path, help="a Python that has HTA (traceinsight)")
    parser.add_argument("--plain", action="store_true", help=argparse.SUPPRESS)  # a rank of ours
    given = parser.parse_args()
    if given.plain:
        plain_loop(given.folder, given.device)
    elif given.hta_python:
        record_hta(given.folder, given.hta_python)
    else:
        record(given.folder, given.device)


if __name__ == "__main__":
    main()
