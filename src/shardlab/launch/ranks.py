"""N processes started here that join one world and run functions together, as often as asked.

They run a training run, the cells of a comparison, the cases of a test. The first failure is
reported with its rank and its traceback, once, and the other ranks are ended with it.

The processes come from a fork server that has imported torch already: importing it once and
forking costs less than importing it N times, and a world can be replaced in a fraction of a
second. This process itself does not import torch.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from typing import Any, NoReturn

from shardlab import output
from shardlab.config import LaunchConfig
from shardlab.errors import (
    LOST_PEER,
    Halt,
    Interrupted,
    Late,
    Mistake,
    RankFailure,
    UsageError,
)
from shardlab.guard import nodes, watchdog
from shardlab.launch.forking import fork_server
from shardlab.launch.rank_output import Echo
from shardlab.launch.rank_process import Process, Seat, Target, private_file

Event = Mapping[str, Any]

GRACE_S = 1.0  # after a first failure, how long to listen for the one that caused it
STOP_S = 5.0  # how long a rank may take to leave when asked


def _ignore(_event: Event) -> None: ...


class Ranks:
    """N ranks on this machine. ``run`` calls a function on all of them and returns the results."""

    def __init__(self, launch: LaunchConfig, size: int) -> None:
        self.launch = launch
        self.size = size
        self._monitor: watchdog.Monitor | None = None  # of the ranks that say where they are
        self._on_event: Callable[[Event], None] = _ignore
        self._pipes: list[connection.Connection] = []
        self._processes: list[Process] = []
        self._echo = Echo(size)
        self._files = contextlib.ExitStack()
        _refuse_unfit(launch)
        try:
            file = self._files.enter_context(private_file())
            for rank in range(size):
                self._start(Seat(rank, size, file))
            self._collect()
            output.debug(f"{size} ranks are ready: processes {', '.join(map(str, self.pids))}")
        except BaseException as error:
            self._end_with(error)

    def _start(self, seat: Seat) -> None:
        ours, theirs = fork_server().Pipe()
        prints_to = self._echo.pipe(seat.rank)
        self._pipes.append(ours)
        self._processes.append(Process(theirs, self.launch, seat, prints_to))
        theirs.close()
        prints_to.close()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        if error is None:
            self.close()
        else:
            self.kill()

    @property
    def pids(self) -> list[int]:
        return [p.pid for p in self._processes]

    @property
    def alive(self) -> bool:
        return bool(self._processes) and all(p.is_alive() for p in self._processes)

    def run(
        self,
        target: Target,
        *args: Any,
        on_event: Callable[[Event], None] = _ignore,
        deadline_s: float | None = None,
    ) -> list[Any]:
        """``target(world, *args)`` on every rank; the results in rank order.

        A ``UsageError`` of any rank is raised here as it is; anything else that ends a rank,
        and a deadline that passes, as a ``RankFailure``. After either, all ranks are gone.
        """
        output.debug(f"the ranks run {target if isinstance(target, str) else target.__name__}")
        try:
            for pipe in self._pipes:
                with contextlib.suppress(OSError):  # a dead rank: found out below
                    pipe.send((target, args))
            self._on_event = on_event
            return self._collect(deadline_s=deadline_s)
        except BaseException as error:
            self._end_with(error)

    def close(self) -> None:
        """Ask the ranks to leave, and see that they do."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        limit = time.monotonic() + STOP_S
        for process in self._processes:
            process.join(max(0.0, limit - time.monotonic()))
        self.kill()

    def _end_with(self, error: BaseException) -> NoReturn:
        self.kill()
        if isinstance(error, KeyboardInterrupt):
            raise Interrupted from None
        raise error

    def ask_to_stop(self, number: int) -> None:
        """A training run ends after its step; what else they do continues."""
        for process in self._processes:
            process.signal(number)

    def kill(self) -> None:
        """End every rank and whatever it started, now."""
        for process in self._processes:
            process.kill()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []
        self._files.close()
        self._echo.close()

    def _collect(self, deadline_s: float | None = None) -> list[Any]:
        """Wait for the answer of every rank."""
        limit = None if deadline_s is None else time.monotonic() + deadline_s
        results: dict[int, Any] = {}
        failures: list[Failure] = []
        self._monitor = None
        while not failures and len(results) < self.size:
            left = None if limit is None else limit - time.monotonic()
            if left is not None and left <= 0:
                late = [str(r) for r in range(self.size) if r not in results]
                raise Late(
                    int(late[0]),
                    f"no answer within {deadline_s:g} s (waiting for {', '.join(late)})",
                )
            failures = self._listen(left, results)
            if (halt := self._hang()) is not None:
                raise halt
        if failures:
            # The first to speak may be a victim: a rank that lost its peer hears of it in
            # milliseconds, and the cause may still be writing its traceback.
            limit = time.monotonic() + GRACE_S
            while (left := limit - time.monotonic()) > 0 and len(failures) < self.size:
                failures += self._listen(left, results)
            raise first_cause(failures, self.size)
        return [results[rank] for rank in range(self.size)]

    def _listen(self, left: float | None, results: dict[int, Any]) -> list[Failure]:
        """One round of messages and deaths."""
        waitable: dict[Any, int] = {}
        for rank, (pipe, process) in enumerate(zip(self._pipes, self._processes, strict=True)):
            if not pipe.closed:
                waitable[pipe] = rank
                waitable[process.sentinel] = rank
        failures = []
        if self._monitor is not None:  # look at the clock also when no rank says anything
            left = min(0.5, 0.5 if left is None else left)
        ready = connection.wait(list(waitable), left)
        for rank in sorted({waitable[r] for r in ready}):
            pipe = self._pipes[rank]
            try:
                while pipe.poll():
                    kind, value = pipe.recv()
                    if kind == "event":
                        self._on_event(value)
                    elif kind == "pulse":
                        self._hear(value)
                    elif kind == "result":
                        results[rank] = value
                        break  # what follows is the next call's: alone, rank 0 is soon ready
                    else:
                        failures.append(Failure.of(rank, kind, value))
            except (EOFError, OSError):  # it closed its end: it is dead or dying
                code = self._processes[rank].join(STOP_S)
                pipe.close()
                failures.append(Failure.of(rank, "died", code))
        return failures

    def _hang(self) -> Halt | None:
        return None if self._monitor is None else self._monitor.hang()

    def _hear(self, message: watchdog.Message) -> None:
        if self._monitor is None and not message.get("end"):
            limits = message["limit_s"], message["timeout_s"]
            self._monitor = watchdog.Monitor(*limits, nodes=nodes.CURRENT)
        if self._monitor is not None:
            self._monitor.hear(message)


