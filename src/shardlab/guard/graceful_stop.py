"""A run that is asked to stop (Ctrl-C, SIGTERM) ends after a step that all its ranks agree on.

A rank cannot simply leave the loop: the others would wait for it in their next collective. So each
rank tells how many steps it has begun, and begins no other until it knows the numbers of all; then
it continues to the largest of them, and stops there. No rank has begun more, and a rank that has
begun fewer catches up. Each step takes a lock, for less than a microsecond; and a thread asks the
store twice a second whether another rank was signalled.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from shardlab.errors import Halt

if TYPE_CHECKING:
    from torch.distributed import Store

    from shardlab.world import World

SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Slurm sends a signal to every process of a job, and torchrun's agent passes it on: one request.
SAME_S = 2.0
POLL_S = 0.5
AGREE_S = 10.0  # how long ranks wait for each other's answer; torchrun ends them after 30 s


def heeded() -> list[int]:
    """The signals that this process does not ignore; a shell's background ignores Ctrl-C."""
    return [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]


class Stop:
    """One rank's part in the agreement, for one run. ``ask`` may be called by any thread."""

    def __init__(self, store: Store, world: World) -> None:
        self.world = world
        self.is_on = False  # the run has a folder, and can save what it has
        self.signal: int | None = None  # why it was asked to stop
        self.begun = 0  # steps
        self.is_stopped = False  # the loop ended because of it
        self._target: int | None = None  # steps to begin before it stops
        self._asked = False
        self._changed = threading.Condition()
        self._wake = threading.Event()
        self._closed = False
        self._store = store

    def ask(self, number: int) -> None:
        """Ask the run to stop, because this signal came."""
        if self.signal is None:
            self.signal = number
        self._wake.set()

    @property
    def reason(self) -> str:
        return "" if self.signal is None else signal.Signals(self.signal).name

    def may_begin(self) -> bool:
        """Whether to begin another step. It is False on every rank before the same step."""
        with self._changed:
            if self._asked:
                self._changed.wait_for(lambda: self._target is not None, AGREE_S)
                if self._target is None:
                    what = f"when it was asked to stop, not every rank answered in {AGREE_S:g} s"
                    raise Halt("interrupted", what, self.world.rank)
                if self.begun >= self._target:
                    self.is_stopped = True
                    return False
            self.begun += 1
            return True

    # -------------------------------------------------------------- in a thread

    def _listen(self) -> None:
        with suppress(Exception):  # the store is gone, and with it the other ranks
            while not self._wake.wait(POLL_S):
                if self._store.check(["asked"]):
                    self.ask(int(self._store.get("asked")))
            if not self._closed:
                self._agree()

    def _agree(self) -> None:
        with self._changed:
            self._asked = True
            begun = self.begun
        assert self.signal is not None
        self._store.set("asked", str(self.signal))
        self._store.set(f"rank {self.world.rank}", str(begun))
        if self.world.rank == 0:
            self.world.tell({"stopping": self.reason})
        keys = [f"rank {rank}" for rank in range(self.world.size)]
        while not self._closed and not self._store.check(keys):
            time.sleep(0.02)
        if not self._closed:
            target = max(int(self._store.get(key)) for key in keys)
            with self._changed:
                self._target = target
                self._changed.notify_all()


_runs = 0
CURRENT: Stop | None = None  # the run in this process, if there is one


@contextmanager
def watching(world: World) -> Iterator[Stop]:
    """Around a run that can be asked to stop. All ranks enter it together."""
    from shardlab.guard.side_store import side_store

    global CURRENT, _runs
    _runs += 1  # ranks may train one run after the other
    stop = Stop(side_store(f"stop {_runs}"), world)
    thread = threading.Thread(target=stop._listen, name="shardlab-stop", daemon=True)
    thread.start()
    CURRENT = stop
    try:
        yield stop
    finally:
        CURRENT = None
        stop._closed = True
        stop._wake.set()
        thread.join(5.0)


@contextmanager
def heard(handle: Callable[[int], None]) -> Iterator[None]:
    """Calls ``handle`` with the number of each signal that comes, in a thread.

    The main thread may be waiting in C, where Python runs no handler; but the number of the signal
    still comes, through a pipe.
    """
    numbers, sender = os.pipe()
    os.set_blocking(sender, False)

    def listen() -> None:
        while number := os.read(numbers, 1):
            if number[0] in SIGNALS:
                handle(number[0])
        os.close(numbers)

    def in_child() -> None:
        """A forked process (a data loader's worker) handles its own signals."""
        if is_on:
            signal.set_wakeup_fd(-1)
            for number in before:
                signal.signal(number, signal.SIG_DFL)

    is_on = True
    os.register_at_fork(after_in_child=in_child)
    threading.Thread(target=listen, name="shardlab-signals", daemon=True).start()
    before: dict[int, Any] = {n: signal.signal(n, lambda *_: None) for n in heeded()}
    pipe_before = signal.set_wakeup_fd(sender, warn_on_full_buffer=False)
    try:
        yield
    finally:
        is_on = False
        signal.set_wakeup_fd(pipe_before)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(sender)  # the thread reads the end, and leaves
