"""Ranks: N processes started here, or the one that torchrun, srun or mpirun has made of us.

``Ranks`` starts N processes that join one world and then run functions together, as often
as asked: a training run, the cells of a comparison, the cases of a test. The first failure
is reported with its rank and its traceback, once, and the other ranks are ended with it.

The processes come from a fork server that has imported torch already: importing it once and
forking costs less than importing it N times, and a world can be replaced in a fraction of a
second. This process itself does not import torch.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any, NoReturn

from shardlab import runfolder
from shardlab.config import Config, LaunchConfig
from shardlab.errors import LOST_PEER, Halt, Interrupted, Late, RankFailure, UsageError
from shardlab.guard import stop, watchdog
from shardlab.run import place as places
from shardlab.run.forking import fork_server
from shardlab.run.place import LOOPBACK, Place

Event = Mapping[str, Any]
# A function of a rank, named so that naming it imports nothing: "package.module:function".
# It is called as function(world, *args) and returns something that can be pickled.
Target = str | Callable[..., Any]

DEFAULT_WORLD = 2
GRACE_S = 1.0  # after a first failure, how long to listen for the one that caused it
STOP_S = 5.0  # how long a rank may take to leave when asked
TELL_S = 20.0  # how long a rank whose input is refused looks for the others, to tell them


def joined() -> Place | None:
    """This process's place among the ranks that a launcher has started; None if it starts them."""
    place = places.resolve(os.environ)
    return place if place is not None and place.is_joined else None


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
    return _listening_store(socket.AF_INET, LOOPBACK, port)


def _listening_store(family: int, address: str, port: int) -> Any:
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
        _use_interface(names[0])


def _use_interface(name: str) -> None:
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ[variable] = name


