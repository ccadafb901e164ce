"""The commands: parse, call one function, print. torch is imported only by what needs it."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

import shardlab
from shardlab import output
from shardlab.cli import (
    checkpoint,
    compare,
    data,
    learn,
    measure,
    network,
    plan,
    prove,
    runs,
    schedule,
    trace,
    train,
)
from shardlab.cli.common import LOG_LEVEL, App
from shardlab.cli.flags import JSON, normalized
from shardlab.errors import Interrupted, NodeLost, RankFailure, UsageError
from shardlab.files import NO_ROOM

app = App(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "token_normalize_func": normalized},
    help="A laboratory for distributed training in PyTorch: run every data-parallel strategy on "
    "one loop, compare them, and see that they equal one process.",
)
for command in (
    train.train, compare.compare, prove.prove, measure.throughput, measure.memory, network.network,
    plan.plan, schedule.schedule,
):  # fmt: skip
    app.command()(command)
app.add_typer(data.app, name="data")
app.add_typer(trace.app, name="trace")
app.add_typer(checkpoint.app, name="checkpoint")
app.add_typer(learn.app, name="learn")
app.add_typer(runs.app, name="runs")


def _print_version(asked: bool) -> None:
    if asked:
        output.say(shardlab.__version__)
        raise typer.Exit


@app.callback()
def options(
    version: bool = typer.Option(
        False, "--version", help="Print the version.", callback=_print_version, is_eager=True
    ),
    log_level: Annotated[str | None, LOG_LEVEL] = None,
) -> None:
    del version  # its callback has printed it
    if log_level is not None:  # for the command that follows, unless it has its own
        os.environ[output.VARIABLE] = log_level


def main() -> None:
    """The console script.

    Exit codes: 0 done, 1 a rank failed, 2 wrong input, 130 interrupted by Ctrl-C, 143 by SIGTERM.
    """
    # Set before torch is imported: below this level its profiler writes to stderr at each start.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    # We report a lost peer in one line; c10d would add a page of its C++ frames.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # "?" where a terminal does not know UTF-8
    try:
        Path.cwd()
    except OSError:
        output.error("the current folder is gone; change to another, and try again")
        raise SystemExit(2) from None
    try:
        app()
    except SystemExit as left:  # typer turns Ctrl-C into this, wherever it came, without a word
        if isinstance(getattr(left.__context__, "__cause__", None), KeyboardInterrupt):
            raise KeyboardInterrupt from None
        raise
    except (UsageError, RankFailure, NodeLost) as failure:
        from shardlab.launch import cluster

        text = str(failure)
        if isinstance(failure, UsageError):
            text = cluster.refused_together(text)
        output.error(text, getattr(failure, "traceback", None))
        raise SystemExit(failure.exit_code) from None
    except Interrupted as stopped:
        with contextlib.suppress(OSError):
            print(f"interrupted: {stopped}", file=sys.stderr)
        raise SystemExit(stopped.exit_code) from None
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        output.give_up()
        output.error(f"cannot write {error.filename or 'to stdout'}: {error.strerror}")
        raise SystemExit(2) from None


@app.command("list")
def list_names(as_json: Annotated[bool, JSON] = False) -> None:
    """List the strategies, in the order of the ladder, and the workloads."""
    from shardlab import naming
    from shardlab.report import console

    found = {
        kind: {name: naming.summary(path) for name, path in known.items()}
        for kind, known in (("strategies", naming.EVERY_STRATEGY), ("workloads", naming.WORKLOADS))
    }
    if as_json:
        output.say_json(found)
        return
    console.print_names(found["strategies"], "strategy")
    console.print_names(found["workloads"], "workload")


@app.command()
def doctor(as_json: Annotated[bool, JSON] = False) -> None:
    """Say what this machine can run, and why not the rest. Starts two ranks to see."""
    from shardlab.launch import doctor
    from shardlab.report import console

    checks = doctor.examine()
    if as_json:
        output.say_json({"checks": checks})
    else:
        console.print_diagnosis(checks)
    if any(check["status"] == "failed" for check in checks):
        raise SystemExit(1)
