"""N processes started here that join one world and run functions together, as often as asked.

They run a training run, the cells of a comparison, the cases of a test. The first failure is
reported with its rank and its traceback, once, and the other ranks are ended with it.

The processes come from a fork server that has imported torch already: importing it once and
forking costs less than importing it N times, and a world can be replaced in a fraction of a
second. This process itself does not import torch.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing import connection
from typing import Any, NoReturn

from shardlab.config import LaunchConfig
from shardlab.errors import LOST_PEER, Halt, Interrupted, Late, RankFailure, UsageError
from shardlab.guard import watchdog
from shardlab.run.forking import fork_server
from shardlab.run.place import LOOPBACK

Event = Mapping[str, Any]
# A function of a rank, named so that naming it imports nothing: "package.module:function".
# It is called as function(world, *args) and returns something that can be pickled.
Target = str | Callable[..., Any]

GRACE_S = 1.0  # after a first failure, how long to listen for the one that caused it
STOP_S = 5.0  # how long a rank may take to leave when asked


def refuse_used_port(port: int) -> None:
    """Say at once, before any rank starts, that the port asked for is taken."""
    if port == 0:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError as error:
            raise UsageError(
                f"port {port} cannot be used: {error.strerror}; choose another, or 0 for a free one"
            ) from None


def loopback_store(port: int = 0) -> Any:
    """A store for the ranks of this machine, which no other machine can reach."""
    return listening_store(socket.AF_INET, LOOPBACK, port)


def listening_store(family: int, address: str, port: int) -> Any:
    """A store that listens on one address alone; "" stands for every address of the machine.

    A ``TCPStore`` that opens its own socket listens on every interface: whoever reaches it can read
    and write the keys by which the ranks find each other. So it is handed a socket that is bound.
    """
    from torch.distributed import TCPStore

    with socket.socket(family) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((address, port))
        listening.listen(128)
        return TCPStore(
            address or LOOPBACK,
            listening.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),  # the store closes it
        )


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


# ------------------------------------------------------------------ the parent


class Ranks:
    """N ranks on this machine. ``run`` calls a function on all of them and returns the results."""

    def __init__(self, launch: LaunchConfig, size: int) -> None:
        refuse_used_port(launch.port)
        for key in ("address", "interface"):
            if getattr(launch, key) is not None:
                raise UsageError(
                    f"launch.{key} is for ranks that srun or mpirun has started; those of one "
                    "machine use its loopback interface"
                )
        self.launch = launch
        self.size = size
        context = fork_server()
        self._monitor: watchdog.Monitor | None = None  # of the ranks that say where they are
        self._pipes: list[connection.Connection] = []
        self._processes: list[Any] = []
        try:
            for rank in range(size):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_rank_main, args=(theirs, launch, rank, size), name=f"rank {rank}"
                )
                process.start()
                theirs.close()
                self._pipes.append(ours)
                self._processes.append(process)
            # Rank 0 takes a free port and says which: no other process can take it in between.
            port = self._collect(only=0)[0]
            for pipe in self._pipes[1:]:
                pipe.send(port)
            self._collect()
        except BaseException as error:
            self._end_with(error)

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
        on_event: Callable[[Event], None] | None = None,
        deadline_s: float | None = None,
    ) -> list[Any]:
        """``target(world, *args)`` on every rank; the results in rank order.

        A ``UsageError`` of any rank is raised here as it is; anything else that ends a rank,
        and a deadline that passes, as a ``RankFailure``. After either, all ranks are gone.
        """
        try:
            for pipe in self._pipes:
                with contextlib.suppress(BrokenPipeError):  # a dead rank: found out below
                    pipe.send((target, args))
            return self._collect(on_event=on_event, deadline_s=deadline_s)
        except BaseException as error:
            self._end_with(error)

    def close(self) -> None:
        """Ask the ranks to leave, and see that they do."""
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):
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
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)

    def kill(self) -> None:
        """End every rank and whatever it started, now."""
        for process in self._processes:
            if process.is_alive():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.kill()
        for process in self._processes:
            process.join()
            process.close()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []

    def _collect(
        self,
        only: int | None = None,
        on_event: Callable[[Event], None] | None = None,
        deadline_s: float | None = None,
    ) -> list[Any]:
        """Wait for the answer of every rank (or of one), listening to all."""
        limit = None if deadline_s is None else time.monotonic() + deadline_s
        results: dict[int, Any] = {}
        awaited = range(self.size) if only is None else [only]
        failures: list[Failure] = []
        self._monitor = None
        while not failures and any(rank not in results for rank in awaited):
            left = None if limit is None else limit - time.monotonic()
            if left is not None and left <= 0:
                late = [str(r) for r in awaited if r not in results]
                raise Late(
                    int(late[0]),
                    f"no answer within {deadline_s:g} s (waiting for {', '.join(late)})",
                )
            failures = self._listen(left, results, on_event)
            if (halt := self._hang()) is not None:
                raise halt
        if failures:
            # The first to speak may be a victim: a rank that lost its peer hears of it in
            # milliseconds, and the cause may still be writing its traceback.
            limit = time.monotonic() + GRACE_S
            while (left := limit - time.monotonic()) > 0 and len(failures) < self.size:
                failures += self._listen(left, results, on_event)
            raise min(failures, key=lambda f: f.suspicion).error
        return [results[rank] for rank in awaited]

    def _listen(
        self, left: float | None, results: dict[int, Any], on_event: Callable[[Event], None] | None
    ) -> list[Failure]:
        """One round of messages and deaths."""
        waitable: dict[Any, int] = {}
        for rank, (pipe, process) in enumerate(zip(self._pipes, self._processes, strict=True)):
            if not pipe.closed:
                waitable[pipe] = rank
                waitable[process.sentinel] = rank
        if not waitable:
            time.sleep(left or 0)
            return []
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
                        if on_event is not None:
                            on_event(value)
                    elif kind == "pulse":
                        self._hear(value)
                    elif kind == "result":
                        results[rank] = value
                        break  # what follows is the next call's: alone, rank 0 is soon ready
                    else:
                        failures.append(Failure.of(rank, kind, value))
            except (EOFError, ConnectionResetError):  # it closed its end: it is dead or dying
                process = self._processes[rank]
                process.join(STOP_S)
                pipe.close()
                failures.append(Failure.of(rank, "died", process.exitcode))
        return failures

    def _hang(self) -> Halt | None:
        return None if self._monitor is None else self._monitor.hang()

    def _hear(self, message: watchdog.Message) -> None:
        if self._monitor is None and not message.get("end"):
            self._monitor = watchdog.Monitor(message["limit_s"], message["timeout_s"])
        if self._monitor is not None:
            self._monitor.hear(message)


@dataclass
class Failure:
    """How a rank failed, and how likely it is a victim of another's failure."""

    error: UsageError | RankFailure
    suspicion: tuple[int, float]  # the least is the cause: by kind, then by time

    @classmethod
    def of(cls, rank: int, kind: str, value: Any) -> Failure:
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
    def exit_code(self) -> int:
        return 2 if isinstance(self.error, UsageError) else 1


