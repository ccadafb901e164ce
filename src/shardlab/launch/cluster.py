"""Ranks that torchrun, srun, mpirun or Ray has started; this process is one of them.

They find each other in a store: torchrun's, or one that rank 0 holds. There each says where it is
and what must be the same on all ranks, and rank 0 says whether it fits. What one of them refuses,
all refuse, in one line. Then they join one world.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from datetime import timedelta
from typing import Any

from shardlab import output
from shardlab.config import LaunchConfig
from shardlab.errors import Interrupted, Mistake, RankFailure, UsageError
from shardlab.guard import graceful_stop, nodes
from shardlab.launch import launcher_env, rank_process, same_setup
from shardlab.launch.launcher_env import LOOPBACK, Place
from shardlab.launch.ranks import GRACE_S, STOP_S, Event, Failure, unless_stopped
from shardlab.launch.same_setup import Facts

NOTICE_S = 4.0  # then a rank that waits says for whom
GATHER_S = 2.0  # after something wrong was seen, how long other ranks have to come and hear it
REFUSED_S = 20.0  # how long rank 0 then keeps the store, for a rank that comes later
TRY_S = 3.0  # for one attempt to reach the store
SIGNALLED_S = 3.0  # after which not all ranks have been signalled
LIMIT = "launch.timeout_s"
FINE = "fine"

# Says in the run's folder how it ended; True: unless something better has been said.
Mark = Callable[[RankFailure | str, bool], None]

has_met = False  # the ranks have told each other whether they can begin
_stays_s = STOP_S


def run(
    target: str,
    config: LaunchConfig,
    args: tuple[Any, ...],
    place: Place,
    listen: Callable[[Event], None],
    mark: Mark,
) -> Any:
    """This process as one rank of a launcher's world."""
    from shardlab import world as worlds

    rank, size = place.rank, place.size
    store = meet(place, config, same_setup.setup(config, args))
    try:
        with _signals(store, place, mark):
            numbers = rank, size, place.local_rank, place.local_size
            world = worlds.join(config, *numbers, store, tell=listen)
            result = rank_process.resolve(target)(world, *args)
            worlds.leave()
        result = unless_stopped(result)
        return result if rank == 0 else None
    except Interrupted as stopped:
        if rank:
            raise SystemExit(stopped.exit_code) from None
        raise
    except Exception as error:
        failure = Failure.of(rank, *rank_process.as_message(error))
        if isinstance(failure.error, RankFailure):
            nodes.CURRENT.locate(failure.error)
            if failure.is_victim:
                # torchrun may end us while we wait for the cause to speak: say what we know now.
                mark(failure.error, True)
                time.sleep(GRACE_S)
        is_for_all_nodes = isinstance(failure.error, UsageError) or failure.is_lost_node
        if _has_been_said(store, place, is_for_all_nodes):
            raise SystemExit(failure.error.exit_code) from None
        if isinstance(failure.error, Mistake) and size > 1:
            raise failure.error.named() from None
        raise failure.error from None


def refused_together(refusal: str) -> str:
    """Input that one of a launcher's ranks refuses is refused by all of them, in one line: this.

    On another node a file may be missing that is there on this one: a rank that is refused before
    it has joined the others would leave them waiting for it.
    """
    place = None
    with contextlib.suppress(UsageError):  # the launcher's own variables were refused
        place = launcher_env.joined()
    if place is None or has_met:
        return refusal
    with contextlib.suppress(Exception):  # no store: no other rank to tell
        store = store_of(place, LaunchConfig(timeout_s=REFUSED_S))
        refusal = _verdict(store, place, Facts.of(place, refusal, None), STOP_S) or refusal
        if _has_been_said(store, place, is_for_all_nodes=True):
            raise SystemExit(2)
    return refusal


def _has_been_said(store: Any, place: Place, is_for_all_nodes: bool) -> bool:
    """The first rank to fail speaks for all; a refusal is told once on each node, in its log."""
    node = socket.gethostname() if place.node is None else place.node
    with contextlib.suppress(Exception):  # the store is gone
        nth = store.add("failures", 1)
        nth_on_node = store.add(f"failures on node {node}", 1)
        return bool((nth_on_node if is_for_all_nodes else nth) > 1)
    return False


# ------------------------------------------------------------------ how they meet


def meet(place: Place, config: LaunchConfig, setup: Mapping[str, str]) -> Any:
    """The store of all ranks, when each of them is there and can begin.

    ``setup``: what must be the same on all of them.
    """
    store = store_of(place, config)
    refusal, listens = _unfit(place, config), ""
    if not refusal:
        refusal, listens = _listens_at(place, config)
    verdict = _verdict(store, place, Facts.of(place, refusal, setup, listens), config.timeout_s)
    if verdict:
        if _has_been_said(store, place, is_for_all_nodes=True):
            raise SystemExit(2)
        raise UsageError(verdict)
    if place.nodes > 1:
        said = _said(store, place.size)
        nodes.CURRENT = nodes.of([(f.node, f.host) for _, f in sorted(said.items())], place.rank)
    return store


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
        rank_process.use_interface(config.interface)
    elif place.nodes == 1 and not place.is_torchruns:
        rank_process.stay_on_loopback()
    named = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    if named and named not in names:
        return f"GLOO_SOCKET_IFNAME is {named}, and this host has {', '.join(names)}"
    return ""


