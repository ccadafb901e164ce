"""`shardlab throughput` and `shardlab memory`: how fast for which batch, and what fits where."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardlab.cli import flags
from shardlab.errors import UsageError

if TYPE_CHECKING:
    from shardlab.config import Config
    from shardlab.rankset import RankSet

CHECKPOINTING = typer.Option(
    "--activation-checkpointing", help="Blocks are computed again in backward, not kept."
)

MOST_RANKS_PER_CORE = 4  # beyond, to measure on a CPU takes too long to be asked for by mistake


def throughput(
    config: Annotated[Path | None, flags.CONFIG] = None,
    strategy: Annotated[
        str | None,
        typer.Option(
            "--strategy", help="With options after a colon: pytorch_ddp:bucket_mb=4.  "
            "(default: single; with more ranks simple_ddp)", show_default=False,
        ),
    ] = None,
    world: Annotated[
        int | None,
        typer.Option("--world", "-w", help="Number of ranks.  (default: 1)", show_default=False),
    ] = None,
    batch: Annotated[
        str | None,
        typer.Option(
            "--batch", "-b", help="Samples per rank and micro-batch: 1,2,4,8; of a sweep, where it "
            "begins.  (default: 1,2,4,8; of a sweep 1)", show_default=False,
        ),
    ] = None,
    sweep: Annotated[
        bool,
        typer.Option("--sweep", help="Double the batch until memory runs out, then find the "
                     "largest that fits."),
    ] = False,
    memory_limit: Annotated[
        str | None,
        typer.Option(
            help="CPU: what a rank's tensors may hold, 2GB or 500MiB.  (default: 90% of the "
            "machine's free memory, shared by the ranks)", show_default=False,
        ),
    ] = None,
    max_batch: Annotated[int, typer.Option(help="Where a sweep ends.")] = 65536,
    time_limit: Annotated[
        float, typer.Option(help="Seconds after which a sweep tries no further size.")
    ] = 120.0,
    workload: Annotated[str | None, flags.WORKLOAD] = None,
    size: Annotated[str | None, flags.SIZE] = None,
    data: Annotated[str | None, flags.DATA] = None,
    seq_len: Annotated[int | None, flags.SEQ_LEN] = None,
    accumulate: Annotated[int | None, flags.ACCUMULATE] = None,
    optimizer: Annotated[str | None, flags.OPTIMIZER] = None,
    precision: Annotated[str | None, flags.PRECISION] = None,
    activation_checkpointing: Annotated[bool, CHECKPOINTING] = False,
    warmup: Annotated[int, typer.Option(help="Steps before the clock counts, per size.")] = 2,
    steps: Annotated[int, typer.Option(help="Timed steps per size.")] = 5,
    model_params: Annotated[
        float, typer.Option(help="Extrapolate to a model of so many parameters …")
    ] = 1e12,
    tokens: Annotated[float, typer.Option(help="… trained on so many tokens …")] = 1e13,
    target_days: Annotated[float, typer.Option(help="… in so many days.")] = 90.0,
    device: Annotated[str | None, flags.DEVICE] = None,
    backend: Annotated[str | None, flags.BACKEND] = None,
    settings: Annotated[list[str] | None, flags.SET] = None,
    out: Annotated[str | None, flags.OUT] = None,
    quiet: Annotated[bool, flags.QUIET] = False,
    as_json: Annotated[bool, flags.JSON] = False,
) -> None:  # fmt: skip
    """Measure tokens/s, MFU and peak memory for each batch size, until memory runs out."""
    from shardlab import launch, record
    from shardlab.measure import throughput as measuring
    from shardlab.numbers import parse_bytes
    from shardlab.report import console
    from shardlab.report import throughput as report
    from shardlab.specs import parse_spec

    if launch.torchrun_environment() is not None:
        raise UsageError("throughput starts its own ranks; run it without torchrun")
    plan = measuring.Plan(
        batches=_numbers(batch, "--batch") if batch else ((1,) if sweep else (1, 2, 4, 8)),
        sweep=sweep,
        warmup=warmup,
        steps=steps,
        memory_limit=None if memory_limit is None else parse_bytes(memory_limit, "--memory-limit"),
        most=max_batch,
        time_limit_s=time_limit,
    )
    goal = measuring.Goal(model_params, tokens, target_days)
    given = _settings(
        workload, size, data, seq_len, accumulate, optimizer, precision,
        activation_checkpointing, device, backend, out,
    )  # fmt: skip
    resolved = flags.config_of(config, settings, given)
    ranks = world or resolved.launch.world or 1
    if ranks < 1:
        raise UsageError(f"--world must be at least 1, got {ranks}")
    overrides: dict[str, Any] = {
        "launch.world": ranks,
        "training.global_batch": plan.batches[0] * ranks * resolved.training.accumulate,
    }
    if strategy is not None:
        name, options = parse_spec(strategy)
        overrides |= {"strategy.name": name, "strategy.options": options}
    elif ranks == 1 and config is None:
        overrides["strategy.name"] = "single"
    resolved = resolved.with_overrides(overrides)
    with console.comparison_progress(enabled=not (quiet or as_json)) as on_progress:
        result = measuring.measure(resolved, plan, goal, flags.command(), on_progress)
    folder = record.new_folder(Path(resolved.output.root), "throughput", flags.path_of(out))
    files = report.write(folder, result)
    if as_json:
        print(record.json_text(result))
    elif quiet:
        print(folder)
    else:
        report.show(result, files)
    if all(row["status"] != "ok" for row in result["rows"]):
        raise SystemExit(1)


def memory(
    strategies: Annotated[
        str | None,
        typer.Option(
            "--strategies", "--strategy",
            help="Comma-separated; an option follows a colon: pytorch_ddp:bucket_mb=4.  "
            "(default: all)", show_default=False,
        ),
    ] = None,
    config: Annotated[Path | None, flags.CONFIG] = None,
    world: Annotated[
        int | None,
        typer.Option("--world", "-w", help="Number of ranks, as many as you like: they are not "
                     "started.  (default: 2)", show_default=False),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option("--batch", "-b", help="Samples per rank and micro-batch.  (default: that of "
                     "the config, else 1)", show_default=False),
    ] = None,
    workload: Annotated[str | None, flags.WORKLOAD] = None,
    size: Annotated[str | None, flags.SIZE] = None,
    data: Annotated[str | None, flags.DATA] = None,
    seq_len: Annotated[int | None, flags.SEQ_LEN] = None,
    accumulate: Annotated[int | None, flags.ACCUMULATE] = None,
    optimizer: Annotated[str | None, flags.OPTIMIZER] = None,
    precision: Annotated[str | None, flags.PRECISION] = None,
    activation_checkpointing: Annotated[bool, CHECKPOINTING] = False,
    fits: Annotated[
        str | None,
        typer.Option("--fits", help="Does a step fit into 24GB (or 24GiB) per rank, and what is "
                     "the largest batch that does?", metavar="SIZE"),
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Run it, too, and say how far the estimate is off.")
    ] = False,
    snapshot: Annotated[
        bool,
        typer.Option("--snapshot", help="GPU: run it and write a memory snapshot of each rank, for "
                     "PyTorch's viewer."),
    ] = False,
    device: Annotated[
        str | None,
        typer.Option("--device", help="What the estimate is for: auto (as here), cpu or cuda."),
    ] = None,
    backend: Annotated[str | None, flags.BACKEND] = None,
    settings: Annotated[list[str] | None, flags.SET] = None,
    out: Annotated[str | None, flags.OUT] = None,
    quiet: Annotated[bool, flags.QUIET] = False,
    as_json: Annotated[bool, flags.JSON] = False,
) -> None:  # fmt: skip
    """Tell what each rank will hold at the peak of a step, without running it."""
    from shardlab import launch, record
    from shardlab.measure import estimate
    from shardlab.numbers import parse_bytes
    from shardlab.rankset import RankSet
    from shardlab.report import console
    from shardlab.report import memory as report
    from shardlab.strategies import STRATEGIES

    if launch.torchrun_environment() is not None:
        raise UsageError("memory starts its own processes; run it without torchrun")
    limit = None if fits is None else parse_bytes(fits, "--fits")
    if batch is not None and batch < 1:
        raise UsageError(f"--batch {batch}: a batch has at least one sample")
    given = _settings(
        workload, size, data, seq_len, accumulate, optimizer, precision,
        activation_checkpointing, device, backend, out,
    )  # fmt: skip
    resolved = flags.config_of(config, settings, given)
    specs = [s.strip() for s in strategies.split(",")] if strategies else list(STRATEGIES)
    ranks = launch.DEFAULT_WORLD if world is None else world
    if world is None and resolved.launch.world is not None:
        ranks = resolved.launch.world
    if ranks < 1:
        raise UsageError(f"--world must be at least 1, got {ranks}")
    rows = estimate.rows_of(resolved, specs, ranks, batch or (None if config else 1))

    @functools.cache
    def folder() -> Path:
        return record.new_folder(Path(resolved.output.root), "memory", flags.path_of(out))

    most = max(row.config.launch.world or 1 for row in rows)
    with (
        RankSet(resolved.launch, most, estimate.LIMIT_S) as rankset,
        console.comparison_progress(enabled=not (quiet or as_json)) as on_progress,
    ):
        weigh = _weigher(rankset) if measure else None
        kind = resolved.launch.device
        result = estimate.estimate(rows, kind, limit, flags.command(), weigh, on_progress)
        if snapshot:
            result["snapshots"] = [
                path for row in rows for path in estimate.snapshots(rankset, row.config, folder())
            ]
    record.write_json(folder() / "memory.json", result)
    if as_json:
        print(record.json_text(result))
    elif quiet:
        print(folder())
    else:
        report.show(result, folder() / "memory.json")
    if all(row["status"] != "ok" for row in result["rows"]):
        raise SystemExit(1)


def _weigher(ranks: RankSet) -> Callable[[Config], dict[str, Any]]:
    from shardlab.measure import estimate

    def weigh(config: Config) -> dict[str, Any]:
        asked, cores = config.launch.world or 1, os.cpu_count() or 1
        if config.launch.device != "cuda" and asked > MOST_RANKS_PER_CORE * cores:
            raise UsageError(f"{asked} ranks are too many to run on {cores} cores")
        found: dict[str, Any] = ranks.run(f"{estimate.__name__}:weigh", config.to_dict())[0]
        return found

    return weigh


def _numbers(text: str, flag: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"{flag} {text}: not whole numbers, as in 1,2,4") from None


def _settings(
    workload: str | None,
    size: str | None,
    data: str | None,
    seq_len: int | None,
    accumulate: int | None,
    optimizer: str | None,
    precision: str | None,
    activation_checkpointing: bool,
    device: str | None,
    backend: str | None,
    out: str | None,
) -> dict[str, Any]:
    """What both commands set in the config."""
    return {
        "model.workload": workload,
        "model.size": size,
        "data.source": data,
        "data.seq_len": seq_len,
        "training.accumulate": accumulate,
        "training.optimizer": optimizer,
        "precision.compute": precision,
        "training.activation_checkpointing": activation_checkpointing or None,
        "launch.device": device,
        "launch.backend": backend,
        "output.dir": out,
    }
