"""This process as one rank of a world that torchrun, srun or mpirun has started.

The ranks find each other in a store, tell each other whether they can begin, and join. What one of
them refuses, all refuse, in one line.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from shardlab.config import LaunchConfig
from shardlab.errors import Interrupted, RankFailure, UsageError
from shardlab.guard import nodes, stop
from shardlab.run import child
from shardlab.run import place as places
from shardlab.run.place import Place
from shardlab.run.ranks import GRACE_S, STOP_S, Event, Failure, unless_stopped

TELL_S = 20.0  # how long a rank whose input is refused looks for the others, to tell them


def run(
    target: str,
    config: LaunchConfig,
    args: tuple[Any, ...],
    place: Place,
    listen: Callable[[Event], None],
    mark_unless_told: Callable[[RankFailure | str], None],
) -> Any:
    """This process as one rank of a launcher's world."""
    from shardlab import world as worlds

    rank, size = place.rank, place.size
    store = meet(place, config)
    try:
        nodes.settle(store, place)
        with stop.heard(_JoinedSignals(store, place, mark_unless_told)):
            numbers = rank, size, place.local_rank, place.local_size
            world = worlds.join(config, *numbers, store, tell=listen)
            result = child.resolve(target)(world, *args)
            worlds.leave()
        result = unless_stopped(result)
        return result if rank == 0 else None
    except Interrupted as stopped:
        if rank:
            raise SystemExit(stopped.exit_code) from None
        raise
    except Exception as error:
        failure = Failure.of(rank, *child.as_message(error))
        if isinstance(failure.error, RankFailure):
            nodes.CURRENT.locate(failure.error)
            if failure.is_victim:
                # torchrun may end us while we wait for the cause to speak: say what we know now.
                mark_unless_told(failure.error)
                time.sleep(GRACE_S)
        with contextlib.suppress(Exception):
            is_for_all_nodes = isinstance(failure.error, UsageError) or failure.is_lost_node
            if _has_been_said(store, place, is_for_all_nodes):
                raise SystemExit(failure.exit_code) from None
        raise failure.error from None


def meet(place: Place, config: LaunchConfig) -> Any:
    """The store of all ranks, when each of them is there and can begin."""
    store = store_of(place, config)
    if refusal := _refusal_of_any(store, place, _unfit(place, config), config.timeout_s):
        if _has_been_said(store, place, is_refusal=True):
            raise SystemExit(2)
        raise UsageError(refusal)
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
        child.use_interface(config.interface)
    elif place.nodes == 1 and not place.is_torchruns:
        child.stay_on_loopback()
    return ""


def store_of(place: Place, config: LaunchConfig) -> Any:
    """The store in which the ranks of a launcher find each other: torchrun's, or rank 0's own."""
    from torch.distributed import PrefixStore, TCPStore, rendezvous

    global _came_together
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store, _, _ = next(rendezvous("env://", place.rank, place.size))
        # After a restart the old world's addresses are still in torchrun's store: a new name space.
        # (A store that rank 0 opens is new, and a node that came later counts fewer restarts.)
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return PrefixStore(f"shardlab/{attempt}", store)
    address, port = config.address or place.address, config.port or place.port
    if place.is_torchruns:  # set by hand, or by Ray: MASTER_ADDR and MASTER_PORT are for all ranks
        address, port = place.address, place.port
    else:
        places.refuse_loopback(place.launcher, address, place.nodes, "launch.address")
    if not address:
        raise UsageError(
            f"{place.launcher} has started ranks on {place.nodes} nodes and does not say where the "
            "first is: add --set launch.address=HOST, or set MASTER_ADDR"
        )
    try:
        if place.rank == 0:
            store = child.listening_store(*own_address(address, place, config.interface), port)
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


def own_address(address: str, place: Place, interface: str | None) -> tuple[int, str]:
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
        place = places.joined()
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
    for where, there in ranks_at.items():
        if len(there) > 1:  # they would share a GPU, and NCCL would hang
            return f"ranks {', '.join(map(str, there))} are all {where}; the launcher is set wrong"
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
