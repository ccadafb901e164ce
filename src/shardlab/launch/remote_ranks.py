"""Ranks for commands that run many short jobs under a launcher: compare, prove, throughput.

torchrun, srun or mpirun starts such a command once for each rank. The first of these processes
leads: it runs the command, and it alone writes files. The others wait for jobs. A job is a function
and its arguments; the leader puts it into the store of the ranks, all of them run it, the leader
too, and put their results there.

No process is started again. After a job that failed all ranks leave their world and join a new one;
if one of them does not even answer, the command ends.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import itertools
import signal
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, NoReturn

from shardlab import seal
from shardlab.config import LaunchConfig
from shardlab.errors import Interrupted, Late, NodeLost, UsageError
from shardlab.guard import nodes
from shardlab.launch import rank_process
from shardlab.launch.launcher_env import Place
from shardlab.launch.rank_process import Target
from shardlab.launch.ranks import Failure, first_cause

ANSWER_S = 20.0  # after a failure, how long the other ranks have to notice that it failed
FOREVER = timedelta(days=30)

LEADER: Leader | None = None  # of this process, if it leads


class Leader:
    """The first of a launcher's processes: rank 0 of every job."""

    def __init__(self, place: Place, store: Any) -> None:
        self.place, self.store = place, store
        self._world: tuple[LaunchConfig, int] | None = None  # that the ranks have joined
        self._member = _Member(place, store)
        self._sent = itertools.count()
        self._lost = ""  # why no more jobs can be run
        atexit.register(self._send, "end")

    def run(
        self, launch: LaunchConfig, size: int, target: Target, args: Any, deadline_s: float | None
    ) -> list[Any]:
        """``target(world, *args)`` on the first ``size`` ranks; the results in rank order."""
        if size > self.place.size:
            raise UsageError(
                f"{size} ranks were asked for, but {self.place.launcher} has started "
                f"{self.place.size}"
            )
        if self._world != (launch, size):
            self._do(self.place.size, "join", launch, size)
            self._world = launch, size
        return self._do(size, "run", target, args, deadline_s=deadline_s)

    def renew(self) -> None:
        """The next job runs in a new world."""
        self._world = None

    def _send(self, *message: Any) -> int:
        number = next(self._sent)
        self.store.set(f"job {number}", seal.dumps(message))
        return number

    def _do(self, size: int, *message: Any, deadline_s: float | None = None) -> list[Any]:
        if self._lost:
            raise NodeLost(self._lost)
        limit = None if deadline_s is None else time.monotonic() + deadline_s
        number = self._send(*message)
        try:
            with _alarm(deadline_s):
                answers = {0: self._member.do(*message)}
                self._gather(answers, number, size, limit)
        except Late:
            self._lost = "a job took too long, and its ranks cannot be started again"
            raise
        except KeyboardInterrupt:
            self._lost = "the job was interrupted"
            raise Interrupted from None
        failures = [
            Failure.of(r, *answer) for r, answer in answers.items() if answer[0] != "result"
        ]
        if failures:
            self.renew()
        silent = [rank for rank in range(size) if rank not in answers]
        if silent:
            who = nodes.CURRENT.located(nodes.names(silent))
            cause = f" after this failure: {first_cause(failures, size)}" if failures else ""
            self._lost = f"{who} did not answer within {ANSWER_S:g} s{cause}"
            raise NodeLost(self._lost)
        if failures:
            raise first_cause(failures, size)
        return [value for _, (_, value) in sorted(answers.items())]

    def _gather(
        self, answers: dict[int, tuple[str, Any]], number: int, size: int, limit: float | None
    ) -> None:
        """Wait for the others; once a rank has failed, for a short time."""
        failed_at: float | None = None
        while len(answers) < size:
            for rank in range(1, size):
                key = f"answer {number} {rank}"
                if rank not in answers and self.store.check([key]):
                    answers[rank] = seal.loads(self.store.get(key))
                    self.store.delete_key(key)
            now = time.monotonic()
            if failed_at is None and any(kind != "result" for kind, _ in answers.values()):
                failed_at = now
            if failed_at is not None and now - failed_at > ANSWER_S:
                return
            if limit is not None and now > limit:
                late = [rank for rank in range(size) if rank not in answers]
                raise Late(late[0], f"no answer in time from {nodes.names(late)}")
            time.sleep(0.002)


@contextlib.contextmanager
def _alarm(deadline_s: float | None) -> Iterator[None]:
    """Raises ``Late`` in the main thread, which runs a job itself, when the time is over."""
    if deadline_s is None:
        yield
        return

    def ring(_number: int, _frame: object) -> None:
        raise Late(0, f"no answer within {deadline_s:g} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, deadline_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


class _Member:
    """One rank's part of the jobs."""

    def __init__(self, place: Place, store: Any) -> None:
        self.place = place
        self.store = store
        self.world: Any = None
        self.joined = 0  # worlds
        seal.use(store)

    def do(self, kind: str, *message: Any) -> tuple[str, Any]:
        """A job's result, or how it failed."""
        try:
            if kind == "join":
                self._join(*message)
                return "result", None
            target, args = message
            return "result", rank_process.resolve(target)(self.world, *args)
        except Exception as error:
            answer = rank_process.as_message(error)
        self._abort()
        return answer

    def _join(self, launch: LaunchConfig, size: int) -> None:
        from torch.distributed import PrefixStore

        from shardlab import world as worlds

        self.world = None
        gc.collect()
        worlds.leave()
        self.joined += 1
        rank, local_rank = self.place.rank, self.place.local_rank
        if rank >= size:
            return
        store = PrefixStore(f"world {self.joined}", self.store)
        here = min(self.place.local_size, size - (rank - local_rank))  # a node's are neighbours
        self.world = worlds.join(launch, rank, size, local_rank, here, store)
        seal.use(self.store)  # one key for all worlds, also for ranks that are in none

    def _abort(self) -> None:
        """Close the connections to the other ranks: they would wait for this one."""
        import torch.distributed as dist

        with contextlib.suppress(Exception):
            dist.distributed_c10d._abort_process_group()


def serve(place: Place, store: Any) -> NoReturn:
    """Run the leader's jobs until it has finished."""
    # Ctrl-C in a terminal reaches every process. The main thread may be waiting in C for the
    # leader, where Python's handler would not run.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    member = _Member(place, store)
    try:
        for number in itertools.count():
            store.wait([f"job {number}"], FOREVER)
            kind, *message = seal.loads(store.get(f"job {number}"))
            if kind == "end":
                break
            if kind == "join" or member.world is not None:
                answer = member.do(kind, *message[:2])
                store.set(f"answer {number} {place.rank}", seal.dumps(answer))
    except (RuntimeError, ValueError):
        raise SystemExit(1) from None  # the leader is gone, and the store with it
    raise SystemExit(0)