def default_world(config: Config) -> int:
    """How many ranks when nobody says: two, the fewest that communicate.

    One task of srun or mpirun is one rank. A Slurm job with more tasks, in which srun has not
    started this command, is refused: it would use one node of many.
    """
    if tasks := places.tasks_without_srun(os.environ):
        if tasks > 1:
            raise UsageError(
                f"Slurm gave this job {tasks} tasks, but srun did not start this command: put srun "
                "before it, or add --world N to start N ranks on this machine alone"
            )
    elif places.resolve(os.environ) is not None:
        return 1
    return 1 if config.strategy.name == "single" else DEFAULT_WORLD


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
    saves: bool = False,
    on_event: Callable[[Event], None] = lambda _event: None,
) -> Any:
    """Run ``target`` on every rank of a world and return rank 0's result.

    Under torchrun, srun and mpirun this process is one of the ranks, and the others' result is
    None. Else the ranks are started here. An event with a "folder" names the run folder: where the
    run fails, the folder will say so.

    Ctrl-C and SIGTERM end the ranks. A run that ``saves`` is asked to stop first: it finishes its
    step and writes a checkpoint. A second signal ends it at once.
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
            with contextlib.suppress(OSError):  # the disk is full; the failure is printed anyway
                runfolder.mark_crashed(folder, failure)

    def mark_unless_told(how: RankFailure | str) -> None:
        """Keep an earlier, better explanation if one was recorded."""
        from shardlab.checkpoint import files

        if folder is None or files.state_of(folder).get("state") != "running":
            return
        if isinstance(how, RankFailure):
            mark(how)
            return
        with contextlib.suppress(OSError):
            runfolder.mark(folder, "interrupted", reason=how)

    def sweep() -> None:
        """Every rank is gone: a checkpoint that is half written will not be finished."""
        from shardlab.checkpoint import files

        if folder is not None and place is None:
            files.sweep(folder)

    place = joined()
    signals = _Signals(lambda: saves and folder is not None)
    try:
        if place is not None:
            return _run_joined(target, config, args, place, listen, mark, mark_unless_told)
        assert config.world is not None
        with signals, Ranks(config, config.world) as ranks:
            signals.ranks = ranks
            result = ranks.run(target, *args, on_event=listen)[0]
        return _unless_stopped(result)
    except RankFailure as failure:
        failure.is_final = signals.number is not None  # it was to end: it is not started again
        mark(failure)
        sweep()
        raise
    except (KeyboardInterrupt, Interrupted) as stopped:
        if isinstance(stopped, KeyboardInterrupt):
            stopped = Interrupted()
        stopped.number = signals.number or stopped.number
        mark_unless_told(signal.Signals(stopped.number).name)
        sweep()
        raise stopped from None
    except UsageError as error:
        mark_unless_told(str(error))  # in mid-run: a strategy cannot do what the model needs
        raise


class _Signals:
    """What Ctrl-C and SIGTERM do to the ranks that this process has started.

    The first asks a run that can save to stop; any other ends it, by a ``KeyboardInterrupt``.
    """

    def __init__(self, can_save: Callable[[], bool]) -> None:
        self.can_save = can_save
        self.ranks: Ranks | None = None
        self.number: int | None = None  # of the first
        self._when = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self._before = {n: signal.signal(n, self._handle) for n in stop.heeded()}

    def __exit__(self, *_error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _frame: object) -> None:
        now = time.monotonic()
        if self.number is None:
            self.number, self._when = number, now
            if self.ranks is not None and self.can_save():
                self.ranks.ask_to_stop(number)
                return
        elif number == signal.SIGTERM and now - self._when < stop.SAME_S:
            return
        for other in self._before:  # ending the ranks is not to be interrupted in its turn
            signal.signal(other, signal.SIG_IGN)
        raise KeyboardInterrupt


def _unless_stopped(result: Any) -> Any:
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


def _run_joined(
    target: str,
    config: LaunchConfig,
    args: tuple[Any, ...],
    place: Place,
    listen: Callable[[Event], None],
    mark: Callable[[RankFailure], None],
    mark_unless_told: Callable[[RankFailure | str], None],
) -> Any:
    """This process as one rank of a launcher's world."""
    from shardlab import world as worlds

    rank, size = place.rank, place.size
    store = store_of(place, config)
    try:
        refusal = _unfit(place, config)
        if refusal := _refusal_of_any(store, place, refusal, config.timeout_s):
            raise UsageError(refusal)
        with stop.heard(_JoinedSignals(store, place, mark_unless_told)):
            numbers = rank, size, place.local_rank, place.local_size
            world = worlds.join(config, *numbers, store, tell=listen)
            result = _resolve(target)(world, *args)
            worlds.leave()
        result = _unless_stopped(result)
        return result if rank == 0 else None
    except Interrupted as stopped:
        if rank:
            raise SystemExit(stopped.exit_code) from None
        raise
    except Exception as error:
        failure = _Failure.of(rank, *_as_message(error))
        if failure.is_victim:
            # torchrun may end us while we wait for the cause to speak: say what we know now.
            assert isinstance(failure.error, RankFailure)
            mark(failure.error)
            time.sleep(GRACE_S)
        with contextlib.suppress(Exception):
            if _has_been_said(store, place, isinstance(failure.error, UsageError)):
                raise SystemExit(failure.exit_code) from None
        raise failure.error from None


def _unfit(place: Place, config: LaunchConfig) -> str:
    """Why this rank cannot run what the config asks for; empty if it can."""
    if config.world not in (None, place.size):
        return (
            f"launch.world is {config.world}, but {place.launcher} has started {place.size} ranks; "
            "leave it out"
        )
    if config.address is not None and place.is_torchruns:
        return "launch.address is for srun and mpirun; torchrun has --rdzv-endpoint, --master-addr"
    names = [name for _, name in socket.if_nameindex()]
    if config.interface is not None:
        if config.interface not in names:
            return f"launch.interface is {config.interface}, and this host has {', '.join(names)}"
        _use_interface(config.interface)
    elif place.nodes == 1 and not place.is_torchruns:
        stay_on_loopback()
    return ""


