"""Ends a run in which nothing moves, and says which rank is missing.

In each rank a thread looks, once a second, where the rank is (``pulse``, and the ledger), and
reports that: through the pipe to the parent that started it; under a launcher, through the store to
rank 0. Who hears all reports decides. When no rank has moved for the limit, that is a hang.

A rank that is stuck in C with Python's lock held, or stopped, reports nothing: it is asked from
outside (``stacks``). The thread costs a rank some 50 microseconds a second.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from msgspec import convert

from shardlab import output
from shardlab.errors import Halt
from shardlab.guard import lost, nodes, stacks, verdict
from shardlab.guard.nodes import Nodes
from shardlab.guard.verdict import Seen
from shardlab.pulse import BUILDING, CHECKPOINT, LEFT, PROOF, PULSE

if TYPE_CHECKING:
    from shardlab.world import World

# To the parent: {"seen": Seen, "limit_s": …, "timeout_s": …}, or {"rank": 1, "end": True}.
Message = Mapping[str, Any]

# If the user gave no limit: long enough for a slow step, judged by the run itself.
LEAST_S = 60.0
TIMES_LONGEST = 10.0  # the longest that nothing moved so far
TICK_S = 1.0
_watched = itertools.count()
REMEMBERED = 256  # collectives that a rank which stands still reports


# ------------------------------------------------------------------ who decides


class Monitor:
    """Hears every rank's reports, and notices when all of them stand still."""

    def __init__(
        self,
        limit_s: float | None,
        timeout_s: float,  # after which a collective fails by itself, with a poor message
        clock: Callable[[], float] = time.monotonic,
        nodes: Nodes | None = None,
    ) -> None:
        self.nodes = nodes or Nodes()
        self.limit_s = limit_s
        self.most_s = 0.9 * timeout_s
        self.clock = clock
        self.last: dict[int, Seen] = {}
        self.heard: dict[int, float] = {}
        self.ended: set[int] = set()  # ranks that are done with the run
        self.moved = clock()  # when any rank last did
        self.longest_s = 0.0

    def hear(self, message: Message) -> None:
        if message.get("end"):
            self.end(message["rank"])
        else:
            self.see(message["seen"])

    def end(self, rank: int) -> None:
        if rank not in self.ended:  # in a store an old report looks like a new one
            self.ended.add(rank)
            self.moved = self.clock()

    def see(self, seen: Seen) -> None:
        before, now = self.last.get(seen.rank), self.clock()
        if before is not None and before.tick == seen.tick:
            return  # an old report from the store
        self.last[seen.rank], self.heard[seen.rank] = seen, now
        if before is None or before.beats != seen.beats:
            if before is not None and before.phase not in (BUILDING, CHECKPOINT):
                self.longest_s = max(self.longest_s, now - self.moved)
            self.moved = now

    @property
    def limit(self) -> float:
        """How long ranks may stand still where they are."""
        active = [seen for rank, seen in self.last.items() if rank not in self.ended]
        phases = {seen.phase for seen in active}
        # A download, or a user's model of any size, may take any time, unless a rank waits.
        if phases & {BUILDING, PROOF}:
            return self.most_s if any(seen.waits_for for seen in active) else math.inf
        if phases == {CHECKPOINT}:
            return self.most_s  # a slow disk is not a hang; a rank that never came to it is one
        if self.limit_s is not None:
            return self.limit_s
        if any(seen.steps_done == 0 for seen in active):
            return self.most_s  # a first step may compile, read or allocate for long
        return min(self.most_s, max(LEAST_S, TIMES_LONGEST * self.longest_s))

    def hang(self) -> Halt | None:
        """The verdict, if it is time for one."""
        stood_s = self.clock() - self.moved
        if self.last.keys() <= self.ended or stood_s < self.limit:
            return None
        looked_at = [self._looked_at(rank) for rank in sorted(self.last)]
        return verdict.judge(looked_at, stood_s, self.nodes)

    def gone(self) -> list[int]:
        """The ranks that have stopped reporting, and did not say that they leave."""
        now = self.clock()
        return [
            rank
            for rank, seen in sorted(self.last.items())
            if rank not in self.ended and now - self.heard[rank] > lost.SILENT_TICKS * seen.tick_s
        ]

    def silent(self) -> list[int]:
        """The processes of this host that do not answer."""
        here = socket.gethostname()
        return [s.pid for r, s in self.last.items() if not self._answers(r) and s.host == here]

    def _answers(self, rank: int) -> bool:
        # A rank alone on a busy core may be late; one that is stuck is late for most of the limit.
        allowed_s = max(3 * self.last[rank].tick_s, min(0.5 * self.limit, 15.0))
        return rank in self.ended or self.clock() - self.heard[rank] < allowed_s

    def _looked_at(self, rank: int) -> Seen:
        """A rank as it was last seen; one that does not answer is asked from outside."""
        seen = self.last[rank]
        if rank in self.ended:
            return replace(seen, phase=LEFT, waits_for=None)
        if self._answers(rank):
            return seen
        state, stack = None, []
        if seen.host == socket.gethostname():
            state = stacks.state_of(seen.pid)
            stack = stacks.ask(seen.pid, seen.fd) if state is None else []
        threads = {"main thread": stack} if stack else {}
        return replace(seen, answers=False, state=state, threads=threads)


