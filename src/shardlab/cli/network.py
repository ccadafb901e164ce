"""`shardlab network`: how fast the ranks' network is, by collective, size and link."""

from __future__ import annotations

import time

import typer

from shardlab.cli import flags
from shardlab.errors import UsageError


@flags.configured("world", "device")
def network(
    asked: flags.Asked,
    max_size: str = typer.Option(
        "256MiB", help="The largest tensor; each is four times the one before, from 1 KiB on."
    ),
    rounds: int = typer.Option(5, help="How often everything is measured, in turns."),
    total_time: float = typer.Option(
        60.0, help="Seconds for the whole command; sizes that take longer are left out.",
    ),
) -> None:  # fmt: skip
    """Measure the network: each collective from 1 KiB to 256 MiB, each link, and what is slow.

    Starts ranks here; under torchrun, srun and mpirun, it runs on theirs.

    \b
    Examples:
      shardlab network --world 2
      shardlab network --max-size 1MiB --rounds 3
    """
    begun = time.time()
    from shardlab.launch import launch, launcher_env
    from shardlab.measure import network as measuring
    from shardlab.report import console
    from shardlab.report import network as report
    from shardlab.text import parse_bytes

    largest = parse_bytes(max_size, "--max-size")
    if largest < measuring.LEAST:
        raise UsageError(f"--max-size {max_size}: at least 16KiB, so that there are three sizes")
    if rounds < 2:
        raise UsageError(f"--rounds {rounds}: at least 2, to see how far they differ")
    if not 0 < total_time < float("inf"):
        raise UsageError(f"--total-time {total_time:g}: not a number of seconds above 0")
    plan = measuring.Plan(largest, rounds, total_time, begun)
    config = asked.config()
    place = launcher_env.joined()
    if place is None and config.launch.world is None:
        config = config.at_world(launch.DEFAULT_WORLD)
    world = config.launch.world if place is None else place.size
    if world == 1:
        raise UsageError("one rank has no network; use --world 2, or more ranks of a launcher")
    is_first = place is None or place.rank == 0
    with console.comparison_progress(enabled=is_first and asked.tells) as on_progress:
        raw = launch.launch(
            f"{measuring.__name__}:on_rank",
            config.launch,
            plan,
            on_event=lambda event: on_progress(event["what"], event["done"], event["total"]),
        )
    if raw is None:  # this is a launcher's rank other than the first
        return
    result = measuring.result_of(raw, plan, flags.command())
    folder = config.new_folder("network")
    files = report.write(folder, result)
    asked.print(result, folder, lambda: report.show(result, files))