def store_of(place: Place, config: LaunchConfig) -> Any:
    """The store in which the ranks of a launcher find each other: torchrun's, or rank 0's own."""
    from torch.distributed import PrefixStore, TCPStore, rendezvous

    global _came_together
    if place.is_torchruns:
        store, _, _ = next(rendezvous("env://", place.rank, place.size))
        # After a restart the old world's addresses are still in torchrun's store: a new name space.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return PrefixStore(f"shardlab/{attempt}", store)
    address, port = config.address or place.address, config.port or place.port
    places.refuse_loopback(place.launcher, address, place.nodes, "launch.address")
    if not address:
        raise UsageError(
            f"{place.launcher} has started ranks on {place.nodes} nodes and does not say where the "
            "first is: add --set launch.address=HOST, or set MASTER_ADDR"
        )
    try:
        if place.rank == 0:
            store = _listening_store(*_own_address(address, place, config.interface), port)
        else:
            limit = timedelta(seconds=config.timeout_s)
            store = TCPStore(address, port, is_master=False, timeout=limit)
    except (OSError, RuntimeError) as error:
        _came_together = True  # as far as they can: nobody would hear a refusal
        here = f"rank {place.rank} on {socket.gethostname()}"
        if place.rank == 0:
            reason = error.strerror if isinstance(error, OSError) else error
            what = f"{here} cannot listen on {address}, port {port}: {reason}"
        else:
            what = f"{here} did not reach rank 0 at {address}, port {port}"
        raise UsageError(f"{what}; --set launch.address=HOST and --port choose others") from None
    atexit.register(_leave_together, store, place.size)
    return PrefixStore("shardlab", store)


def _own_address(address: str, place: Place, interface: str | None) -> tuple[int, str]:
    """What rank 0 listens on: the address by which the others know it.

    On Debian a host's own name may mean its loopback interface, where other nodes do not reach it:
    then rank 0 listens on the interface that is named, or on all.
    """
    family, _, _, _, found = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0]
    host = str(found[0])
    if place.nodes == 1 or not places.is_loopback(host):
        return family, host
    if interface is not None and sys.platform == "linux":
        import fcntl

        get_interface_address = 0x8915  # SIOCGIFADDR of <linux/sockios.h>
        asking = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        with asking, contextlib.suppress(OSError):  # it has none
            name = interface.encode().ljust(32, b"\0")
            answer = fcntl.ioctl(asking.fileno(), get_interface_address, name)
            return socket.AF_INET, socket.inet_ntoa(answer[20:24])
    return family, ""


def _leave_together(store: Any, size: int) -> None:
    """Wait for the other ranks at the end of the process: rank 0 holds the store that they use, and
    srun and mpirun may end a rank that still speaks when the first has left."""
    with contextlib.suppress(Exception):
        store.add("left", 1)
        _wait_until(lambda: bool(store.add("left", 0) >= size), STOP_S)


def refused_together(refusal: str) -> str:
    """Input that one of a launcher's ranks refuses is refused by all of them, in one line: this.

    On another node a file may be missing that is there on this one: a rank that is refused before
    it has joined the others would leave them waiting for it.
    """
    place = None
    with contextlib.suppress(UsageError):  # the launcher's own variables were refused
        place = joined()
    if place is None or _came_together:
        return refusal
    with contextlib.suppress(Exception):  # no store: no other rank to tell
        store = store_of(place, LaunchConfig(timeout_s=TELL_S))
        refusal = _refusal_of_any(store, place, refusal, STOP_S) or refusal
        if _has_been_said(store, place, is_refusal=True):
            raise SystemExit(2)
    return refusal


