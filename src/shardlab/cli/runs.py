"""`shardlab runs`: what commands have left behind: listed and shown."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardlab import output
from shardlab.cli.common import App
from shardlab.cli.flags import JSON
from shardlab.errors import UsageError

DIR = typer.Option("--dir", help="Folder of the run folders.", metavar="PATH")
DEFAULT_DIR = Path("runs")

app = App(
    help="What commands have left behind: run folders and the cache.",
)


@app.callback(invoke_without_command=True)
def overview(
    ctx: typer.Context,
    folder: Annotated[Path, DIR] = DEFAULT_DIR,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """List the run folders, newest first, and how large the cache is."""
    if ctx.invoked_subcommand is not None:
        if folder != DEFAULT_DIR or as_json:
            raise UsageError(f"put the options after the command: runs {ctx.invoked_subcommand} …")
        return
    from shardlab.report import runs as report
    from shardlab.training import housekeeping

    found, cache_bytes = housekeeping.runs_in(folder), housekeeping.cache_bytes()
    if as_json:
        output.say_json({"runs": [run.to_dict() for run in found], "cache_bytes": cache_bytes})
    else:
        report.show(found, folder, cache_bytes)


@app.command()
def show(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """What one run was: command, state, steps, loss, checkpoints, and what to do with it next."""
    from shardlab.report import runs as report
    from shardlab.training import housekeeping

    run = housekeeping.find(folder)
    if as_json:
        output.say_json(run.to_dict())
    else:
        report.show_one(run)
