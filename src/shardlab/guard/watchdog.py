"""Ends a run in which nothing moves, and says who is missing.

In each rank a thread looks, once a second, where the rank is (``pulse``, and the ledger), and says
so: through the pipe to the parent that started it; under torchrun, through the store to all ranks.
Who hears it all decides. When no rank has moved for the limit, that is a hang.

A rank that is stuck in C with Python's lock held, or stopped, sends nothing: whoever decides asks
it from outside (``stacks``). The thread costs a rank some 50 microseconds a second.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shardlab.errors import Halt
from shardlab.guard import stacks, verdict
from shardlab.guard.stacks import Frame
from shardlab.guard.verdict import Seen
from shardlab.pulse import BUILDING, CHECKPOINT, LEFT, PROOF, PULSE, Call

if TYPE_CHECKING:
    from shardlab.world import World

Message = Mapping[str, Any]

# Without a limit of the user's: long enough for a slow step, as seen in the run itself.
LEAST_S = 60.0
TIMES_LONGEST = 10.0  # the longest that nothing moved so far
TICK_S = 1.0
REMEMBERED = 256  # collectives that a rank which stands still tells of


# ------------------------------------------------------------------ who decides


class Monitor:
    """Hears every rank's messages, and tells when all of them stand still."""

    def __init__(
        self,
        limit_s: float | None,
        timeout_s: float,  # after which a collective fails by itself, and says little
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limit_s = limit_s
        self.most_s = 0.9 * timeout_s
        self.clock = clock
        self.last: dict[int, Message] = {}
        self.heard: dict[int, float] = {}
        self.ended: set[int] = set()  # ranks that are done with the run
        self.moved = clock()  # when any rank last did
        self.longest_s = 0.0

    def hear(self, message: Message) -> None:
        rank, now = message["rank"], self.clock()
        if message.get("end"):
            self.ended.add(rank)
            self.moved = now
            return
        before = self.last.get(rank)
        if before is not None and before["tick"] == message["tick"]:
            return  # in a store an old message looks like a new one
        self.last[rank], self.heard[rank] = message, now
        if before is None or before["beats"] != message["beats"]:
            if before is not None and before["phase"] not in (BUILDING, CHECKPOINT):
                self.longest_s = max(self.longest_s, now - self.moved)
            self.moved = now

    @property
    def limit(self) -> float:
        """How long ranks may stand still, being where they are."""
        active = [m for rank, m in self.last.items() if rank not in self.ended]
        phases = {m["phase"] for m in active}
        # A download, or a user's model of any size, has no end that we know of, unless one waits.
        if phases & {BUILDING, PROOF}:
            return self.most_s if any(m["waits_for"] for m in active) else math.inf
        if phases == {CHECKPOINT}:
            return self.most_s  # a slow disk is not a hang; a rank that never came to it is one
        if self.limit_s is not None:
            return self.limit_s
        if any(m["steps_done"] == 0 for m in active):
            return self.most_s  # a first step may compile, read or allocate for long
        return min(self.most_s, max(LEAST_S, TIMES_LONGEST * self.longest_s))

    def hang(self, patience_s: float = 0.0) -> Halt | None:
        """The verdict, if it is time for one."""
        stood_s = self.clock() - self.moved
        if self.last.keys() <= self.ended or stood_s < self.limit + patience_s:
            return None
        return verdict.judge([self._seen(rank) for rank in sorted(self.last)], stood_s)

    def silent(self) -> list[int]:
        """The processes of this host that do not answer."""
        here = socket.gethostname()
        return [
            m["pid"] for r, m in self.last.items() if not self._answers(r) and m["host"] == here
        ]

    def _answers(self, rank: int) -> bool:
        # A rank alone on a busy core may be late; one that is stuck is late for most of the limit.
        if rank in self.ended:
            return True
        tick_s: float = self.last[rank]["tick_s"]
        return self.clock() - self.heard[rank] < max(3 * tick_s, min(0.5 * self.limit, 15.0))

    def _seen(self, rank: int) -> Seen:
        message = self.last[rank]
        seen = seen_of(message)
        if rank in self.ended:
            return replace(seen, phase=LEFT, waits_for=None)
        if self._answers(rank):
            return seen
        state, stack = None, []
        if message["host"] == socket.gethostname():
            state = stacks.state_of(message["pid"])
            if state is None:
                stack = stacks.ask(message["pid"], message["fd"])
        threads = {"main thread": stack} if stack else {}
        return replace(seen, answers=False, state=state, threads=threads)


def seen_of(message: Message) -> Seen:
    """A message as the verdict wants it."""
    waits = message["waits_for"]
    return Seen(
        rank=message["rank"],
        phase=message["phase"],
        step=message["step"],
        steps_done=message["steps_done"],
        beats=message["beats"],
        calls=message["calls"],
        waits_for=None if waits is None else Call(*waits),
        recent=tuple(Call(*call) for call in message.get("recent", ())),
        threads={
            name: [Frame(*frame) for frame in stack]
            for name, stack in message.get("threads", {}).items()
        },
        cpu=message["cpu"],
        own=message.get("own"),
    )


# ------------------------------------------------------------------ in each rank


class Reporter(threading.Thread):
    """Says where this rank is, every tick, from a thread of its own."""

    def __init__(
        self, world: World, limit_s: float | None, timeout_s: float, fd: int | None
    ) -> None:
        super().__init__(name="shardlab-watchdog", daemon=True)
        from shardlab.comm import LEDGER  # torch: not in the parent

        self.ledger = LEDGER
        self.world = world
        self.limit_s = limit_s
        self.timeout_s = timeout_s
        self.tick_s = TICK_S if limit_s is None else min(TICK_S, limit_s / 4)
        self.fd = fd
        self.tick = 0
        self.stopping = threading.Event()
        self.speaking = threading.Lock()
        self.failed: BaseException | None = None
        self._beats = -1
        self._moved = time.monotonic()
        self._cpu = time.process_time()

    def run(self) -> None:
        try:
            self.speak()
            while not self.stopping.wait(self.tick_s):
                self.speak()
        except (BrokenPipeError, OSError):
            pass  # the parent is gone, and we with it
        except Exception as error:
            self.failed = error

    def stop(self) -> None:
        self.stopping.set()
        self.join(5.0)
        with contextlib.suppress(Exception):
            self.report({"rank": self.world.rank, "end": True})

    def speak(self) -> None:
        """In the thread; and from the main thread when the loop begins, after which silence is not
        the long silence of a download."""
        with self.speaking:
            self.report(self.message())

    def report(self, message: Message) -> None:
        """To the parent, through its pipe."""
        assert self.world.pulse is not None
        self.world.pulse({**message, "limit_s": self.limit_s, "timeout_s": self.timeout_s})

    def message(self) -> dict[str, Any]:
        ledger, now = self.ledger, time.monotonic()
        beats = PULSE.beats + ledger.calls + ledger.waited
        if beats != self._beats:
            self._beats, self._moved = beats, now
        cpu, before = time.process_time(), self._cpu
        self._cpu = cpu
        self.tick += 1
        message = {
            "rank": self.world.rank,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "fd": self.fd,
            "tick": self.tick,
            "tick_s": self.tick_s,
            "phase": PULSE.phase,
            "step": PULSE.step,
            "steps_done": PULSE.steps_done,
            "beats": beats,
            "calls": ledger.calls,
            "waits_for": None if ledger.waiting is None else ledger.call_of(ledger.waiting),
            "cpu": (cpu - before) / self.tick_s,
        }
        patience_s = 5.0 if self.limit_s is None else self.limit_s / 3
        if now - self._moved >= patience_s:  # it may be wanted soon
            message["recent"] = list(ledger.recent)[-REMEMBERED:]
            message["own"] = pytorchs_own()
            message["threads"] = {
                name: [(f.file, f.line, f.function) for f in stack]
                for name, stack in stacks.of_threads({threading.get_ident()}).items()
            }
        return message


class StoreReporter(Reporter):
    """Under torchrun: every rank tells all, and every rank decides, the first of them for all."""

    def __init__(
        self, world: World, limit_s: float | None, timeout_s: float, fd: int | None
    ) -> None:
        super().__init__(world, limit_s, timeout_s, fd)
        from shardlab.guard.side import side_store

        # A store of its own: the main thread may be waiting in the other one, holding its lock.
        self.store = side_store("watchdog")
        if limit_s is None or world.size > 64:
            self.tick_s = max(self.tick_s, world.size / 64)  # the store answers size² questions
        self.monitor = Monitor(limit_s, timeout_s)
        self.present: set[int] = set()

    def report(self, message: Message) -> None:
        self.store.set(f"rank {self.world.rank}", json.dumps(message))
        if message.get("end"):
            return
        others = [r for r in range(self.world.size) if r != self.world.rank]
        for rank in others:
            if rank not in self.present and self.store.check([f"rank {rank}"]):
                self.present.add(rank)
        self.monitor.hear(message)
        for rank in sorted(self.present):
            self.monitor.hear(json.loads(self.store.get(f"rank {rank}")))
        # One after the other, so that one verdict is written; the next if the first cannot.
        halt = self.monitor.hang(patience_s=0.5 * min(self.world.rank, 4))
        if halt is not None or self.store.check(["hung"]):
            self._end(halt)

    def _end(self, halt: Halt | None) -> None:
        if halt is not None and self.store.add("hung", 1) == 1:
            self.world.tell({"halted": halt})
            print(f"{halt.traceback}error: {halt}", file=sys.stderr, flush=True)
            for pid in self.monitor.silent():  # torchrun asks politely, for half a minute
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, 9)
        os._exit(1)  # the main thread is stuck: nothing else ends it


