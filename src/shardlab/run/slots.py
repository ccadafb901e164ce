"""Ranks on several nodes for commands that start ranks again and again: compare, prove, throughput.

A launcher (torchrun, srun, mpirun) starts such a command once for each rank. The first of these
processes leads: it runs the command, and it alone writes files. Each other process is a slot: it
starts a rank when the leader asks for one, says how it ended, and ends it when asked. Every rank
connects to the leader itself, which sends it what it is to run and hears its results.

    leader                      slot of rank r                 rank r
    start(launch, seat)   --->  starts the process       --->  connects to the leader
    join, signal, kill    --->  does so, and answers
    None                  --->  leaves

What they send is pickled, so both ends show first that they know a key, which only the launcher's
processes can read in their store.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable
from multiprocessing import connection
from typing import Any, NoReturn

from shardlab.config import LaunchConfig
from shardlab.errors import NodeLost, UsageError
from shardlab.run.child import Line, Process, Seat, keep_alive
from shardlab.run.place import LOOPBACK, Place

ANSWER_S = 20.0  # beyond the time it was given, after which a slot that is silent is lost
NAME = "leader"  # the key in the store

LEADER: Leader | None = None  # of this process, if it leads


class Leader:
    """The first of a launcher's processes. It starts ranks in the slots of the others."""

    def __init__(
        self, place: Place, store: Any, address: str, listens: tuple[int, str], timeout_s: float
    ) -> None:
        self.place = place
        self._address, self._listens = address, listens
        self._key = secrets.token_bytes(32)
        self._visits = itertools.count()
        self._arrived: dict[tuple[Any, ...], connection.Connection] = {}
        self._changed = threading.Condition()
        self._listening = socket.socket(listens[0])
        self._listening.bind((listens[1], 0))
        self._listening.listen(128)
        self._port: int = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()
        store.set(NAME, json.dumps([address, self._port, self._key.hex()]))
        limit = time.monotonic() + timeout_s
        self._slots = {
            rank: self._await(("slot", rank), limit - time.monotonic())
            for rank in range(1, place.size)
        }
        # Where each rank sits: (local rank, ranks on its node, host).
        here = _seat_of(place)
        self._seats = [here, *(self._slots[rank].recv() for rank in range(1, place.size))]
        atexit.register(self.close)

    def start(
        self, launch: LaunchConfig, rank: int, size: int
    ) -> tuple[connection.Connection, Process | Remote]:
        """A rank of a world of the first ``size``: what it says, and its process."""
        if size > self.place.size:
            raise UsageError(
                f"{size} ranks were asked for, but {self.place.launcher} has started "
                f"{self.place.size}"
            )
        local_rank, local_size, host = self._seats[rank]
        there = min(local_size, size - (rank - local_rank))  # a node has neighbouring ranks
        seat = Seat(rank, size, local_rank, there, "", self._address, self._listens)
        greeting = ("rank", next(self._visits), rank)
        line = Line(self._address, self._port, self._key, greeting)
        process: Process | Remote
        if rank == 0:
            line = Line(self._listens[1] or LOOPBACK, self._port, self._key, greeting)
            process = Process(line, launch, seat)
        else:
            process = Remote(self._slots[rank], host, line, launch, seat)
        return self._await(greeting, ANSWER_S), process

    def close(self) -> None:
        for control in self._slots.values():
            with contextlib.suppress(OSError):
                control.send(None)
        self._listening.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                joined, _ = self._listening.accept()
                threading.Thread(target=self._welcome, args=(joined,), daemon=True).start()

    def _welcome(self, joined: socket.socket) -> None:
        """Hear who has connected. Whoever does not know the key is left alone."""
        keep_alive(joined)
        pipe = connection.Connection(joined.detach())
        try:
            connection.deliver_challenge(pipe, self._key)
            connection.answer_challenge(pipe, self._key)
            greeting = pipe.recv()
        except Exception:
            pipe.close()
            return
        with self._changed:
            self._arrived[greeting] = pipe
            self._changed.notify_all()

    def _await(self, greeting: tuple[Any, ...], seconds: float) -> connection.Connection:
        with self._changed:
            if not self._changed.wait_for(lambda: greeting in self._arrived, max(0.0, seconds)):
                who = f"the {greeting[0]} of rank {greeting[-1]}"
                raise UsageError(
                    f"{who} did not reach the first process at {self._address}, port {self._port}"
                )
            return self._arrived.pop(greeting)


class Remote:
    """The process of a rank that a slot has started; the slot does what is asked of it."""

    def __init__(
        self,
        control: connection.Connection,
        host: str,
        line: Line,
        launch: LaunchConfig,
        seat: Seat,
    ) -> None:
        self._control, self._host, self._rank = control, host, seat.rank
        self._is_lost = False  # the slot does not answer any more
        # Nothing comes from the slot unasked: it becomes ready when the slot is gone.
        self.sentinel: Any = control
        self.pid: int = self._ask("start", line, launch, seat)
        self.refuse_lost()

    def is_alive(self) -> bool:
        return bool(self._ask("is_alive"))

    def join(self, timeout: float | None = None) -> int | None:
        code: int | None = self._ask("join", timeout, within=timeout or 0.0)
        return code

    def signal(self, number: int) -> None:
        self._ask("signal", number)

    def kill(self) -> None:
        self._ask("kill")

    def refuse_lost(self) -> None:
        if self._is_lost:
            raise NodeLost(
                f"rank {self._rank} on {self._host}: the launcher's process there does not answer "
                "any more"
            )

    def _ask(self, word: str, *args: Any, within: float = 0.0) -> Any:
        """The slot's answer; None if it is gone."""
        if self._is_lost:
            return None
        with contextlib.suppress(OSError, EOFError):
            self._control.send((word, *args))
            if self._control.poll(within + ANSWER_S):
                return self._control.recv()
        self._is_lost = True
        return None


def _seat_of(place: Place) -> tuple[int, int, str]:
    return place.local_rank, place.local_size, socket.gethostname()


def serve(place: Place, store: Any) -> NoReturn:
    """Be the slot of this process's rank until the leader has finished."""
    # Ctrl-C in a terminal reaches every process; the leader decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    address, port, key = json.loads(store.get(NAME))
    control = Line(address, port, bytes.fromhex(key), ("slot", place.rank)).open()
    control.send(_seat_of(place))
    process: Process | None = None
    try:
        while (message := control.recv()) is not None:
            word, *args = message
            if word == "start":
                process = Process(*args)
                control.send(process.pid)
            else:
                assert process is not None
                does: dict[str, Callable[..., Any]] = {
                    "is_alive": process.is_alive,
                    "join": process.join,
                    "signal": process.signal,
                    "kill": process.kill,
                }
                control.send(does[word](*args))
    except (EOFError, OSError):
        raise SystemExit(1) from None  # the leader is gone
    finally:
        if process is not None:
            process.kill()
    raise SystemExit(0)
