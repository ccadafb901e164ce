"""What every command has: `--log-level`, and a stdout for its result alone."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import typer

import shardlab
from shardlab import output

LOG_LEVEL = typer.Option(
    "--log-level", help="What stderr says. error: why it failed, if it did; warning: also warnings "
    "and what your code prints; info: also progress and notes; debug: also what is being done. "
    f"Or ${output.VARIABLE}.  (default: info; with --json or --quiet, warning)", metavar="LEVEL",
)  # fmt: skip


class App(typer.Typer):
    """Commands whose result alone is on stdout."""

    def command(self, *args: Any, **kwargs: Any) -> Callable[[Any], Any]:
        register = super().command(*args, **kwargs)

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
