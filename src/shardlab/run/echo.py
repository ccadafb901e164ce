"""What the ranks of this machine print, passed on to stderr: lines of several ranks appear once.

Each rank writes its stdout and stderr into a pipe of its own, which a thread of this process reads:
what a rank said just before it died arrives, too. A line waits a moment for the other ranks to say
the same, and is shown with the ranks that did::

    [2 ranks] building the model
    [rank 1] my part of the data is empty
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from multiprocessing import connection

from shardlab import output
from shardlab.run.forking import fork_server

HOLD_S = 0.5  # how long a line waits for the other ranks
REMEMBERED = 2000  # lines that were shown, and that another rank may still repeat
LONGEST = 1 << 16  # bytes without an end of line, after which they are taken as one
CLOSE_S = 1.0  # a process that a rank has left behind may hold its pipe open


@dataclass(eq=False)
class _Line:
    text: str
    ranks: list[int]
    since: float = field(default_factory=time.monotonic)
    is_shown: bool = False


class Echo:
    """Reads what ``size`` ranks print, and shows it."""

    def __init__(self, size: int) -> None:
        self.size = size
        # With --log-level debug, each rank's lines are shown at once and by themselves.
        self._merges = size > 1 and not output.tells("debug")
        self._pipes: dict[connection.Connection, int] = {}  # our end, and whose it is
        self._begun: dict[int, bytes] = {}  # by rank, a line that has not ended
        self._waiting: deque[_Line] = deque()  # in the order in which they will be shown
        self._known: dict[str, list[_Line]] = {}  # by text, what not every rank has said
        self._oldest: deque[_Line] = deque()  # the same, in the order in which they came
        self._late = 0
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._read, name="shardlab-echo", daemon=True)

    def pipe(self, rank: int) -> connection.Connection:
        """Where the rank writes. Close it here when the rank has its own copy."""
        ours, theirs = fork_server().Pipe(duplex=False)
        self._pipes[ours] = rank
        return theirs

    def listen(self) -> None:
        """Begin, when every rank has its pipe."""
        self._thread.start()

    def close(self) -> None:
        """The ranks have ended: show the rest."""
        if self._thread.ident is None:
            for pipe in self._pipes:
                pipe.close()
            return
        self._thread.join(CLOSE_S)
        with self._lock:
            self._show(is_over=True)
            if self._late:
                self._print(f"[ranks] {self._late} of these lines came from another rank, too")
            self._late = 0

    def _read(self) -> None:
        while self._pipes:
            # Without a line that waits, there is nothing to do until a rank says something.
            for pipe in connection.wait(list(self._pipes), HOLD_S / 5 if self._waiting else None):
                assert isinstance(pipe, connection.Connection)
                rank = self._pipes[pipe]
                try:
                    block = os.read(pipe.fileno(), LONGEST)
                except OSError:
                    block = b""
                with self._lock:
                    self._take(rank, block)
                if not block:
                    del self._pipes[pipe]
                    pipe.close()
            with self._lock:
                self._show()

    def _take(self, rank: int, block: bytes) -> None:
        """Take the bytes of a rank; no bytes mean that it has ended."""
        *lines, rest = (self._begun.pop(rank, b"") + block).split(b"\n")
        if rest and (not block or len(rest) > LONGEST):
            lines, rest = [*lines, rest], b""
        self._begun[rank] = rest
        for line in lines:
            # A progress bar overwrites its line: what stood there last is what counts.
            text = line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace").rstrip()
            self._hear(rank, text)

    def _hear(self, rank: int, text: str) -> None:
        same = self._known.get(text, []) if self._merges else []
        line = next((line for line in same if rank not in line.ranks), None)
        if line is None:
            line = _Line(text, [rank])
            self._waiting.append(line)
            if self._merges:
                self._known.setdefault(text, []).append(line)
                self._oldest.append(line)
        else:
            line.ranks.append(rank)
            self._late += line.is_shown
        if len(line.ranks) == self.size and self._merges:
            self._forget(line)
        while len(self._oldest) > REMEMBERED:
            self._forget(self._oldest[0])

    def _forget(self, line: _Line) -> None:
        self._oldest.remove(line)
        self._known[line.text].remove(line)
        if not self._known[line.text]:
            del self._known[line.text]

    def _show(self, is_over: bool = False) -> None:
        now = time.monotonic()
        while self._waiting:
            line = self._waiting[0]
            is_whole = not self._merges or len(line.ranks) == self.size
            if not (is_over or is_whole or now - line.since > HOLD_S):
                return
            self._waiting.popleft().is_shown = True
            self._print(f"{self._who(line.ranks)}{line.text}")

    def _who(self, ranks: list[int]) -> str:
        if self.size == 1:
            return ""
        if len(ranks) == 1:
            return f"[rank {ranks[0]}] "
        if len(ranks) == self.size:
            return f"[{self.size} ranks] "
        return f"[ranks {', '.join(map(str, sorted(ranks)))}] "

    def _print(self, text: str) -> None:
        """Print a line; on a terminal it appears above the progress bar."""
        if output.tells("warning") and sys.stderr is not None:
            print(text, file=sys.stderr, flush=True)
