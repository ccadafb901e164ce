"""Processes that run a learner's code: confined before they begin, found and ended afterwards."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import resource
import secrets
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path

GIB = 2**30
MEMORY_PER_PROCESS = GIB  # of private memory; torch itself has 0.25
FILE_SIZE = 64 * 2**20
WHERE_SIGNAL = signal.SIGUSR1
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


# ------------------------------------------------------------------ a rank, before it runs


def confine(number: int, say: int, hear: int, output: int, scratch: str) -> tuple[int, int]:
    """In the child: a session of its own, its own pipes and no other, limits, an empty folder."""
    os.setsid()
    _die_with_parent()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    # Where nobody would write by accident. Everything else is closed: the guard's own pipes, too.
    base = 300 + secrets.randbelow(300)
    os.dup2(say, base)
    os.dup2(hear, base + 1)
    for fd in _open_descriptors():
        if fd > 2 and fd not in (base, base + 1):
            with contextlib.suppress(OSError):
                os.close(fd)
    # Above what it has by now: torch itself has much, and more where it is built for GPUs. Not
    # every kernel counts the first.
    data, mapped = _memory()
    _limit(resource.RLIMIT_DATA, data + MEMORY_PER_PROCESS)
    _limit(resource.RLIMIT_AS, mapped + 4 * MEMORY_PER_PROCESS)
    _limit(resource.RLIMIT_FSIZE, FILE_SIZE)
    _limit(resource.RLIMIT_CORE, 0)
    os.chdir(scratch)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    where = os.open(f"where.{number}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    faulthandler.register(WHERE_SIGNAL, file=where, all_threads=False)
    return base, base + 1


def _open_descriptors() -> list[int]:
    for folder in ("/proc/self/fd", "/dev/fd"):
        with contextlib.suppress(OSError):
            return [int(entry.name) for entry in Path(folder).iterdir()]
    return list(range(3, 256))


def _memory() -> tuple[int, int]:
    """Bytes of data and of all addresses that this process has by now; where nobody tells, most."""
    try:
        pages = [int(number) for number in Path("/proc/self/statm").read_text().split()]
    except OSError:
        return 0, 64 * GIB
    return pages[5] * resource.getpagesize(), pages[0] * resource.getpagesize()


def _limit(what: int, value: int) -> None:
    _, hard = resource.getrlimit(what)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(what, (value, value))


def subreaper() -> None:
    """Linux: orphans of our descendants become our children, and can be found."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


# ------------------------------------------------------------------ the processes below us


def children(pid: int) -> list[int]:
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return []


def descendants(pid: int) -> list[int]:
    """Its children, theirs, and so on. What dies meanwhile is simply not there."""
    found, todo = [], [pid]
    while todo:
        below = children(todo.pop())
        found += below
        todo += below
    return found


def resident_bytes(pid: int) -> int:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return 0
    return pages * resource.getpagesize()


def kill_all(ranks: Iterable[int]) -> None:
    """End every process below this one. A fork bomb is stopped before it is killed."""
    for pid in ranks:  # where there is no /proc, this is all that can be done
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
    while True:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        left = descendants(os.getpid())
        if not left:
            return
        for signal_ in (signal.SIGSTOP, signal.SIGKILL):
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal_)
        time.sleep(0.005)
