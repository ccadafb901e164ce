"""The Python stacks of this process, and the line that shows where it is.

A thread that runs Python can read the stacks of the others. A process whose interpreter cannot run
(an extension that holds Python's lock) is asked from outside by a signal: ``faulthandler`` writes
from the signal's handler, in C. A stopped process does not answer at all, and Linux says so.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import sys
import sysconfig
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

SIGNAL = signal.SIGUSR1
_STATES = {
    "T": "it is stopped (SIGSTOP)",
    "t": "a debugger holds it",
    "D": "it waits for a disk or a network file system",
    "Z": "it is dead",
}
_LIBRARIES = tuple(
    str(Path(path).resolve())
    for path in {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib")}
)
_PACKAGE = str(Path(__file__).resolve().parents[1])
_LAUNCHERS = tuple(f"{_PACKAGE}/launch/{name}.py" for name in ("ranks", "cluster", "remote_ranks"))
# Our code that only calls what a rank is really doing.
_PLUMBING = (
    *(f"{_PACKAGE}/{name}" for name in ("comm.py", "ledger.py", "guard", "pulse.py", "phases.py")),
    *_LAUNCHERS,
)


@dataclass(frozen=True)
class Frame:
    file: str
    line: int
    function: str

    @property
    def place(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line}"  # noqa: PTH119

    @property
    def is_library(self) -> bool:
        """Whether the code is Python's or an installed package's, where the fault seldom is."""
        return self.file.startswith((*_LIBRARIES, "<"))

    @property
    def is_launcher(self) -> bool:
        return self.file in _LAUNCHERS

    @property
    def is_plumbing(self) -> bool:
        return self.file.startswith(_PLUMBING)


Stack = list[Frame]  # innermost first


def of_threads(leave_out: int | None = None) -> dict[str, Stack]:
    """Every thread's stack by the thread's name, the main one first."""
    names = {t.ident: t.name for t in threading.enumerate()}
    main = threading.main_thread().ident
    frames = sys._current_frames()
    return {
        names.get(ident, f"thread {ident}"): _walk(frames[ident])
        for ident in sorted(frames, key=lambda ident: ident != main)
        if ident != leave_out
    }


def _walk(frame: FrameType | None) -> Stack:
    stack = []
    while frame is not None:
        # Between two instructions a frame may have no line (Python 3.11): its first stands for it.
        line = frame.f_lineno or frame.f_code.co_firstlineno
        stack.append(Frame(frame.f_code.co_filename, line, frame.f_code.co_name))
        frame = frame.f_back
    return stack


def place_of(stack: Stack) -> str | None:
    """The innermost line of a user's or a strategy's code; if there is none, the innermost line."""
    own = [frame for frame in stack if not frame.is_library and not frame.is_plumbing]
    return next((frame.place for frame in own or stack), None)


def text_of(stack: Stack) -> str:
    """Outermost first, as in a traceback, without the launcher's frames."""
    ours = [i for i, frame in enumerate(stack) if frame.is_launcher]
    kept = stack[: ours[0]] if ours else stack
    return "\n".join(f"    {f.file}:{f.line} in {f.function}" for f in reversed(kept))


# ------------------------------------------------------------------ asked from outside


class Answering:
    """Makes this process write its stacks to a file when it gets a signal. For the main thread."""

    fd: int | None = None  # None: the signal has another handler, or this is not the main thread

    def __enter__(self) -> Answering:
        is_free = signal.getsignal(SIGNAL) is signal.SIG_DFL
        if is_free and threading.current_thread() is threading.main_thread():
            # It has no name: others read it through /proc, and it is gone with the process.
            self._file: Any = tempfile.TemporaryFile()
            self.fd = self._file.fileno()
            faulthandler.register(SIGNAL, self._file, all_threads=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self.fd is not None:
            faulthandler.unregister(SIGNAL)
            self._file.close()


def ask(pid: int, fd: int | None, patience_s: float = 1.0) -> Stack:
    """The main thread's stack of another process of this host; empty if it does not answer."""
    if fd is None:
        return []
    path = Path(f"/proc/{pid}/fd/{fd}")
    try:
        os.kill(pid, SIGNAL)
    except (ProcessLookupError, PermissionError):
        return []
    limit = time.monotonic() + patience_s
    before = ""
    while time.monotonic() < limit:
        time.sleep(0.05)
        with contextlib.suppress(OSError):
            text = path.read_text(encoding="utf-8", errors="replace")
            if text and text == before:  # it has stopped growing
                break
            before = text
    return parse(before)


def parse(text: str) -> Stack:
    """The stack of the main thread, which faulthandler writes last."""
    last = text.strip().split("\n\n")[-1]
    found = re.findall(r'File "(.*?)", line (\d+) in (\S+)', last)
    return [Frame(file, int(line), function) for file, line, function in found]


def state_of(pid: int) -> str | None:
    """What Linux says about a process that does not answer; None if nothing is remarkable."""
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return None
    return _STATES.get(letter)
