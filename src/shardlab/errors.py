"""The errors of commands and ranks, and the refusal of an unknown name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

LONGEST = 2000  # characters of a refusal
# What PyTorch says, in lower case, when another rank has gone.
LOST_PEER = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "socket closed",
    "remote process has exited",
    "heartbeat monitor",
)


class UsageError(Exception):
    """What the user asked for cannot be done; the message says why and what can."""

    exit_code = 2

    def __init__(self, message: str = "", *, lines: bool = False) -> None:
        super().__init__(readable(message, lines))


class Mistake(UsageError):
    """What is wrong in the user's own code: perhaps on one rank alone, as with its data."""

    def __init__(self, message: str = "", rank: int | None = None) -> None:
        super().__init__(message, lines=True)
        self.rank = rank

    def named(self) -> Mistake:
        """The same, with the rank that found it."""
        return Mistake(f"rank {self.rank}: {self}")


def readable(text: str, lines: bool = False) -> str:
    """Truncate a message, and escape control characters that it may repeat from a file."""
    if len(text) > LONGEST:
        text = f"{text[: LONGEST // 2]} … {text[-LONGEST // 2 :]}"
    if text.isprintable():
        return text
    if not lines:
        text = " ".join(text.split("\n")).strip()
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


class NodeLost(Exception):
    """A launcher's process on a node is gone, and no rank can be started there."""

    exit_code = 1


class RankFailure(Exception):
    """A rank died or raised."""

    exit_code = 1

    def __init__(self, rank: int, message: str, traceback: str | None = None) -> None:
        super().__init__(f"rank {rank}: {message}")
        self.rank = rank
        self.message = message
        self.traceback = traceback
        self.where = ""  # node and host, where a launcher has several nodes
        if traceback:  # for a caller who does not catch this: Python prints it below the message
            self.add_note(f"On rank {rank}:\n{traceback}")
        self.is_final = False  # the run was to end anyway, and is not started again
        self.folder: Path | None = None  # of the run, if it had one

    @property
    def name(self) -> str:
        """``rank 3``; ``rank 3 (node 1, HOST)``."""
        return f"rank {self.rank} ({self.where})" if self.where else f"rank {self.rank}"

    def __str__(self) -> str:
        return f"{self.name}: {self.message}"


class Late(RankFailure):
    """Ranks gave no answer within a time limit, and were ended. They may have been at work."""


class Halt(RankFailure):
    """A guard ended the run for what it found: a hang, ranks out of step, a NaN.

    The message speaks for all ranks; ``report`` is what stands above it. ``state`` and ``details``
    go to the run folder.
    """

    def __init__(
        self,
        state: str,
        message: str,
        rank: int = 0,
        report: str = "",
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(rank, message, report or None)
        self.state = state
        self.details = dict(details or {})

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> Any:
        report = self.traceback or ""
        return Halt, (self.state, self.message, self.rank, report, self.details)


class Interrupted(Exception):
    """Ctrl-C, or SIGTERM on a run, and every rank has ended. Exit code 128 and the signal's number.

    (Typer swallows KeyboardInterrupt.)
    """

    def __init__(self, message: str = "every rank was ended", number: int = 2) -> None:
        super().__init__(message)
        self.number = number
        self.folder: Path | None = None  # of the run, if it had one

    @property
    def exit_code(self) -> int:
        return 128 + self.number


def unknown(kind: str, name: object, known: Iterable[str]) -> UsageError:
    """The refusal of a name, with the nearest right one, or all of them."""
    names = list(known)
    given = str(name).replace("\n", "\\n")
    given = given if len(given) <= 80 else f"{given[:79]}…"
    lower = {name.lower(): name for name in names}
    near = difflib.get_close_matches(given.lower(), lower, n=1, cutoff=0.5)
    hint = f"did you mean '{lower[near[0]]}'?" if near else f"known: {', '.join(names) or 'none'}"
    return UsageError(f"unknown {kind} '{given}'; {hint}")


def option(name: str, value: str, known: Mapping[str, T]) -> T:
    """What an option's word stands for, or its refusal with the nearest right word."""
    if value not in known:
        raise unknown(name, value, known)
    return known[value]
