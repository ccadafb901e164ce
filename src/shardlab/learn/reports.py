"""What a rank reports to the guard, and what the guard makes of it: nothing is taken on trust."""

from __future__ import annotations

import json
import os
import secrets
import time
from dataclasses import dataclass, field
from typing import Any

PRINTED = 16_000  # characters kept of what a rank prints
LONGEST_LINE = 32 * 2**20
MOST_CALLS = 5_000  # rows kept of a case
CHUNK = 1 << 16
FAILED = ("raised", "dead")  # phases


@dataclass(frozen=True)
class Job:
    """What is checked."""

    exercise: str
    path: str  # of the learner's file, for tracebacks
    source: str
    deadline_s: float
    scratch: str  # an empty folder


@dataclass
class Rank:
    """What the guard knows of a rank."""

    number: int
    pid: int
    report: int  # file descriptors, ours; -1 when the rank has closed its end
    output: int
    control: int
    token: bytes
    phase: str = "loading"  # idle, running, done (with the case), raised, tampered, dead
    calls: list[dict[str, Any]] = field(default_factory=list)  # of the case
    inside: dict[str, Any] | None = None  # the call it has entered or waits for, and not left
    error: dict[str, Any] = field(default_factory=dict)  # see runner.describe
    stack: str = ""  # where it was when the time was up
    evidence: dict[str, Any] = field(default_factory=dict)
    printed: str = ""
    changed: float = field(default_factory=time.monotonic)
    buffer: bytes = b""

    def begin(self) -> None:
        """Begin a case."""
        self.phase, self.changed = "running", time.monotonic()
        self.calls, self.inside, self.evidence = [], None, {}

    def read_report(self) -> None:
        """Read all that the rank has reported by now."""
        parts = [self.buffer]
        try:
            while data := os.read(self.report, CHUNK):
                parts.append(data)
                if len(data) < CHUNK:
                    break
            else:
                self.report = -1
        except OSError:  # nothing more for now; or it was closed before
            pass
        *lines, self.buffer = b"".join(parts).split(b"\n")
        if len(self.buffer) > LONGEST_LINE:
            self._tampered([])
            self.report = -1
        for line in filter(None, lines):
            self._hear(line)

    def _hear(self, line: bytes) -> None:
        token, _, text = line.partition(b" ")
        try:
            if not secrets.compare_digest(token, self.token):
                raise ValueError
            kind, value = json.loads(text)
        except (ValueError, RecursionError):
            if self.phase != "dead":
                self._tampered([])
            return
        if self.phase in (*FAILED, "tampered"):
            return  # nothing that it reports later undoes it
        self.changed = time.monotonic()
        if kind == "loaded":
            self.phase = "idle"
        elif kind == "enter":
            self.inside = value
            if len(self.calls) < MOST_CALLS:
                self.calls.append(value)
        elif kind == "wait":
            self.inside = {**value, "waits": True}
        elif kind == "leave":
            self.inside = None
        elif kind == "case":
            self.phase, self.evidence, self.inside = "done", value, None
        elif kind == "tampered":
            self._tampered(value)
        elif kind == "raised":
            self.phase, self.error = "raised", value

    def _tampered(self, names: list[str]) -> None:
        self.phase, self.error = "tampered", {"names": names}

    def read_output(self) -> None:
        """Keep what it prints, up to a limit: it is shown to the learner, and never believed."""
        data = os.read(self.output, CHUNK)
        if not data:
            self.output = -1
        self.printed = (self.printed + data.decode(errors="replace"))[:PRINTED]