def as_message(error: BaseException) -> tuple[str, Any]:
    """An exception as a rank reports it: refused input in a line, anything else in full."""
    if isinstance(error, UsageError):
        return "usage", str(error)
    if isinstance(error, Halt):
        return "halt", error
    message = str(error).strip().partition("\n")[0]
    message = f"{type(error).__name__}: {message}" if message else type(error).__name__
    return "error", (message, "".join(traceback.format_exception(error)), time.time())


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


# ------------------------------------------------------------------ the child


def _rank_main(pipe: connection.Connection, launch: LaunchConfig, rank: int, size: int) -> None:
    """A rank: join the world, then run what the parent sends until it sends None."""
    # A session of its own: Ctrl-C on the terminal reaches the parent alone, which ends us, and
    # what we start (data loaders) ends with our process group.
    os.setsid()
    threading.Thread(target=_die_with_parent, daemon=True).start()
    from torch.distributed import TCPStore

    from shardlab import world as worlds

    send_lock = threading.Lock()

    def send(kind: str, value: Any) -> None:
        with send_lock:
            pipe.send((kind, value))

    try:
        if rank == 0:
            store = loopback_store(launch.port)
            send("result", store.port)
        else:
            store = TCPStore(LOOPBACK, pipe.recv(), is_master=False)
        stay_on_loopback()
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
        world = worlds.join(
            launch,
            rank,
            size,
            rank,
            size,
            store,
            tell=lambda event: send("event", event),
            pulse=lambda message: send("pulse", message),
        )
        send("result", None)
        while (message := pipe.recv()) is not None:
            target, args = message
            send("result", resolve(target)(world, *args))
        worlds.leave()
    except BaseException as error:
        with contextlib.suppress(BrokenPipeError):
            send(*as_message(error))
            _wait_for_the_end()
        os._exit(1)


def _wait_for_the_end() -> None:
    """Stay until the parent ends us: to leave now would look like the failure to our peers."""
    time.sleep(60)
    os._exit(1)


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
