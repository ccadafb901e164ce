"""Where a rank is: a few attributes that the loop writes and the watchdog's thread reads.

There is no lock: a reader that is a moment late does no harm. To write one costs a tenth of a
microsecond. No torch here.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple

BUILDING = "building model and data"
PROOF = "its proof"
DATA = "data loading"
STEP = "the step"  # between forward, backward and the optimizer: what a strategy does itself
EVALUATION = "evaluation"
CHECKPOINT = "writing a checkpoint"
LEFT = "after the loop"


class Pulse:
    """One rank's place. ``beats`` counts what it does: a rank whose count stands still is stuck."""

    __slots__ = ("beats", "on_loop", "phase", "step", "steps_done")

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.phase = BUILDING
        self.step: int | None = None  # of the loop; None before the first
        self.steps_done = 0
        self.beats = 0
        self.on_loop: Callable[[], None] | None = None  # called when the loop begins

    def begin_loop(self) -> None:
        self.enter(DATA)
        if self.on_loop is not None:
            self.on_loop()

    def begin_step(self, step: int) -> None:
        self.step = step
        self.enter(STEP)

    def end_step(self) -> None:
        self.steps_done += 1
        self.enter(DATA)

    def at(self, phase: str) -> At:
        """The phase of what is done inside: ``with PULSE.at(EVALUATION):``."""
        return At(phase)

    def enter(self, phase: str) -> None:
        self.phase = phase
        self.beats += 1


PULSE = Pulse()  # a rank is a process: one pulse


class At:
    """A phase, and afterwards the one before it. After an error it stays, to show where it was."""

    __slots__ = ("before", "phase")

    def __init__(self, phase: str) -> None:
        self.phase = phase

    def __enter__(self) -> None:
        self.before = PULSE.phase
        PULSE.enter(self.phase)

    def __exit__(
        self, kind: type[BaseException] | None, _error: object, _trace: TracebackType | None
    ) -> None:
        if kind is None:
            PULSE.enter(self.before)


class Call(NamedTuple):
    """A collective as one rank entered it; ``what`` must be the same on all ranks of its group.

    A message is a call too: its sender's and its receiver's differ in the first word alone.
    """

    seq: int
    step: int | None
    what: str  # op, shape, dtype, label
    site: str
    # Which ranks take part, as "0 1 2 3"; "0>1" for a message, perhaps with a word for its kind.
    # Empty: all ranks, and ``seq`` counts the same on each.
    channel: str = ""
    turn: int = 0  # the number of calls on the channel before this one

    @property
    def is_message(self) -> bool:
        return ">" in self.channel

    @property
    def members(self) -> list[int]:
        """The ranks that take part; empty for all of them."""
        if self.is_message:
            return [int(rank) for rank in self.channel.partition(" ")[0].split(">")]
        return [int(rank) for rank in self.channel.split()]

    @property
    def place(self) -> int:
        """The number under which the other ranks have entered the same call."""
        return self.turn if self.channel else self.seq

    @property
    def name(self) -> str:
        return f"{self.what.partition(' ')[0]} #{self.seq}"

    @property
    def label(self) -> str:
        return self.what.partition("'")[2].rpartition("'")[0]

    @property
    def full(self) -> str:
        """``all_reduce #17 (bucket 3, step 42)``."""
        inside = [self.label] if self.label else []
        inside += [] if self.step is None else [f"step {self.step}"]
        return f"{self.name} ({', '.join(inside)})" if inside else self.name

    @property
    def kind(self) -> str:
        """Equal for calls of two ranks that belong together. The label distinguishes calls of one
        shape, which may come from two lines; where there is no label, the line does."""
        if self.is_message:
            return self.what.partition(" ")[2]
        return self.what if self.label else f"{self.what} {self.site}"
