"""How cost grows: a step against tensors, ranks and micro-batches; checkpoints and the ledger.

    python benchmarks/growth.py [--axes tensors,ranks] [--strategies zero1,zero3] [--ranks 2,4,8,16]
                                [--out FILE] [--svg FILE]

The model is many small vectors in ten blocks, so that its mathematics cost next to nothing: what is
left of a step is what the strategy, the optimizer and PyTorch do for each tensor. A plain loop in
one process, without any communication, is measured beside it. Prints the median step of each
size, the cost of one more (tensor, rank, …) between the two largest sizes, and the power with which
cost grows there: 1 is linear. Exits with 1 where it is worse than linear (a power above 1.2).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardlab import comm, naming
from shardlab import config as configs
from shardlab.launch import environment
from shardlab.launch.ranks import Ranks
from shardlab.ledger import LEDGER
from shardlab.report.charts import Log, line
from shardlab.training import builders, loop
from shardlab.workloads.base import Batch, Workload

BLOCKS = 10
SIZES = {
    "tensors": (10, 100, 1_000, 5_000, 20_000),
    "ranks": (2, 4, 8, 16),
    "microbatches": (1, 4, 16, 64),
    "checkpoint_mb": (1, 10, 100, 500),
    "ledger": (1_000, 10_000, 100_000),
}
NAMES = {
    "tensors": "a step, by number of tensors",
    "ranks": "a step, by number of ranks",
    "microbatches": "a step, by number of micro-batches",
    "checkpoint_mb": "a checkpoint written and read, by MB",
    "ledger": "a step, by number of collectives",
}
WORSE_THAN_LINEAR = 1.2  # the power; noise alone gives 1.1
SECONDS = 1.0  # of steps in one measurement, and two steps at least


class Block(nn.Module):
    def __init__(self, tensors: int, width: int) -> None:
        super().__init__()
        self.vectors = nn.ParameterList(torch.ones(width) for _ in range(tensors))

    def forward(self, x: Tensor) -> Tensor:  # (rows, width)
        out: Tensor = x * torch.stack(list(self.vectors)).mean(0)
        return out


class Many(nn.Module):
    def __init__(self, tensors: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(tensors // BLOCKS, width) for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:  # (rows, width)
        for block in self.blocks:
            x = block(x)
        return x


class Data:
    def __init__(self, width: int) -> None:
        self.width = width

    def __len__(self) -> int:
        return 1 << 16

    def batch(self, ids: Sequence[int]) -> Batch:
        x = torch.ones(len(ids), self.width)
        return Batch(inputs=x, targets=x / 2, count=len(ids), samples=len(ids))


def squares(model: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = (model(batch.inputs) - batch.targets).square().sum()
    return loss


def many(tensors: int, width: int) -> Workload:
    names = tuple(f"blocks.{i}" for i in range(BLOCKS))
    return Workload("many", lambda: Many(tensors, width), squares, Data(width), blocks=names)


def timed(step: Callable[[], object], agree: Callable[[float], float]) -> list[float]:
    """Seconds of each step, after one that warms up. Every rank makes as many."""
    step()
    seconds: list[float] = []
    count = 2
    while len(seconds) < count:
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
        if len(seconds) == 1:
            count = max(2, min(30, int(SECONDS / agree(seconds[0]))))
    return seconds


def steps(world: Any, values: dict[str, Any], tensors: int, width: int) -> dict[str, Any]:
    """The median step of a strategy, as long as the slowest rank took."""
    config, workload = configs.from_dict(values), many(tensors, width)
    strategy = builders.build_strategy(config, workload, world)
    batches: Iterator[Any] = iter(loop.Batches(workload, config, world))
    LEDGER.reset(full_steps=0)

    def step() -> None:
        strategy.gradients(next(batches))
        strategy.step()
        strategy.settle()

    seconds = timed(step, lambda mine: max(world.gather(mine)))
    slowest = [max(ranks) for ranks in zip(*world.gather(seconds), strict=True)]
    return {"seconds": statistics.median(slowest), "env": described(world)}


def described(world: Any) -> dict[str, Any]:
    return environment.describe(world.device, " ".join(["python", *sys.argv]))


def plain(tensors: int, width: int, microbatches: int) -> float:
    """The median step of a plain loop on the same model, in this process."""
    torch.set_num_threads(1)
    model, batch = Many(tensors, width), Data(width).batch(range(2))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)

    def step() -> None:
        for _ in range(microbatches):
            squares(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return statistics.median(timed(step, lambda mine: mine))


def checkpoints(world: Any, values: dict[str, Any], tensors: int, width: int, folder: str) -> Any:
    """Seconds to write a checkpoint and to read it again."""
    from shardlab.checkpoint.load import load
    from shardlab.checkpoint.resume import newest_good
    from shardlab.checkpoint.save import About, Checkpoints
    from shardlab.config import CheckpointConfig

    config, workload = configs.from_dict(values), many(tensors, width)
    strategy = builders.build_strategy(config, workload, world)
    strategy.gradients(next(iter(loop.Batches(workload, config, world))))
    strategy.step()
    about = About({}, config.strategy.name, None)
    written = Checkpoints(Path(folder), CheckpointConfig(every=1), world, strategy, about)
    seconds = []
    for number in range(1, 5):
        world.gather(None)
        start = time.perf_counter()
        written.save(number, {})
        load(newest_good(Path(folder), world), strategy, world, config)
        seconds.append(max(world.gather(time.perf_counter() - start)))
    return {"seconds": statistics.median(seconds[1:]), "env": described(world)}


def ledger(world: Any, collectives: int) -> dict[str, Any]:
    """Seconds of a step with so many small collectives, with its rows taken out at the end."""
    tensor, seconds = torch.zeros(1), []
    for _ in range(3):
        LEDGER.reset()
        world.gather(None)
        start = time.perf_counter()
        for _ in range(collectives):
            comm.all_reduce(tensor, world.group, label="one")
        json.dumps(LEDGER.take())
        seconds.append(max(world.gather(time.perf_counter() - start)))
    return {"seconds": statistics.median(seconds), "env": described(world)}


def settings(name: str, world: int, microbatches: int = 1) -> configs.Config:
    return configs.load(
        None,
        {
            "strategy.name": name,
            "training.global_batch": 2 * world * microbatches,
            "training.micro_batch": 1,
            "training.steps": 1_000,
            "launch.world": world,
        },
    )


def measured(ranks: Ranks, axis: str, name: str, size: int) -> dict[str, Any]:
    """What the strategy's step (or checkpoint, or the ledger) takes at one size of an axis."""
    if name == "plain":
        tensors, width = (size, 16) if axis == "tensors" else (100, 10_000)
        return {"seconds": plain(tensors, width, size if axis == "microbatches" else 1)}
    config = settings(name, ranks.size, size if axis == "microbatches" else 1)
    if axis == "ledger":
        found: dict[str, Any] = ranks.run(ledger, size)[0]
    elif axis == "checkpoint_mb":  # parameters and AdamW's two moments, four bytes each
        width = size * 10**6 // 12 // 100
        with tempfile.TemporaryDirectory() as folder:
            found = ranks.run(checkpoints, config.to_dict(), 100, width, folder)[0]
    else:
        tensors, width = (size, 16) if axis == "tensors" else (100, 10_000)
        found = ranks.run(steps, config.to_dict(), tensors, width)[0]
    return found


