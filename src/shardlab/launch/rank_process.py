"""The process of one rank: it joins the world and runs what its parent sends."""

from __future__ import annotations

import contextlib
import importlib
import io
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import connection
from typing import Any

from shardlab.config import LaunchConfig
from shardlab.errors import Halt, Mistake, UsageError
from shardlab.launch.forking import fork_server, listen_again

# A function of a rank, named so that naming it imports nothing: "package.module:function".
# It is called as function(world, *args) and returns something that can be pickled.
Target = str | Callable[..., Any]


@dataclass(frozen=True)
class Seat:
    """Which rank a process is, and the file in which the ranks of its world meet."""

    rank: int
    size: int
    file: str


class Process:
    """The process of a rank, which this process has started."""

    def __init__(
        self,
        pipe: connection.Connection,
        launch: LaunchConfig,
        seat: Seat,
        prints_to: connection.Connection,
    ) -> None:
        self._process = fork_server().Process(
            target=_rank_main, args=(pipe, launch, seat, prints_to), name=f"rank {seat.rank}"
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid
        self.sentinel: Any = self._process.sentinel  # becomes ready when it ends

    def is_alive(self) -> bool:
        return self._process.is_alive()

    def join(self, timeout: float | None = None) -> int | None:
        """Its exit code; None if it has not ended in this time."""
        self._process.join(timeout)
        return self._process.exitcode

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it and whatever it started, now."""
        if self._process.is_alive():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            self._process.kill()
        self._process.join()


def _rank_main(
    pipe: connection.Connection,
    launch: LaunchConfig,
    seat: Seat,
    prints_to: connection.Connection,
) -> None:
    """A rank: join the world, then run what the parent sends until it sends None."""
    _print_to(prints_to)
    # A session of its own: Ctrl-C on the terminal reaches the parent alone, which ends us, and
    # what we start (data loaders) ends with our process group.
    os.setsid()
    listen_again()
    threading.Thread(target=_die_with_parent, daemon=True).start()
    from torch.distributed import FileStore

    from shardlab import world as worlds

    send_lock = threading.Lock()

    def send(kind: str, value: Any) -> None:
        with send_lock:
            pipe.send((kind, value))

    try:
        stay_on_loopback()
        rank, size = seat.rank, seat.size
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
        world = worlds.join(
            launch,
            rank,
            size,
            rank,  # on this host, which has all of them
            size,
            FileStore(_opened(seat.file)),
            tell=lambda event: send("event", event),
            pulse=lambda message: send("pulse", message),
        )
        send("result", None)
        while (message := pipe.recv()) is not None:
            target, args = message
            send("result", resolve(target)(world, *args))
        worlds.leave()
    except BaseException as error:
        with contextlib.suppress(OSError):
            send(*as_message(error))
            time.sleep(60)  # the parent ends us: to leave now would look like the failure to peers
        os._exit(1)


def _print_to(pipe: connection.Connection) -> None:
    """What is printed here, also from C, goes to the parent, line by line: a rank that is ended
    has no time to empty its buffers."""
    for number in (1, 2):
        os.dup2(pipe.fileno(), number)
    pipe.close()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)


def _die_with_parent() -> None:
    """No orphan: if the parent is gone, however it went, so are we."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)


def resolve(target: Target) -> Callable[..., Any]:
    if callable(target):
        return target
    module, _, name = target.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


def as_message(error: BaseException) -> tuple[str, Any]:
    """An exception as a rank reports it: refused input in a line, anything else in full."""
    if isinstance(error, UsageError):
        return "mistake" if isinstance(error, Mistake) else "usage", str(error)
    if isinstance(error, Halt):
        return "halt", error
    message = str(error).strip().partition("\n")[0]
    message = f"{type(error).__name__}: {message}" if message else type(error).__name__
    return "error", (message, "".join(traceback.format_exception(error)), time.time())


@contextlib.contextmanager
def private_file() -> Iterator[str]:
    """The path of a file in which the ranks of this machine meet; no other user can open it.

    Whoever can write to a store decides to whom a rank connects, and a port has no password. On
    Linux the file is in memory and has no name: nothing stays behind, and a disk may be full.
    """
    if hasattr(os, "memfd_create"):  # not in every Python for Linux
        with os.fdopen(os.memfd_create("shardlab")) as file:
            yield f"/proc/{os.getpid()}/fd/{file.fileno()}"
    else:
        with tempfile.NamedTemporaryFile(prefix="shardlab-") as named:
            yield named.name


def _opened(path: str) -> str:
    """The private file by a path that stays, or an error at once if the parent has closed it.

    FileStore looks for a file that is gone for five minutes, and holds the interpreter's lock
    meanwhile: not even ``_die_with_parent`` would run.
    """
    number = os.open(path, os.O_RDWR)
    return f"/proc/{os.getpid()}/fd/{number}" if path.startswith("/proc/") else path


def stay_on_loopback() -> None:
    """Ranks of one machine listen for each other on its loopback interface, and nowhere else.

    Gloo would take the interface of the host's name, and NCCL the first that is not loopback.
    """
    names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if names:
        use_interface(names[0])


def use_interface(name: str) -> None:
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ[variable] = name
