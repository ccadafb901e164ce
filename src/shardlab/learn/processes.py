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
GONE = (ProcessLookupError, PermissionError)


def confine(number: int, say: int, hear: int, output: int, scratch: str) -> tuple[int, int]:
    """Give this process a session, pipes, limits and an empty folder of its own; close all else."""
    os.setsid()
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    # Where nobody would write by accident. Everything else is closed: the guard's own pipes, too.
    base = 300 + secrets.randbelow(300)
    os.dup2(say, base)
    os.dup2(hear, base + 1)
    for fd in [int(entry.name) for entry in Path("/dev/fd").iterdir()]:
        if fd > 2 and fd not in (base, base + 1):
            with contextlib.suppress(OSError):
                os.close(fd)
    # Above what it has by now: torch itself has much, and more where it is built for GPUs. Not
    # every kernel counts the first.
    mapped, _, data = memory("self") or (64 * GIB, 0, 0)
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


def _limit(what: int, value: int) -> None:
    _, hard = resource.getrlimit(what)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(what, (value, value))


def subreaper() -> None:
    """Orphans of our descendants become our children, and can be found."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def memory(pid: int | str) -> tuple[int, int, int] | None:
    """Bytes of a process: all addresses, resident, data. None if it is gone, or without /proc."""
    try:
        pages = [int(number) for number in Path(f"/proc/{pid}/statm").read_text().split()]
        page = resource.getpagesize()
        return pages[0] * page, pages[1] * page, pages[5] * page
    except (OSError, IndexError):
        return None


def resident_bytes(pid: int) -> int:
    found = memory(pid)
    return found[1] if found else 0


def descendants(pid: int) -> list[int]:
    """Its children, their children, and so on. One that dies during the search is left out."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += [int(child), *descendants(int(child))]
    return found


def kill_all(ranks: Iterable[int]) -> None:
    """End every process below this one. A fork bomb is stopped before it is killed."""
    for pid in ranks:  # where there is no /proc, this is all that can be done
        with contextlib.suppress(*GONE):
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
                with contextlib.suppress(*GONE):
                    os.kill(pid, signal_)
        time.sleep(0.005)
