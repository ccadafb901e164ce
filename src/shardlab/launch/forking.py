"""Where our processes come from: a fork server that has imported torch once, for all of them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext

from shardlab.errors import UsageError

LONGEST_SOCKET = 107 if sys.platform == "linux" else 103  # bytes of a socket's path
SOCKET_NAME = len("/pymp-01234567/listener-01234567")  # what Python adds to TMPDIR


def fork_server(*also: str) -> ForkServerContext:
    """A context whose processes start with torch, and with the modules named.

    The server and what it forks do not hear Ctrl-C, which the terminal sends to all of them: this
    process ends them. A rank listens again once it has started its own session.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise UsageError(
            "this script starts ranks while a rank is importing it: put what it does below "
            'if __name__ == "__main__":'
        )
    place = tempfile.gettempdir()
    if len(os.fsencode(place)) + SOCKET_NAME > LONGEST_SOCKET:
        raise UsageError(
            f"the path of the folder for temporary files is too long for the socket at which "
            f"processes are started: {place}; name one of at most {LONGEST_SOCKET - SOCKET_NAME} "
            f"characters, as in TMPDIR=/tmp"
        )
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["shardlab.training._preload", *also])
    resource_tracker.ensure_running()  # else the server starts it, and then unblocks the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # the server inherits it
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return context


def listen_again() -> None:
    """Hear SIGINT again in a process of the fork server; what came until now is dropped."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    signal.signal(signal.SIGINT, signal.default_int_handler)


def end_server() -> None:
    """End the fork server, if there is one, because this process ends.

    It would leave by itself, but only after it has imported torch, and has forked the rank it was
    asked for when Ctrl-C came. For those seconds it would hold our stdout and stderr open.
    """
    pid: int | None = getattr(forkserver._forkserver, "_forkserver_pid", None)
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
