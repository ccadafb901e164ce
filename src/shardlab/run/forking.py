"""Where our processes come from: a fork server that has imported torch once, for all of them."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext

from shardlab.errors import UsageError

LONGEST_SOCKET = 107 if sys.platform == "linux" else 103  # bytes of a socket's path
SOCKET_NAME = len("/pymp-01234567/listener-01234567")  # what Python adds to TMPDIR


def fork_server(*also: str) -> ForkServerContext:
    """A context whose processes start with torch, and with the modules named."""
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
    context.set_forkserver_preload(["shardlab.run._preload", *also])
    return context


def start_server(*also: str) -> None:
    """Start the fork server now, unless it runs: every process that it forks has these modules."""
    fork_server(*also)
    forkserver.ensure_running()
