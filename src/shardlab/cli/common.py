"""What every command has: `--log-level`, a stdout for its result alone, and one name for a flag."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

import shardlab
from shardlab import output
from shardlab.errors import UsageError

LOG_LEVEL = typer.Option(
    "--log-level", help="What stderr says. error: why it failed, if it did; warning: also warnings "
    "and what your code prints; info: also progress and notes; debug: also what is being done. "
    f"Or ${output.VARIABLE}.  (default: info; with --json or --quiet, warning)", metavar="LEVEL",
)  # fmt: skip
# A flag that was once called otherwise, by its old name: it is understood, and shown nowhere.
RENAMED = {
    "--batch": "--micro-batch",
    "--max-batch": "--max-micro-batch",
    "--limit": "--time-limit",
    "--deadline": "--time-limit",
    "--to": "--out",
}
# Old names that could mean either of two things, and what to write instead.
REFUSED = {
    ("--batch", "--global-batch"): "write --global-batch for the samples of a step over all ranks, "
    "--micro-batch for those that a rank takes at a time",
    ("-b", "--micro-batch"): "it is short for --global-batch on other commands; write "
    "--micro-batch for the samples that a rank takes at a time",
}


class Command(TyperCommand):
    """A command that knows the old names of its flags."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = {name for option in self.params for name in (*option.opts, *option.secondary_opts)}
        return super().parse_args(ctx, renamed(args, known))


def renamed(args: list[str], known: set[str]) -> list[str]:
    """The arguments with the flags' names of today; ``known`` are those that the command has."""
    end = args.index("--") if "--" in args else len(args)
    found = []
    for arg in args[:end]:
        name, equals, value = arg.partition("=")
        for (old, beside), advice in REFUSED.items():
            if name == old and name not in known and beside in known:
                raise UsageError(f"no option {name}: {advice}")
        new = RENAMED.get(name, name)
        found.append(f"{new}{equals}{value}" if name not in known and new in known else arg)
    return found + args[end:]


class App(typer.Typer):
    """Commands whose result alone is on stdout."""

    def command(self, *args: Any, **kwargs: Any) -> Callable[[Any], Any]:
        register = super().command(*args, cls=Command, **kwargs)

        def decorate(function: Any) -> Any:
            register(_speaking(function))
            return function

        return decorate


def _speaking(function: Callable[..., Any]) -> Callable[..., Any]:
    """The command with `--log-level`, and with stdout kept for what it says."""
    signature = inspect.signature(function, eval_str=True)
    level = inspect.Parameter(
        "log_level",
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[str | None, LOG_LEVEL],
    )

    @functools.wraps(function)
    def run(log_level: str | None = None, **values: Any) -> Any:
        with output.at_level(log_level), output.aside():
            output.debug(f"shardlab {shardlab.__version__}, Python {sys.version.split()[0]}: "
                         f"{' '.join(sys.argv[1:])}")  # fmt: skip
            return function(**values)

    return taking(run, [*signature.parameters.values(), level])


def taking(run: Callable[..., Any], parameters: Iterable[inspect.Parameter]) -> Callable[..., Any]:
    """The function with these parameters, from which typer reads a command's options."""
    named = [p.replace(kind=p.KEYWORD_ONLY) for p in parameters]
    run.__signature__ = inspect.Signature(named)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in named}
    return run