# ------------------------------------------------------------------ in each rank


class Reporter(threading.Thread):
    """Reports where this rank is, every tick, from a thread of its own."""

    def __init__(
        self, world: World, limit_s: float | None, timeout_s: float, fd: int | None
    ) -> None:
        super().__init__(name="shardlab-watchdog", daemon=True)
        from shardlab.ledger import LEDGER  # torch: not in the parent

        self.ledger = LEDGER
        self.world = world
        self.limit_s = limit_s
        self.timeout_s = timeout_s
        self.tick_s = TICK_S if limit_s is None else min(TICK_S, limit_s / 4)
        self.fd = fd
        self.tick = 0
        self.stopping = threading.Event()
        self.speaking = threading.Lock()
        self._beats = -1
        self._moved = time.monotonic()
        self._cpu = time.process_time()

    def run(self) -> None:
        with contextlib.suppress(Exception):  # the parent or the store is gone: so are we, soon
            self.speak()
            while not self.stopping.wait(self.tick_s):
                self.speak()

    def stop(self) -> None:
        self.stopping.set()
        self.join(5.0)
        with contextlib.suppress(Exception):
            self.report(None)

    def explain(self, error: Exception) -> None:
        """Raise what is known about a failure and better than the failure itself."""

    def speak(self) -> None:
        """Called by the thread, and by the main thread when the loop begins: from then on silence
        does not mean a long download."""
        with self.speaking:
            self.report(self.message())

    def report(self, seen: Seen | None) -> None:
        """Tell the parent, through its pipe. None: this rank is done."""
        assert self.world.pulse is not None
        about = {"rank": self.world.rank, "end": True} if seen is None else {"seen": seen}
        self.world.pulse({**about, "limit_s": self.limit_s, "timeout_s": self.timeout_s})

    def message(self) -> Seen:
        ledger, now = self.ledger, time.monotonic()
        beats = PULSE.beats + ledger.calls + ledger.waited
        if beats != self._beats:
            self._beats, self._moved = beats, now
        cpu, before = time.process_time(), self._cpu
        self._cpu = cpu
        self.tick += 1
        seen = Seen(
            rank=self.world.rank,
            phase=PULSE.phase,
            step=PULSE.step,
            steps_done=PULSE.steps_done,
            beats=beats,
            calls=ledger.calls,
            turns={channel: calls for channel, (calls, _) in list(ledger.channels.items())},
            waits_for=ledger.waiting,
            cpu=(cpu - before) / self.tick_s,
            tick=self.tick,
            tick_s=self.tick_s,
            pid=os.getpid(),
            host=socket.gethostname(),
            fd=self.fd,
        )
        patience_s = 5.0 if self.limit_s is None else self.limit_s / 3
        if now - self._moved < patience_s:
            return seen
        return replace(  # a verdict may need it soon
            seen,
            recent=tuple(ledger.recent)[-REMEMBERED:],
            own=pytorchs_own(),
            threads=stacks.of_threads(leave_out=threading.get_ident()),
        )