@contextmanager
def watching(world: World, limit_s: float | None, timeout_s: float) -> Iterator[None]:
    """Watches what is done inside; ``limit_s`` 0: nobody does."""
    PULSE.reset()
    if limit_s == 0:
        yield
        return
    with stacks.Answering() as answering:
        kind = StoreReporter if world.pulse is None else Reporter
        reporter = kind(world, limit_s, timeout_s, answering.fd)
        reporter.start()
        PULSE.on_loop = reporter.speak
        try:
            yield
        finally:
            PULSE.on_loop = None
            reporter.stop()


def pytorchs_own() -> dict[str, Any] | None:
    """What PyTorch's flight recorder knows of the process group, for strategies that call their
    collectives from C++. None where it keeps no record."""
    from torch._C import _distributed_c10d as c10d

    dump = getattr(c10d, "_dump_fr_trace_json", None)
    if dump is None:
        return None
    try:
        found = json.loads(dump(False, False)).get("pg_status", {})
    except Exception:
        return None
    groups = [g for g in found.values() if int(g.get("last_enqueued_collective", -1)) >= 0]
    if not groups:
        return None
    return {
        "entered": sum(int(g["last_enqueued_collective"]) for g in groups),
        "finished": sum(int(g["last_completed_collective"]) for g in groups),
    }