def _refuse_unfit(launch: LaunchConfig) -> None:
    """Say at once, before any rank starts, what ranks of one machine cannot have."""
    for key in ("address", "port", "interface"):
        if getattr(launch, key):
            raise UsageError(
                f"launch.{key} is for ranks that a launcher has started; those of one machine meet "
                "in a file and use its loopback interface: leave it out"
            )


@dataclass
class Failure:
    """How a rank failed, and how likely it is a victim of another's failure."""

    error: UsageError | RankFailure
    suspicion: tuple[int, float]  # the least is the cause: by kind, then by time

    @classmethod
    def of(cls, rank: int, kind: str, value: Any) -> Failure:
        if kind == "mistake":
            return cls(Mistake(value, rank), (0, 0.0))
        if kind == "usage":
            return cls(UsageError(value, lines=True), (0, 0.0))
        if kind == "halt":
            return cls(value, (1, 0.0))
        if kind == "died":
            return cls(RankFailure(rank, f"the process {_how_it_died(value)}"), (2, time.time()))
        message, trace, when = value
        is_victim = any(words in message.lower() for words in LOST_PEER)
        return cls(RankFailure(rank, message, trace), (3 if is_victim else 1, when))

    @property
    def is_victim(self) -> bool:
        return self.suspicion[0] == 3

    @property
    def is_lost_node(self) -> bool:
        return isinstance(self.error, Halt) and self.error.state == "lost"


def first_cause(failures: Sequence[Failure], size: int) -> UsageError | RankFailure:
    """What is said of a job that failed on some of ``size`` ranks."""
    error = min(failures, key=lambda f: f.suspicion).error
    if isinstance(error, Mistake):
        alike = [f for f in failures if str(f.error) == str(error)]
        error = error if len(alike) == size else error.named()
    if isinstance(error, RankFailure):
        nodes.CURRENT.locate(error)
    return error


def _how_it_died(code: int | None) -> str:
    if code is None:
        return "stopped answering"
    if code >= 0:
        return f"left with exit code {code}"
    name = signal.Signals(-code).name
    hint = (
        " (over Gloo mostly a collective whose size differs between ranks: "
        "--set guard.check_steps=1000000 says which)"
    )
    return f"was killed by {name}{hint if name == 'SIGABRT' else ''}"


def unless_stopped(result: Any) -> Any:
    """The result of a run, if it came to its end."""
    if not isinstance(result, dict) or "stopped" not in result:
        return result
    made = result["stopped"]
    how = f"by {signal.Signals(result['signal']).name} after {made} step{'s' * (made != 1)}"
    if result["checkpoint"] is None:
        saved = "before it had made a step of its own"
    elif error := result["checkpoint"].get("error"):
        saved = f"its checkpoint was not written: {error}"
    else:
        saved = "with a checkpoint"
    raise Interrupted(f"{how}, {saved}", result["signal"])
