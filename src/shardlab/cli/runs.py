"""`shardlab runs`: what commands have left behind: listed, shown and removed."""

from __future__ import annotations

import re
import sys
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardlab import output
from shardlab.cli.common import App
from shardlab.cli.flags import JSON
from shardlab.errors import UsageError

if TYPE_CHECKING:
    from shardlab.run.housekeeping import Run

DIR = typer.Option("--dir", help="Folder of the run folders.", metavar="PATH")
DEFAULT_DIR = Path("runs")

app = App(
    help="What commands have left behind: run folders and the cache, listed and removed.",
    context_settings={"help_option_names": ["-h", "--help"]},
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
    from shardlab.run import housekeeping

    found, cached = housekeeping.runs_in(folder), housekeeping.cached()
    if as_json:
        size = sum(item.bytes for item in cached)
        output.say_json({"runs": [run.to_dict() for run in found], "cache_bytes": size})
    else:
        report.show(found, folder, cached)


@app.command()
def show(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """What one run was: command, state, steps, loss, checkpoints, and what to do with it next."""
    from shardlab.report import runs as report
    from shardlab.run import housekeeping

    run = housekeeping.find(folder)
    if as_json:
        output.say_json(run.to_dict())
    else:
        report.show_one(run)


@app.command()
def clean(
    folders: Annotated[
        list[Path] | None, typer.Argument(metavar="[RUN...]", help="Run folders.")
    ] = None,
    every: bool = typer.Option(False, "--all", help="Every run folder in --dir."),
    older_than: str | None = typer.Option(
        None, help="Those in --dir that were last written to this long ago: 7d, 12h.",
        metavar="AGE",
    ),
    cache: bool = typer.Option(
        False, "--cache", help="The data sets that `shardlab data` has fetched, and tokens and "
        "proofs that were made once; they are fetched and made again when they are needed.",
    ),
    folder: Annotated[Path, DIR] = DEFAULT_DIR,
    yes: bool = typer.Option(False, "--yes", "-y", help="Do not ask."),
    as_json: Annotated[bool, JSON] = False,
) -> None:  # fmt: skip
    """Remove run folders, or what is in the cache, and say how much that freed.

    Only folders that shardlab has written, that hold nothing else and that no run is using.
    """
    from shardlab import numbers as fmt
    from shardlab.run import housekeeping

    if sum((bool(folders), every, older_than is not None)) > 1:
        raise UsageError("name run folders, or give --all, or --older-than AGE: one of them")
    if not (folders or every or older_than is not None or cache):
        raise UsageError("name run folders, or give --all, --older-than AGE or --cache")
    runs = [housekeeping.find(path) for path in folders or []]
    for run in runs:
        if reason := housekeeping.why_not(run):
            raise UsageError(f"{run.folder} stays: {reason}")
    if every or older_than is not None:
        runs = housekeeping.runs_in(folder)
        if older_than is not None:
            runs = _older(runs, older_than)
    kept = [(run.folder, reason) for run in runs if (reason := housekeeping.why_not(run))]
    runs = [run for run in runs if not housekeeping.why_not(run)]
    cached = housekeeping.cached() if cache else []
    kept += [(item.path, item.reason) for item in cached if item.reason]
    cached = [item for item in cached if not item.reason]
    for path, reason in kept:
        output.note("info", f"stays: {path}: {reason}")
    paths = [*(run.folder for run in runs), *(item.path for item in cached)]
    if paths and not yes:
        size = sum(run.bytes for run in runs) + sum(item.bytes for item in cached)
        _ask(paths, f"remove {fmt.count(len(paths), 'entry', 'entries')}, {fmt.size(size)}?")
    freed = sum(housekeeping.remove(run) for run in runs)
    freed += sum(housekeeping.remove_cached(item) for item in cached)
    if as_json:
        output.say_json({
            "removed": [str(path) for path in paths],
            "kept": [{"path": str(path), "reason": reason} for path, reason in kept],
            "freed_bytes": freed,
        })  # fmt: skip
    else:
        what = [fmt.count(len(runs), "run")] if runs or not cache else []
        what += [fmt.count(len(cached), "entry of the cache", "entries of the cache")] * cache
        output.say(f"removed {' and '.join(what)}: {fmt.size(freed)} freed")


def _ask(paths: list[Path], question: str) -> None:
    if not (sys.stdin is not None and sys.stdin.isatty()):
        raise UsageError(f"{question} There is nobody to ask here: add --yes")
    for path in paths:
        print(f"  {path}", file=sys.stderr)
    if not typer.confirm(question, err=True):
        raise UsageError("nothing was removed")


def _older(runs: list[Run], text: str) -> list[Run]:
    match = re.fullmatch(r"(\d+)([dh])", text.strip())
    if match is None:
        raise UsageError(f"--older-than {text}: not an age, as in 7d (days) or 12h (hours)")
    number, unit = int(match[1]), {"d": "days", "h": "hours"}[match[2]]
    limit = (datetime.now() - timedelta(**{unit: number})).isoformat(" ", "seconds")
    return [run for run in runs if run.time <= limit]
