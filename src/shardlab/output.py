"""A command prints its result on stdout and everything else on stderr. No torch.

A user's model may print when it is imported, built or run, from Python or from C. A script that
reads our stdout must not see that, so while a command works, stdout leads to stderr, for this
process and all that it starts, and the result alone goes to what stdout was.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TextIO

from shardlab.errors import UsageError, unknown
from shardlab.files import json_text, with_schema

LEVELS = ("debug", "info", "warning", "error")
VARIABLE = "SHARDLAB_LOG_LEVEL"

_result: TextIO | None = None  # what stdout was, while a command works
_level: str | None = None  # that was asked for
_began = time.monotonic()


@contextmanager
def aside() -> Iterator[None]:
    """Inside, stdout is stderr, and only ``stream()`` leads to what stdout was.

    It stays so until the process ends, because a user's code may print at exit, too. Only where
    stdout is no file (in our tests) is it put back.
    """
    global _result
    before = sys.stdout
    if _result is not None or before is None:  # None: the process was started without a stdout
        yield
        return
    if _is_real(before):
        before.flush()
        _result = os.fdopen(
            os.dup(1), "w", buffering=1, encoding=before.encoding, errors=before.errors
        )
        os.dup2(_elsewhere(), 1)
        yield
        return
    _result, sys.stdout = before, sys.stderr
    try:
        yield
    finally:
        _result, sys.stdout = None, before


def _is_real(stream: TextIO) -> bool:
    try:
        return stream.fileno() == 1
    except (OSError, ValueError, AttributeError):
        return False


def _elsewhere() -> int:
    """Stderr; nowhere, if it is closed or only the error is wanted."""
    try:
        if tells("warning"):
            return os.dup(2)
    except OSError:
        pass
    return os.open(os.devnull, os.O_WRONLY)


def stream() -> TextIO:
    """Where a result goes."""
    return _result or sys.stdout


def say(text: object) -> None:
    """A line of the result. It is written at once, so that a closed pipe is noticed here."""
    try:
        print(text, file=stream(), flush=True)
    except BrokenPipeError:
        raise  # the reader has left: the command ends without a word
    except OSError as error:
        give_up()
        raise UsageError(f"the result cannot be written to stdout: {error.strerror}") from None


def give_up() -> None:
    """Nothing more can be written: what is left in a buffer would fail again at the end."""
    for lost in (stream(), sys.stdout):
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), lost.fileno())


def say_json(value: Mapping[str, Any]) -> None:
    """The result as one line of JSON."""
    say(json_text(with_schema(value)))


# ------------------------------------------------------------------ how much is said on stderr


@contextmanager
def at_level(name: str | None) -> Iterator[None]:
    """Inside, stderr says this much; None: as $SHARDLAB_LOG_LEVEL says."""
    global _level
    name = name or os.environ.get(VARIABLE) or None
    if name is not None and name not in LEVELS:
        raise unknown("log level", name, LEVELS)
    before, _level = _level, name
    try:
        yield
    finally:
        _level = before


def tells(level: str, quiet: bool = False) -> bool:
    """Whether what has this level is said. ``quiet``: unless it was asked for, no progress."""
    least = _level or ("warning" if quiet else "info")
    return LEVELS.index(level) >= LEVELS.index(least)


def note(level: str, text: str) -> None:
    """A line on stderr, if it is wanted."""
    if tells(level):
        print(text, file=sys.stderr, flush=True)


def error(text: str, report: str | None = None) -> None:
    """Why a command failed, in a line; ``report`` stands above it."""
    with contextlib.suppress(OSError):  # stderr is on a full device: the exit code says it
        print(f"{report or ''}error: {text}", file=sys.stderr, flush=True)


def debug(text: str) -> None:
    """What is being done, with the seconds since the command began."""
    if tells("debug"):
        note("debug", f"debug {time.monotonic() - _began:8.3f} s  {text}")
