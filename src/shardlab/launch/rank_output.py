"""What the ranks of this machine print, passed on to stderr with the rank in front of each line.

Each rank writes its stdout and stderr into a pipe of its own, which a thread of this process reads:
what a rank said just before it died arrives, too::

    [rank 0] building the model
    [rank 1] building the model
"""

from __future__ import annotations

import sys
import threading
import time
from multiprocessing import connection

from shardlab import output
from shardlab.launch.forking import fork_server

LONGEST = 1 << 16  # bytes without an end of line, after which they are taken as one
CLOSE_S = 1.0  # a process that a rank has left behind may hold its pipe open


class Echo:
    """Reads what ``size`` ranks print, and shows it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._threads: list[threading.Thread] = []
        self._printing = threading.Lock()

    def pipe(self, rank: int) -> connection.Connection:
        """Where the rank writes. Close it here when the rank has its own copy."""
        ours, theirs = fork_server().Pipe(duplex=False)
        thread = threading.Thread(
            target=self._read, args=(rank, ours), name="shardlab-echo", daemon=True
        )
        thread.start()
        self._threads.append(thread)
        return theirs

    def close(self) -> None:
        """The ranks have ended: show the rest."""
        limit = time.monotonic() + CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, limit - time.monotonic()))

    def _read(self, rank: int, pipe: connection.Connection) -> None:
        with pipe, open(pipe.fileno(), "rb", closefd=False) as lines:
            while line := lines.readline(LONGEST):
                # A progress bar overwrites its line: what stood there last is what counts.
                last = line.rstrip(b"\r\n").rpartition(b"\r")[2]
                text = last.decode(errors="replace").rstrip()
                # On a terminal it appears above the progress bar.
                if output.tells("warning") and sys.stderr is not None:
                    with self._printing:
                        prefix = f"[rank {rank}] " if self.size > 1 else ""
                        print(prefix + text, file=sys.stderr, flush=True)