def _listens_at(place: Place, config: LaunchConfig) -> tuple[str, str]:
    """Why this rank has no device, and else where Gloo will listen; NCCL chooses for itself."""
    from shardlab import world as worlds

    try:
        _, backend = worlds.choose(config, place.local_rank, place.local_size)
    except UsageError as error:
        return str(error), ""
    return "", same_setup.gloos_address() if backend == "gloo" else ""


def _verdict(store: Any, place: Place, own: Facts, wait_s: float) -> str:
    """Why the ranks cannot begin, the same text on all of them; empty if they can."""
    global has_met, _stays_s
    has_met = True
    me = f"process {os.getpid()} on {own.host}"
    other = store.compare_set(f"is rank {place.rank}", "", me).decode()
    if other == me:
        store.set(f"ready {place.rank}", json.dumps(asdict(own)))
    else:
        text = f"{other} and {me} are both rank {place.rank}; the launcher is set wrong"
        store.compare_set("verdict", "", text)
    if place.rank == 0 and other == me:
        store.compare_set("verdict", "", _judged(store, place, wait_s) or FINE)
    elif not wait_until(lambda: bool(store.check(["verdict"])), wait_s + GATHER_S):
        text = f"rank 0 did not come within {wait_s:g} s ({LIMIT})"
        store.compare_set("verdict", "", text)
    verdict = str(store.get("verdict").decode())
    store.add("heard", 1)
    if verdict == FINE:
        return ""
    _stays_s = STOP_S if LIMIT in verdict else REFUSED_S
    if has_agent():  # torchrun's agent takes the store with it when its ranks are gone
        wait_until(lambda: bool(store.add("heard", 0) >= place.size), STOP_S)
    return verdict


def _judged(store: Any, place: Place, wait_s: float) -> str:
    """What does not fit: rank 0 says it when all have come, or soon after it is seen."""
    began = time.monotonic()
    seen_at: float | None = None
    is_told = False
    while not store.check(["verdict"]):
        said, now = _said(store, place.size), time.monotonic()
        problem = same_setup.problem(said)
        seen_at = now if problem and seen_at is None else seen_at
        if len(said) == place.size or (seen_at is not None and now - seen_at > GATHER_S):
            return problem
        missing = "rank " + ", ".join(str(r) for r in range(place.size) if r not in said)
        if now - began > wait_s:
            return problem or f"{missing} did not come within {wait_s:g} s ({LIMIT})"
        if not is_told and now - began > NOTICE_S:
            is_told = True
            _notice(
                f"rank 0 on {socket.gethostname()} waits for {missing} of {place.size}, for "
                f"{wait_s:g} s ({LIMIT})"
            )
        time.sleep(0.02)
    return ""


def _said(store: Any, size: int) -> dict[int, Facts]:
    keys = {rank: f"ready {rank}" for rank in range(size)}
    if not store.check(list(keys.values())):
        keys = {rank: key for rank, key in keys.items() if store.check([key])}
    found = store.multi_get(list(keys.values())) if keys else []
    return {rank: Facts(**json.loads(text)) for rank, text in zip(keys, found, strict=True)}


# ------------------------------------------------------------------ the store


def has_agent() -> bool:
    """Whether torchrun's agent holds the store. Where it does not, rank 0 does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def store_of(place: Place, config: LaunchConfig) -> Any:
    """The store in which the ranks of a launcher find each other: torchrun's, or rank 0's own."""
    from torch.distributed import PrefixStore

    global has_met
    address, port = config.address or place.address, config.port or place.port
    if place.is_torchruns:
        address, port = place.address, place.port
    else:
        launcher_env.refuse_loopback(place.launcher, address, place.nodes, "launch.address")
    if not address:
        raise UsageError(
            f"{place.launcher} has started ranks on {place.nodes} nodes and does not say where the "
            "first is: add --set launch.address=HOST, or set MASTER_ADDR"
        )
    change = (
        "MASTER_ADDR and MASTER_PORT say where"
        if place.is_torchruns
        else "--set launch.address=HOST and launch.port=PORT choose others"
    )
    here, is_holder = f"rank {place.rank} on {socket.gethostname()}", False
    try:
        if is_holder := place.rank == 0 and not has_agent():
            store = listening_store(*own_address(address, place, config.interface), port)
        else:
            store = _reached(place, address, port, config.timeout_s)
    except (OSError, RuntimeError) as error:
        has_met = True  # as far as they can: nobody would hear a refusal
        what = (
            f"{here} cannot listen on {address}, port {port}: {_reason(error)}"
            if is_holder
            else f"{here} did not reach rank 0 at {address}, port {port}, within "
            f"{config.timeout_s:g} s ({LIMIT}): {_reason(error)}"
        )
        raise UsageError(f"{what}; {change}") from None
    if not has_agent():
        atexit.register(_leave_together, store, place)
        return PrefixStore("shardlab", store)
    # After a restart the old world's addresses are still in torchrun's store: a new name space.
    # (A store that rank 0 opens is new, and a node that came later counts fewer restarts.)
    return PrefixStore(f"shardlab/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def listening_store(family: int, address: str, port: int) -> Any:
    """A store that listens on one address alone; "" stands for every address of the machine.

    A ``TCPStore`` that opens its own socket listens on every interface: anybody who reaches it can
    read and write the keys by which the ranks find each other. So it is handed a bound socket.
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


