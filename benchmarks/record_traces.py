"""The small real traces of tests/trace/recorded: recorded, and stripped of what names the machine.

    python benchmarks/record_traces.py DIR              # two Gloo ranks on the CPU
    python benchmarks/record_traces.py DIR --device cuda    # on one GPU: NCCL alone, two Gloo ranks
    python benchmarks/record_traces.py DIR --only gloo_1f1b     # one of them
    python benchmarks/record_traces.py DIR --hta-python HTA/bin/python   # what HTA says of DIR's

Runs of ours, recorded by `shardlab train --profile`, and scripts as other people write them, under
PyTorch's own profiler: DDP without step markers, FSDP2, pipelines, and loops in which rank 1 sleeps
in each step. The models are small, so that a step has few events and a file some tens of kilobytes;
nothing is left out of the files.
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
            "2", "pytorch_zero3", "--set", "launch.backend=gloo", "--set", "profile.shapes=true",
            "--set", "profile.active=1", "--steps", "4",
        ),
    },
}  # fmt: skip
# Scripts without shardlab: how many ranks, which script, and whether shapes are recorded. In those
# called late, rank 1 sleeps.
PLAIN: dict[str, dict[str, tuple[int, str, bool]]] = {
    "cpu": {
        "gloo_unmarked": (2, "ddp", False),
        "gloo_plain_fsdp": (2, "fsdp", False),
        "gloo_1f1b": (3, "1f1b", True),
        "gloo_gpipe": (3, "gpipe", False),
        "gloo_late_data": (2, "late", False),
        "gloo_late_forward": (2, "late", False),
        "gloo_two_groups": (4, "late", True),
        "gloo_mesh": (4, "late", False),
    },
    "cuda": {"h200_unmarked": (1, "ddp", False)},
}
SLEEP_S = 0.03
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


def late_loop(folder: Path, kind: str) -> None:
    """On each rank: three steps, in each of which rank 1 is late, as ``kind`` says."""
    import time

    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel
    from torch.profiler import ProfilerActivity, profile, record_function
    from torch.utils.data import DataLoader, Dataset

    dist.init_process_group("gloo")
    rank = dist.get_rank()

    def sleep(where: str) -> None:
        time.sleep(SLEEP_S if rank == 1 and kind == where else 0)

    class Samples(Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 5

        def __getitem__(self, i: int) -> torch.Tensor:
            sleep("gloo_late_data")
            return torch.full((32, 64), float(i))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            sleep("gloo_late_forward")
            sleep("gloo_mesh")
            out: torch.Tensor = self.inner(x)
            return out

    torch.manual_seed(0)
    model: nn.Module = Model()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])] if kind == "gloo_two_groups" else []
    if kind == "gloo_mesh":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("copy", "shard")))
    elif not pairs:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = iter(DataLoader(Samples(), batch_size=None))

    def step() -> None:
        if pairs:
            sleep("gloo_two_groups")
            dist.all_reduce(torch.ones(10_000), group=pairs[rank // 2])
            return
        model(next(data)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=bool(pairs)) as profiler:
        for i in range(3):
            with record_function(f"ProfilerStep#{i}"):
                step()
        dist.barrier()  # on torch 2.13 a collective that ends later would crash the process
    profiler.export_chrome_trace(str(folder / f"rank{rank}.json.gz"))
    dist.barrier()
    dist.destroy_process_group()


def plain_steps(folder: Path, script: str, shapes: bool) -> None:
    """On each rank: FSDP2 or a stage of a pipeline, and the profiler as PyTorch's pages show it."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
    from torch.profiler import ProfilerActivity, profile, schedule

    dist.init_process_group("gloo")
    rank, world, micro = dist.get_rank(), dist.get_world_size(), 4
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)) for _ in range(2))
    model = nn.Sequential(*blocks)
    x = torch.randn(256 * micro, 256)
    if script == "fsdp":
        for block in model:
            fully_shard(block)
        fully_shard(model)

        def gradients() -> None:
            model(x).square().mean().backward()

    else:
        stage = PipelineStage(model, rank, world, torch.device("cpu"))
        kind = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}[script]
        pipeline = kind(stage, micro, loss_fn=nn.functional.mse_loss)

        def gradients() -> None:
            inputs = (x,) if rank == 0 else ()
            pipeline.step(*inputs, target=x if rank == world - 1 else None)

    optimizer = torch.optim.AdamW(model.parameters())
    with profile(
        activities=[ProfilerActivity.CPU],
        record_shapes=shapes,
        schedule=schedule(wait=1, warmup=1, active=1),
        on_trace_ready=lambda p: p.export_chrome_trace(str(folder / f"rank{rank}.json.gz")),
    ) as profiler:
        for _ in range(4):
            gradients()
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()
    dist.barrier()
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


def record(target: Path, device: str, only: str | None) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        for name, (world, strategy, *flags) in RUNS[device].items():
            if only not in (None, name):
                continue
            out = Path(scratch) / name
            run = ("--strategy", strategy, "--world", world, "--device", device, *flags)
            command = (sys.executable, "-m", "shardlab", "train", *run, *SMALL, "--out", str(out))
            subprocess.run(command, check=True)
            publish(out, target / name)
        for name, (count, *_) in PLAIN[device].items():
            if only not in (None, name):
                continue
            out = Path(scratch) / name
            out.mkdir()
            start = ("torch.distributed.run", "--standalone", f"--nproc-per-node={count}")
            own = (__file__, str(out), "--device", device, "--plain", name)
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
    parser.add_argument("--only", help="the folder to record, of those of the device")
    parser.add_argument("--plain", help=argparse.SUPPRESS)  # a rank of ours
    given = parser.parse_args()
    if given.plain:
        _, script, shapes = PLAIN[given.device][given.plain]
        if script == "ddp":
            plain_loop(given.folder, given.device)
        elif script == "late":
            late_loop(given.folder, given.plain)
        else:
            plain_steps(given.folder, script, shapes)
    elif given.hta_python:
        record_hta(given.folder, given.hta_python)
    else:
        record(given.folder, given.device, given.only)


if __name__ == "__main__":
    main()
