"""This process as one rank of a world that torchrun, srun or mpirun has started.

The ranks find each other in a store, tell each other whether they can begin, and join. What one of
them refuses, all refuse, in one line.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from shardlab.config import LaunchConfig
from shardlab.errors import Interrupted, Mistake, RankFailure, UsageError
from shardlab.guard import nodes, stop
from shardlab.run import alike as alikes
from shardlab.run import child, meeting, reach
from shardlab.run import place as places
from shardlab.run.place import Place
from shardlab.run.ranks import GRACE_S, STOP_S, Event, Failure, unless_stopped
from shardlab.run.reach import Address


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
    store = meet(place, config, args)
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
        if isinstance(failure.error, Mistake) and size > 1:
            raise failure.error.named() from None
        raise failure.error from None


def meet(place: Place, config: LaunchConfig, args: Sequence[Any] | None = None) -> Any:
    """The store of all ranks, when each of them is there and can begin.

    ``args``: what the function of a rank is called with, which must be alike on all of them; None
    where these processes start ranks later, perhaps fewer than they are.
    """
    store = meeting.store_of(place, config)
    refusal, address = _unfit(place, config), None
    if not refusal:
        refusal, address = _listens_at(place, config)
        refusal = "" if args is None else refusal
    alike = alikes.table(config, args or ())
    if told := meeting.refusal_of_any(store, place, refusal, config.timeout_s, alike, address):
        if _has_been_said(store, place, is_refusal=True):
            raise SystemExit(2)
        raise UsageError(told)
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


def _listens_at(place: Place, config: LaunchConfig) -> tuple[str, Address | None]:
    """Why this rank has no device or no address, and else where other nodes would reach it."""
    from shardlab import world as worlds

    try:
        _, backend = worlds.choose(config, place.local_rank, place.local_size)
    except UsageError as error:
        return str(error), None
    if backend != "gloo" and config.interface is None:
        return "", reach.towards(place.address)  # NCCL chooses for itself
    named = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    names = [name for _, name in socket.if_nameindex()]
    if named and named not in names:
        return f"GLOO_SOCKET_IFNAME is {named}, and this host has {', '.join(names)}", None
    return "", reach.gloos_address()


def refused_together(refusal: str) -> str:
    """Input that one of a launcher's ranks refuses is refused by all of them, in one line: this.

    On another node a file may be missing that is there on this one: a rank that is refused before
    it has joined the others would leave them waiting for it.
    """
    place = None
    with contextlib.suppress(UsageError):  # the launcher's own variables were refused
        place = places.joined()
    if place is None or meeting.came_together:
        return refusal
    with contextlib.suppress(Exception):  # no store: no other rank to tell
        store = meeting.store_of(place, LaunchConfig(timeout_s=meeting.TELL_S))
        refusal = meeting.refusal_of_any(store, place, refusal, STOP_S) or refusal
        if _has_been_said(store, place, is_refusal=True):
            raise SystemExit(2)
    return refusal


def _has_been_said(store: Any, place: Place, is_refusal: bool) -> bool:
    """The first rank to fail speaks for all; a refusal is told once on each node, in its log."""
    node = socket.gethostname() if place.node is None else place.node
    nth = store.add("failures", 1)
    nth_on_node = store.add(f"failures on node {node}", 1)
    return bool((nth_on_node if is_refusal else nth) > 1)


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
            reach.wait_until(is_known, self.ALL_S)
            return is_all() and not self.store.add("failures", 0)
        return False
