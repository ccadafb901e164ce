"""Ranks: N processes started here, or the one that torchrun has made of us.

``Ranks`` starts N processes that join one world and then run functions together, as often
as asked: a training run, the cells of a comparison, the cases of a test. The first failure
is reported with its rank and its traceback, once, and the other ranks are ended with it.

The processes come from a fork server that has imported torch already: importing it once and
forking costs less than importing it N times, and a world can be replaced in a fraction of a
second. This process itself does not import torch.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import multiprocessing
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any, NoReturn

from shardlab import record
from shardlab.config import Config, LaunchConfig
from shardlab.errors import Halt, Interrupted, Late, RankFailure, UsageError
from shardlab.forking import fork_server
from shardlab.guard import watchdog

Event = Mapping[str, Any]
# A function of a rank, named so that naming it imports nothing: "package.module:function".
# It is called as function(world, *args) and returns something that can be pickled.
Target = str | Callable[..., Any]

DEFAULT_WORLD = 2
GRACE_S = 1.0  # after a first failure, how long to listen for the one that caused it
STOP_S = 5.0  # how long a rank may take to leave when asked
LOST_PEER = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "socket closed",
    "remote process has exited",
    "heartbeat monitor",
)


def torchrun_environment() -> dict[str, int] | None:
    """Rank and sizes where torchrun (or a launcher like it) has set them."""
    if not all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")):
        return None
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return {
        "rank": rank,
        "size": size,
        "local_rank": int(os.environ.get("LOCAL_RANK", rank)),
        "local_size": int(os.environ.get("LOCAL_WORLD_SIZE", size)),
    }


def refuse_used_port(port: int) -> None:
    """Say at once, before any rank starts, that the port asked for is taken."""
    if port == 0:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise UsageError(
                f"port {port} cannot be used: {error.strerror}; choose another, or 0 for a free one"
            ) from None


def default_world(config: Config) -> int:
    """How many ranks when nobody says: two, the fewest that communicate."""
    return 1 if config.strategy.name == "single" else DEFAULT_WORLD


# ------------------------------------------------------------------ the parent


class Ranks:
    """N ranks on this machine. ``run`` calls a function on all of them and returns the results."""

    def __init__(self, launch: LaunchConfig, size: int) -> None:
        refuse_used_port(launch.port)
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
        failures: list[_Failure] = []
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
    ) -> list[_Failure]:
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
                        failures.append(_Failure.of(rank, kind, value))
            except (EOFError, ConnectionResetError):  # it closed its end: it is dead or dying
                process = self._processes[rank]
                process.join(STOP_S)
                pipe.close()
                failures.append(_Failure.of(rank, "died", process.exitcode))
        return failures

    def _hang(self) -> Halt | None:
        return None if self._monitor is None else self._monitor.hang()

    def _hear(self, message: watchdog.Message) -> None:
        if self._monitor is None and not message.get("end"):
            self._monitor = watchdog.Monitor(message["limit_s"], message["timeout_s"])
        if self._monitor is not None:
            self._monitor.hear(message)


@dataclass
class _Failure:
    """How a rank failed, and how likely it is a victim of another's failure."""

    error: UsageError | RankFailure
    suspicion: tuple[int, float]  # the least is the cause: by kind, then by time

    @classmethod
    def of(cls, rank: int, kind: str, value: Any) -> _Failure:
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


def _as_message(error: BaseException) -> tuple[str, Any]:
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


# ------------------------------------------------------------------ one run, either way