def fitting(axis: str, points: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """The points that show how cost grows: of ranks, those that have two cores each, as Gloo's
    threads need one too. Where there are fewer cores, ranks take turns and all slow down."""
    return [p for p in points if axis != "ranks" or 2 * p["size"] <= (os.cpu_count() or 1)]


def power(points: Sequence[dict[str, Any]]) -> float:
    """With which power of the size the cost grows between the two largest sizes."""
    if len(points) < 2:
        return math.nan
    a, b = points[-2:]
    return math.log(b["seconds"] / a["seconds"]) / math.log(b["size"] / a["size"])


def each(points: Sequence[dict[str, Any]]) -> float:
    """Seconds for one more, between the two largest sizes."""
    if len(points) < 2:
        return math.nan
    a, b = points[-2:]
    seconds: float = (b["seconds"] - a["seconds"]) / (b["size"] - a["size"])
    return seconds


def grow(axis: str, names: Sequence[str], sizes: Sequence[int]) -> dict[str, Any]:
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    env = None
    with ExitStack() as stack:
        ranks: Ranks | None = None
        for size in sizes:
            world = size if axis == "ranks" else 2
            if ranks is None or ranks.size != world:
                stack.close()
                launch = settings("simple_ddp", world).launch
                ranks = stack.enter_context(Ranks(launch, world))
            for name in names:
                point = measured(ranks, axis, name, size)
                env = env or point.get("env")
                found[name].append({"size": size, "seconds": point["seconds"]})
                print(f"{axis} {size} {name}: {point['seconds'] * 1e3:.1f} ms", file=sys.stderr)
    print(f"\n{axis:>24} " + "".join(f"{size:>10,}" for size in sizes) + "  one more   power")
    rows = []
    for name, points in found.items():
        fit = fitting(axis, points)
        rows.append({"name": name, "points": points, "each": each(fit), "power": power(fit)})
        times = "".join(f"{point['seconds'] * 1e3:>8.1f}ms" for point in points)
        print(f"{name:>24} {times} {each(fit) * 1e6:>8.1f}us {power(fit):>6.2f}", flush=True)
    return {"axis": axis, "rows": rows, "env": env}


def drawing(axes: Sequence[dict[str, Any]]) -> str:
    """The curves, one picture for each axis, side by side, both scales logarithmic."""
    parts = []
    for column, one in enumerate(axes):
        found = [point for row in one["rows"] for point in row["points"]]
        across = Log(min(p["size"] for p in found), max(p["size"] for p in found))
        up = Log(min(p["seconds"] for p in found), max(p["seconds"] for p in found))
        parts.append(f'<g transform="translate({60 + 300 * column} 30) scale(2.2 2)">')
        parts.append('<rect width="100" height="100" fill="none" stroke="#999" stroke-width=".5"/>')
        for tick in across.ticks(lambda value: f"{value:,.0f}", 1, 10 if across.high > 100 else 2):
            parts.append(f'<text x="{tick.at}" y="107" class="middle">{tick.text}</text>')
        for tick in up.ticks(lambda value: f"{value * 1e3:,.3g} ms", 1e-3, 10):
            parts.append(f'<text x="-2" y="{102 - tick.at}" class="end">{tick.text}</text>')
        parts.append(f'<text x="50" y="-4" class="middle">{NAMES[one["axis"]]}</text>')
        for i, row in enumerate(one["rows"]):
            path = line((across.at(p["size"]), 100 - up.at(p["seconds"])) for p in row["points"])
            colour = f"hsl({360 * i // len(one['rows'])} 60% 45%)"
            title = f"<title>{row['name']}</title>"
            parts.append(f'<path d="{path}" fill="none" stroke="{colour}">{title}</path>')
        parts.append("</g>")
    style = "text{font:5px sans-serif;fill:#777}.middle{text-anchor:middle}.end{text-anchor:end}"
    size = f'width="{60 + 300 * len(axes)}" height="270"'
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{style}</style>\n{body}\n</svg>\n'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--axes", default=",".join(SIZES), help="what grows, comma-separated")
    parser.add_argument("--strategies", default=",".join(("plain", *naming.STRATEGIES)))
    parser.add_argument("--sizes", help="other sizes of the axis, comma-separated")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--svg", type=Path)
    arguments = parser.parse_args()
    chosen = [name for name in arguments.strategies.split(",") if name != "single"]
    result = []
    for axis in arguments.axes.split(","):
        sizes = [int(s) for s in arguments.sizes.split(",")] if arguments.sizes else SIZES[axis]
        names = chosen
        if axis == "checkpoint_mb":
            names = ["zero3"]
        elif axis == "ledger":
            names = ["simple_ddp"]  # the ranks' own calls; the strategy is not used
        elif axis == "ranks":
            names = [name for name in chosen if name != "plain"]
        result.append(grow(axis, names, sizes))
        if arguments.out:
            arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if arguments.svg:
        arguments.svg.write_text(drawing(result), encoding="utf-8")
    worse = [
        f"{row['name']} by {one['axis']}: power {row['power']:.2f}"
        for one in result
        for row in one["rows"]
        if row["power"] > WORSE_THAN_LINEAR
    ]
    if worse:
        sys.exit("worse than linear: " + "; ".join(worse))


if __name__ == "__main__":
    main()