def _has_been_said(store: Any, place: Place, is_refusal: bool) -> bool:
    """The first rank to fail speaks for all; a refusal is told once on each node, in its log."""
    node = socket.gethostname() if place.node is None else place.node
    nth = store.add("failures", 1)
    nth_on_node = store.add(f"failures on node {node}", 1)
    return bool((nth_on_node if is_refusal else nth) > 1)


_came_together = False  # all ranks of a launcher have told each other whether they can begin


def _refusal_of_any(store: Any, place: Place, refusal: str, wait_s: float) -> str:
    """What all ranks are told before they join: nothing, or why one of them cannot."""
    global _came_together
    _came_together = True
    size, host = place.size, socket.gethostname()
    own = [host, refusal, f"{host} (node {place.node}), local rank {place.local_rank}"]
    store.set(f"ready {place.rank}", json.dumps(own))
    keys = [f"ready {other}" for other in range(size)]
    _wait_until(lambda: store.check(keys), wait_s)
    said = {r: json.loads(store.get(key)) for r, key in enumerate(keys) if store.check([key])}
    refusals = {r: (host, text) for r, (host, text, _) in said.items() if text}
    store.add("heard", 1)
    if refusals:
        # The agent takes the store with it when its ranks are gone: not before all have heard.
        _wait_until(lambda: store.add("heard", 0) >= size, STOP_S)
        (host, text), *others = refusals.values()
        is_alike = len(refusals) == size and all(other == text for _, other in others)
        return text if is_alike else f"rank {min(refusals)} on {host}: {text}"
    if missing := [str(r) for r in range(size) if r not in said]:
        return f"rank {', '.join(missing)} did not come within {wait_s:g} s (launch.timeout_s)"
    ranks_at: dict[str, list[int]] = {}
    for rank, (_, _, where) in said.items():
        ranks_at.setdefault(where, []).append(rank)
    for where, ranks in ranks_at.items():
        if len(ranks) > 1:  # they would share a GPU, and NCCL would hang
            return f"ranks {', '.join(map(str, ranks))} are all {where}; the launcher is set wrong"
    return ""


def _wait_until(is_so: Callable[[], bool], seconds: float) -> None:
    limit = time.monotonic() + seconds
    while not is_so() and time.monotonic() < limit:
        time.sleep(0.02)


class _JoinedSignals:
    """What a signal does to a rank of a launcher's. Called in a thread.

    torchrun's agent, srun and mpirun pass on to all ranks what they are sent: then the run is asked
    to stop, as if we had started the ranks. But they also end those that are left when one failed.
    """

    ALL_S = 3.0  # after which not all ranks have been signalled

    def __init__(self, store: Any, place: Place, mark: Callable[[RankFailure | str], None]) -> None:
        self.store = store.clone()  # the main thread may be waiting in the other one
        self.rank, self.size, self.mark = place.rank, place.size, mark
        self.launcher = place.launcher
        self.when: float | None = None  # the first came

    def __call__(self, number: int) -> None:
        now, first = time.monotonic(), self.when is None
        if not first and now - (self.when or 0.0) < stop.SAME_S:
            return
        self.when = now
        with contextlib.suppress(Exception):
            self.store.add("signalled", 1 if first else 0)
        run = stop.CURRENT
        if first and run is not None and run.is_on:
            run.ask(number)
            return
        if self._all_are_signalled():
            self.mark(signal.Signals(number).name)
            if self.rank == 0:
                print("interrupted: every rank was ended", file=sys.stderr, flush=True)
        else:
            ended = f"ended by {self.launcher}, because another rank had failed"
            self.mark(RankFailure(self.rank, ended))
        os._exit(128 + number)

    def _all_are_signalled(self) -> bool:
        def is_known() -> bool:
            return bool(self.store.add("failures", 0)) or is_all()

        def is_all() -> bool:
            return bool(self.store.add("signalled", 0) >= self.size)

        with contextlib.suppress(Exception):
            _wait_until(is_known, self.ALL_S)
            return is_all() and not self.store.add("failures", 0)
        return False


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