class StoreReporter(Reporter):
    """Under a launcher the ranks report to their store, and rank 0 judges.

    The store is on one of the nodes. A second thread notices when it does not answer.
    """

    def __init__(
        self, world: World, limit_s: float | None, timeout_s: float, fd: int | None
    ) -> None:
        super().__init__(world, limit_s, timeout_s, fd)
        from shardlab.guard.side_store import endpoint, side_store

        # A store of its own: the main thread may be waiting in the other one, holding its lock.
        # And keys of its own: ranks may be watched in one job after the other.
        self.store = side_store(f"watchdog {world.share(next(_watched))}")
        self.nodes = nodes.CURRENT
        self.endpoint = endpoint(self.store)
        self.monitor = Monitor(limit_s, timeout_s, nodes=self.nodes)  # rank 0's hears all ranks
        self.answered = time.monotonic()  # when the store last did
        self.closed = ""  # how the connection to it ended
        self.ending = threading.Lock()

    def run(self) -> None:
        if self.nodes.are_several:
            name = "shardlab-watchdog-link"
            threading.Thread(target=self._watch_link, name=name, daemon=True).start()
        try:
            self.speak()
            while not self.stopping.wait(self.tick_s):
                self.speak()
        except Exception as error:  # the store is gone: so are we, soon
            self.closed = str(error).partition("\n")[0]

    def report(self, seen: Seen | None) -> None:
        text = json.dumps(None if seen is None else asdict(seen))
        self.store.set(f"rank {self.world.rank}", text)
        if seen is None:
            return
        self.monitor.see(seen)
        if self.world.rank == 0:
            self._hear_others()
            if (halt := self.monitor.hang()) is not None:
                self._end_all(halt)
        elif self.store.check(["verdict"]):
            self._end_as_told()
        self.answered = time.monotonic()

    def _hear_others(self) -> None:
        keys = {f"rank {rank}": rank for rank in range(1, self.world.size)}
        if keys and not self.store.check(list(keys)):
            keys = {key: rank for key, rank in keys.items() if self.store.check([key])}
        found = self.store.multi_get(list(keys)) if keys else []
        for rank, text in zip(keys.values(), found, strict=True):
            if (seen := convert(json.loads(text), Seen | None)) is None:
                self.monitor.end(rank)
            else:
                self.monitor.see(seen)

    def _end_all(self, halt: Halt) -> None:
        """Tell the verdict, here and on the other nodes, and end this rank."""
        self.nodes.locate(halt)
        self.store.set("verdict", str(halt))
        self.world.tell({"halted": halt})
        output.error(str(halt), halt.traceback)
        for pid in self.monitor.silent():  # torchrun asks politely, for half a minute
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, 9)
        # The store may end with this rank, or with its agent: not before all nodes have heard.
        gone = self.nodes.whole(self.monitor.gone())
        others = len(self.nodes.host_of) - len(gone) - 1
        limit = time.monotonic() + lost.SILENT_TICKS * self.tick_s
        while time.monotonic() < limit and self.store.add("nodes that have heard", 0) < others:
            time.sleep(0.05)
        os._exit(1)  # the main thread is stuck: nothing else ends it

    def _end_as_told(self) -> None:
        """End this rank; the first of another node than rank 0's prints the verdict there."""
        here = self.nodes.here
        is_other = self.nodes.are_several and here != self.nodes.node_of[0]
        if is_other and self.store.add(f"node {here} has heard", 1) == 1:
            output.error(self.store.get("verdict").decode())
            self.store.add("nodes that have heard", 1)
        os._exit(1)

    # -------------------------------------------------------------- without the store

    def explain(self, error: Exception) -> None:
        """A connection to another rank broke: wait until it is known who is gone."""
        if not self.nodes.are_several or not lost.is_lost_peer(error):
            return
        time.sleep((lost.SILENT_TICKS + 1) * self.tick_s)
        if why := self._why_no_store():
            self._end_alone(why)
        if gone := self.monitor.gone():  # rank 0 knows
            raise lost.of_ranks(gone, self.nodes, error) from error

    def _why_no_store(self) -> str:
        """Why the store cannot be asked; empty if it can."""
        if self.closed:
            return f"the store there is gone ({self.closed})"
        silent_s = time.monotonic() - self.answered
        if silent_s > lost.SILENT_TICKS * self.tick_s:
            return f"the store there has not answered for {silent_s:.0f} s"
        return ""

    def _watch_link(self) -> None:
        """End this rank when it stands still and the store, through which it would hear a verdict,
        has been silent for as long."""
        beats, moved = -1, time.monotonic()
        while not self.stopping.wait(self.tick_s):
            now, before, limit = time.monotonic(), beats, self.monitor.limit
            beats = PULSE.beats + self.ledger.calls + self.ledger.waited
            if beats != before:
                moved = now
            is_over = self.closed or now - self.answered > limit
            if is_over and now - moved > limit and (why := self._why_no_store()):
                self._end_alone(why)

    def _end_alone(self, why: str) -> None:
        """The first rank of this node speaks for it, and notes it in the run folder."""
        self.ending.acquire()  # never released: one thread ends the process
        if self.world.local_rank == 0:
            stood_s = time.monotonic() - self._moved
            halt = lost.of_store(self.nodes, self.endpoint, self.message(), stood_s, why)
            self.nodes.locate(halt)
            output.error(str(halt))
            # The folder may be on the other side too.
            event = ({"halted": halt, "unless_told": True},)
            telling = threading.Thread(target=self.world.tell, args=event, daemon=True)
            telling.start()
            telling.join(lost.TELL_S)
        time.sleep(lost.TELL_S)  # a launcher ends the others when the first has left
        os._exit(1)  # the main thread may be stuck in a collective: nothing else ends it


@contextmanager
def watching(world: World, limit_s: float | None, timeout_s: float) -> Iterator[None]:
    """Watches what is done inside. ``limit_s`` 0 turns it off."""
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
        except Exception as error:
            reporter.explain(error)
            raise
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