def launch(
    target: str,
    config: LaunchConfig,
    *args: Any,
    on_event: Callable[[Event], None] = lambda _event: None,
) -> Any:
    """Run ``target`` on every rank of a world and return rank 0's result.

    Under torchrun this process is one of the ranks, and the others' result is None. Else
    the ranks are started here. An event with a "folder" names the run folder: where the run
    fails, the folder will say so.
    """
    folder: Path | None = None

    def listen(event: Event) -> None:
        nonlocal folder
        folder = Path(event["folder"]) if "folder" in event else folder
        if "halted" in event:
            mark(event["halted"])
        else:
            on_event(event)

    def mark(failure: RankFailure) -> None:
        if folder is not None:
            with contextlib.suppress(OSError):  # a full disk: it is told, if not written
                record.mark_crashed(folder, failure)

    def mark_unless_told(failure: RankFailure) -> None:
        """Of a rank that only knows that it must go: whoever knows why has said so, perhaps."""
        from shardlab.checkpoint import files

        if folder is not None and files.state_of(folder).get("state") == "running":
            mark(failure)

    environment = torchrun_environment()
    try:
        if environment is not None:
            return _run_joined(target, config, args, environment, listen, mark, mark_unless_told)
        assert config.world is not None
        with Ranks(config, config.world) as ranks:
            return ranks.run(target, *args, on_event=listen)[0]
    except RankFailure as failure:
        mark(failure)
        if folder is not None and environment is None:  # every rank is gone: none is writing one
            from shardlab.checkpoint import files

            files.sweep(folder)
        raise
    except (Interrupted, UsageError) as error:
        if folder is not None:  # refused in mid-run: a strategy that cannot do what the model needs
            with contextlib.suppress(OSError):
                record.mark(folder, "interrupted", reason=str(error) or "Ctrl-C")
        raise


def _run_joined(
    target: str,
    config: LaunchConfig,
    args: tuple[Any, ...],
    environment: Mapping[str, int],
    listen: Callable[[Event], None],
    mark: Callable[[RankFailure], None],
    mark_unless_told: Callable[[RankFailure], None],
) -> Any:
    """This process as one rank of torchrun's world."""
    from torch.distributed import PrefixStore, rendezvous

    from shardlab import world as worlds

    rank, size = environment["rank"], environment["size"]
    store, _, _ = next(rendezvous("env://", rank, size))
    # After a restart the old world's addresses are still in torchrun's store: a new name space.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = PrefixStore(f"shardlab/{attempt}", store)
    ended = RankFailure(rank, "ended by torchrun, because another rank had failed")
    try:
        if config.world not in (None, size):
            raise UsageError(
                f"launch.world is {config.world}, but torchrun has started {size} ranks; "
                "leave it out"
            )
        with _ended_by_signal(functools.partial(mark_unless_told, ended)):
            local_rank, local_size = environment["local_rank"], environment["local_size"]
            world = worlds.join(config, rank, size, local_rank, local_size, store, tell=listen)
            result = _resolve(target)(world, *args)
            worlds.leave()
        return result if rank == 0 else None
    except Exception as error:
        failure = _Failure.of(rank, *_as_message(error))
        if failure.is_victim:
            # torchrun may end us while we wait for the cause to speak: say what we know now.
            assert isinstance(failure.error, RankFailure)
            mark(failure.error)
            time.sleep(GRACE_S)
        # The first to say so speaks for all; the others leave without a word.
        with contextlib.suppress(Exception):
            if store.add("failures", 1) > 1:
                raise SystemExit(failure.exit_code) from None
        raise failure.error from None


@contextlib.contextmanager
def _ended_by_signal(say: Callable[[], None]) -> Iterator[None]:
    """torchrun ends the ranks that are left by SIGTERM. It may find us waiting in C, where no
    handler of Python's runs; but the signal's number still comes, through a pipe, to a thread.
    """
    numbers, sender = os.pipe()
    os.set_blocking(sender, False)

    def listen() -> None:
        while number := os.read(numbers, 1):
            if number[0] == signal.SIGTERM:
                say()
                os._exit(128 + signal.SIGTERM)

    threading.Thread(target=listen, daemon=True).start()
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    pipe_before = signal.set_wakeup_fd(sender, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(pipe_before)
        signal.signal(signal.SIGTERM, before)
        os.close(sender)  # the thread reads the end, and leaves


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
            store = TCPStore("127.0.0.1", launch.port, size, is_master=True, wait_for_workers=False)
            send("result", store.port)
        else:
            store = TCPStore("127.0.0.1", pipe.recv(), size, is_master=False)
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
            send("result", _resolve(target)(world, *args))
        worlds.leave()
    except BaseException as error:
        with contextlib.suppress(BrokenPipeError):
            send(*_as_message(error))
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


def _resolve(target: Target) -> Callable[..., Any]:
    if callable(target):
        return target
    module, _, name = target.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function
