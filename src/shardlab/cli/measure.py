"""`shardlab throughput` and `shardlab memory`: how fast for which batch, and what fits where."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from shardlab.cli import flags
from shardlab.errors import UsageError

if TYPE_CHECKING:
    from shardlab.config import Config
    from shardlab.launch.rank_set import RankSet

SHARED = (
    "workload", "size", "data", "seq_len", "optimizer", "precision",
    "activation_checkpointing", "device",
)  # fmt: skip
MOST_RANKS_PER_CORE = 4  # with more, measuring takes so long that it was hardly meant


@flags.configured(*SHARED, "compile")
def throughput(
    asked: flags.Asked,
    strategy: str | None = typer.Option(
        None, help="With options after a colon: pytorch_ddp:bucket_mb=4.  (default: single; with "
        "more ranks simple_ddp)",
    ),
    world: int | None = typer.Option(
        None, "--world", "-w", help="Number of ranks.  (default: 1)"
    ),
    micro_batch: str | None = typer.Option(
        None, help="Samples per rank and micro-batch: 1,2,4,8; of a sweep, where "
        "it begins.  (default: 1,2,4,8; of a sweep 1)",
    ),
    sweep: bool = typer.Option(
        False, "--sweep", help="Double the batch until memory runs out, then find the largest that "
        "fits.",
    ),
    memory_limit: str | None = typer.Option(
        None, help="CPU: what a rank's tensors may hold, 2GB or 500MiB.  (default: 90% of the "
        "machine's free memory, shared by the ranks)",
    ),
    max_micro_batch: int = typer.Option(65536, help="Where a sweep ends."),
    sweep_time: float = typer.Option(
        120.0, help="Seconds after which a sweep tries no further size."
    ),
    warmup: int = typer.Option(2, help="Steps before the clock counts, per size."),
    steps: int = typer.Option(5, help="Timed steps per size."),
    model_params: float | None = typer.Option(
        None, help="Extrapolate to a model of this many parameters (1e12), …"
    ),
    tokens: float | None = typer.Option(None, help="… trained on this many tokens (1e13), …"),
    target_days: float | None = typer.Option(None, help="… in this many days (90), …"),
    price_per_hour: float | None = typer.Option(
        None, help="… at this price of a device's hour, in any currency. Nothing is extrapolated "
        "unless one of these four is given.",
    ),
) -> None:  # fmt: skip
    """Measure tokens/s, MFU and peak memory for each batch size, until memory runs out.

    \b
    Examples:
      shardlab throughput --size tiny --micro-batch 1,2,4
      shardlab throughput --world 2 --strategy zero2 --sweep
    """
    from shardlab.launch import launch, launcher_env
    from shardlab.measure import throughput as measuring
    from shardlab.report import console
    from shardlab.report import throughput as report
    from shardlab.specs import parse_spec
    from shardlab.text import parse_bytes

    resolved = asked.config()
    launch.lead(resolved.launch)
    plan = measuring.Plan(
        batches=_numbers(micro_batch, "--micro-batch")
        if micro_batch
        else ((1,) if sweep else (1, 2, 4, 8)),
        sweep=sweep,
        warmup=warmup,
        steps=steps,
        memory_limit=None if memory_limit is None else parse_bytes(memory_limit, "--memory-limit"),
        most=max_micro_batch,
        time_limit_s=sweep_time,
    )
    goals = {
        "params": model_params, "tokens": tokens, "days": target_days,
        "price_per_hour": price_per_hour,
    }  # fmt: skip
    asked_for = {name: value for name, value in goals.items() if value is not None}
    goal = measuring.Goal(**asked_for) if asked_for else None
    place = launcher_env.joined()
    ranks = world or resolved.launch.world or (1 if place is None else place.size)
    if ranks < 1:
        raise UsageError(f"--world must be at least 1, got {ranks}")
    times = resolved.accumulate
    overrides: dict[str, Any] = {
        "launch.world": ranks,
        "training.global_batch": plan.batches[0] * ranks * times,
        "training.micro_batch": None,
    }
    if strategy is not None:
        name, options = parse_spec(strategy)
        overrides |= {"strategy.name": name, "strategy.options": options}
    elif ranks == 1 and asked.file is None:
        overrides["strategy.name"] = "single"
    resolved = resolved.with_overrides(overrides).in_parts(times)
    with console.comparison_progress(enabled=asked.tells) as on_progress:
        result = measuring.measure(resolved, plan, goal, flags.command(), on_progress)
    folder = resolved.new_folder("throughput")
    files = report.write(folder, result)
    asked.print(result, folder, lambda: report.show(result, files))
    if all(row["status"] != "ok" for row in result["rows"]):
        raise SystemExit(1)


@flags.configured(*SHARED, device="What the estimate is for: auto (as here), cpu or cuda.")
def memory(
    asked: flags.Asked,
    strategies: str | None = typer.Option(
        None, "--strategies", "--strategy", help=flags.STRATEGIES.help
    ),
    world: int | None = typer.Option(
        None, "--world", "-w", help="Number of ranks, as many as you like: they are not started.  "
        "(default: 2)",
    ),
    micro_batch: int | None = typer.Option(
        None, help="Samples per rank and micro-batch.  (default: that of the "
        "config, else 1)",
    ),
    fits: str | None = typer.Option(
        None, help="Does a step fit into 24GB (or 24GiB) per rank, and what is the largest batch "
        "that does?", metavar="SIZE",
    ),
    measure: bool = typer.Option(
        False, "--measure", help="Run it, too, and say how far the estimate is off."
    ),
    snapshot: bool = typer.Option(
        False, "--snapshot", help="GPU: run it and write a memory snapshot of each rank, for "
        "PyTorch's viewer.",
    ),
) -> None:  # fmt: skip
    """Tell what each rank will hold at the peak of a step, without running it.

    \b
    Examples:
      shardlab memory --size xl --world 64 --strategies pytorch_ddp,zero3
      shardlab memory --size small --fits 24GB --strategies zero1,zero2
    """
    from shardlab import files
    from shardlab.launch import launch
    from shardlab.launch.rank_set import RankSet
    from shardlab.measure import estimate
    from shardlab.report import console
    from shardlab.report import memory as report
    from shardlab.text import parse_bytes

    resolved = asked.config()
    launch.lead(resolved.launch)
    limit = None if fits is None else parse_bytes(fits, "--fits")
    if micro_batch is not None and micro_batch < 1:
        raise UsageError(f"--micro-batch {micro_batch}: a batch has at least one sample")
    ranks = resolved.launch.world or launch.default_ranks() if world is None else world
    if ranks < 1:
        raise UsageError(f"--world must be at least 1, got {ranks}")
    has_batch = asked.file or asked.keys & {"training.global_batch", "training.micro_batch"}
    size = micro_batch or (None if has_batch else 1)
    rows = estimate.rows_of(resolved, flags.specs_of(strategies), ranks, size)

    @functools.cache
    def folder() -> Path:
        return resolved.new_folder("memory")

    most = max(row.config.launch.world or 1 for row in rows)
    with (
        RankSet(resolved.launch, most, estimate.LIMIT_S) as rankset,
        console.comparison_progress(enabled=asked.tells) as on_progress,
    ):
        if snapshot:
            rankset.run(f"{estimate.__name__}:refuse_snapshot", rows[0].config)
        weigh = _weigher(rankset) if measure else None
        kind = resolved.launch.device
        result = estimate.estimate(rows, kind, limit, flags.command(), weigh, on_progress)
        if snapshot:
            result["snapshots"] = [
                path for row in rows for path in estimate.snapshots(rankset, row, folder())
            ]
    files.write_json(folder() / "memory.json", result)
    asked.print(result, folder(), lambda: report.show(result, folder() / "memory.json"))
    if all(row["status"] != "ok" for row in result["rows"]):
        raise SystemExit(1)


def _weigher(ranks: RankSet) -> Callable[[Config, Sequence[int]], dict[str, Any]]:
    from shardlab.measure import estimate

    def weigh(config: Config, longest: Sequence[int]) -> dict[str, Any]:
        asked, cores = config.launch.world or 1, os.cpu_count() or 1
        if config.launch.device != "cuda" and asked > MOST_RANKS_PER_CORE * cores:
            raise UsageError(f"{asked} ranks are too many to run on {cores} cores")
        here = estimate.__name__
        found: dict[str, Any] = ranks.run(f"{here}:weigh", config, longest)[0]
        return {**found, "reserved": ranks.run(f"{here}:reserved", config)[0]}

    return weigh


def _numbers(text: str, flag: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"{flag} {text}: not whole numbers, as in 1,2,4") from None