def own_address(address: str, place: Place, interface: str | None) -> tuple[int, str]:
    """What rank 0 listens on: the address by which the others know it.

    On Debian a host's own name may mean its loopback interface, where other nodes do not reach it:
    then rank 0 listens on the interface that is named, or on all.
    """
    family, _, _, _, found = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0]
    host = str(found[0])
    if place.nodes == 1 or not launcher_env.is_loopback(host):
        return family, host
    if interface is not None and (own := same_setup.address_of(interface)) is not None:
        return socket.AF_INET, own
    return family, ""


def _reached(place: Place, address: str, port: int, wait_s: float) -> Any:
    """A connection to the store, as soon as there is one. Rank 0 may start later than this rank."""
    from torch.distributed import TCPStore

    began, is_told = time.monotonic(), False
    made: list[Any] = []

    def connect() -> None:
        with contextlib.suppress(RuntimeError):
            made.append(TCPStore(address, port, is_master=False, timeout=timedelta(seconds=wait_s)))

    while True:
        try:
            # First a plain connection, which fails for the system's own reasons, and in time.
            left = wait_s - (time.monotonic() - began)
            socket.create_connection((address, port), timeout=min(TRY_S, max(left, 0.1))).close()
            # A store answers at once. What is no store may never answer, nor does TCPStore end.
            trying = threading.Thread(target=connect, daemon=True)
            trying.start()
            trying.join(TRY_S)
            if made:
                return made[0]
            why = OSError(0, "what answers there is no store of PyTorch's")
        except OSError as error:
            why = error
        waited = time.monotonic() - began
        if waited > wait_s:
            raise why
        if not is_told and waited > NOTICE_S - TRY_S and (is_told := place.local_rank == 0):
            _notice(
                f"rank {place.rank} on {socket.gethostname()} does not reach rank 0 at {address}, "
                f"port {port}: {_reason(why)}; it tries for {wait_s:g} s ({LIMIT})"
            )
        time.sleep(min(0.2, 0.01 + waited / 10))


def _reason(error: Exception) -> str:
    """The system's words; a timeout has none."""
    if isinstance(error, TimeoutError) and not error.strerror:
        return "no answer"
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _notice(text: str) -> None:
    output.note("info", f"waiting: {text}")


def wait_until(is_so: Callable[[], bool], seconds: float) -> bool:
    limit, pause = time.monotonic() + seconds, 0.01
    while not (found := is_so()) and time.monotonic() < limit:
        time.sleep(pause)
        pause = min(0.2, pause * 1.2)
    return found


def _leave_together(store: Any, place: Place) -> None:
    """Wait for the other ranks at the end of the process: rank 0 holds the store that they use, and
    srun and mpirun may end a rank that still speaks when the first has left."""
    with contextlib.suppress(Exception):
        store.add("left", 1)
        seconds = _stays_s if place.rank == 0 else STOP_S
        wait_until(lambda: bool(store.add("left", 0) >= place.size), seconds)


# ------------------------------------------------------------------ signals


@contextlib.contextmanager
def _signals(store: Any, place: Place, mark: Mark) -> Iterator[None]:
    """What SIGINT and SIGTERM do to a rank of a launcher's.

    torchrun's agent, srun and mpirun pass on to all ranks what they are sent: then a run that can
    is asked to stop, as if we had started the ranks. But they also end those that are left when
    one failed.
    """
    store = store.clone()  # the main thread may be waiting in the other one
    first: float | None = None

    def handle(number: int) -> None:
        nonlocal first
        now, is_first = time.monotonic(), first is None
        if first is not None and now - first < graceful_stop.SAME_S:
            return
        first = now
        with contextlib.suppress(Exception):
            store.add("signalled", 1 if is_first else 0)
        run = graceful_stop.CURRENT
        if is_first and run is not None and run.is_on:
            run.ask(number)
            return
        if _all_are_signalled(store, place.size):
            mark(signal.Signals(number).name, True)
            if place.rank == 0:
                print("interrupted: every rank was ended", file=sys.stderr, flush=True)
        else:
            ended = f"ended by {place.launcher}, because another rank had failed"
            mark(RankFailure(place.rank, ended), True)
        os._exit(128 + number)

    with graceful_stop.heard(handle):
        yield


def _all_are_signalled(store: Any, size: int) -> bool:
    def is_known() -> bool:
        return bool(store.add("failures", 0)) or is_all()

    def is_all() -> bool:
        return bool(store.add("signalled", 0) >= size)

    with contextlib.suppress(Exception):
        wait_until(is_known, SIGNALLED_S)
        return is_all() and not store.add("failures", 0)
    return False
