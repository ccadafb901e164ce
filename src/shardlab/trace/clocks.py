"""The clocks of a run's nodes: how far each is ahead of rank 0's, measured, kept and corrected.

A trace has the Unix time of its own node. Clocks of different nodes differ by microseconds where
the nodes keep them well, and by seconds where nobody does; a rank whose clock is behind would look
as if it came first. So the first rank of each node exchanges messages with rank 0 before the first
step, after each recorded window and at the end, and ``clocks.json`` in the run folder keeps what
was found. The analysis then moves the events of each trace to rank 0's clock.

Ranks under one kernel share a clock: for them nothing is measured, and no file is written.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import numpy as np
from msgspec import Meta, convert

from shardlab.errors import UsageError
from shardlab.files import write_json

if TYPE_CHECKING:
    from shardlab.trace.model import Ints, Trace
    from shardlab.world import World

FILE = "clocks.json"
SCHEMA = 1
PINGS = 32
# A clock that gained or lost more than this share was set in between: none drifts that much.
MOST_DRIFT = 1e-3


class Ping(NamedTuple):
    """A message to a node and back. Unix times: the outer two on our clock, the others on its."""

    sent_ns: int
    came_ns: int
    left_ns: int
    back_ns: int


def offset(pings: Sequence[Ping]) -> tuple[int, int]:
    """How far the node's clock is ahead of ours, and the largest error of that, in nanoseconds.

    A message came after it was sent, so the node's clock is ahead by ``came - sent`` at most; its
    answer says in the same way that it is ahead by ``left - back`` at least. The truth lies between
    the narrowest of these bounds, however long the messages took each way. If the bounds contradict
    each other, the clock was set in between, and the error covers before and after.
    """
    most = [ping.came_ns - ping.sent_ns for ping in pings]
    least = [ping.left_ns - ping.back_ns for ping in pings]
    low, high = max(least), min(most)
    if low > high:
        low, high = min(least), max(most)
    return (low + high) // 2, (high - low + 1) // 2


@dataclass(frozen=True)
class Reading:
    """How far a node's clock was ahead of rank 0's at one time."""

    when: str  # "start", "after step 3", "end"
    unix_ns: int  # on the node's own clock
    ahead_ns: int
    error_ns: Annotated[int, Meta(ge=0)]


@dataclass(frozen=True)
class Node:
    """Ranks that share a clock, and what was measured of it. Node 0 is rank 0's: it has zeros."""

    node: int
    host: str
    ranks: tuple[int, ...]
    readings: Annotated[tuple[Reading, ...], Meta(min_length=1)]

    def ahead(self, unix_ns: Ints) -> Ints:
        """By how much to correct times of this clock: linear between two readings."""
        # Differences to the first: a float of all nanoseconds since 1970 is coarse.
        first = self.readings[0]
        at = [reading.unix_ns - first.unix_ns for reading in self.readings]
        ahead = [reading.ahead_ns - first.ahead_ns for reading in self.readings]
        found: Ints = np.rint(np.interp(unix_ns - first.unix_ns, at, ahead)).astype(np.int64)
        return found + first.ahead_ns

    def error(self, begin_ns: int, end_ns: int) -> int:
        """The largest error of ``ahead`` between two times, if the clock drifts evenly."""
        pairs = list(pairwise(self.readings)) or [(self.readings[0], self.readings[0])]
        near = [(a, b) for a, b in pairs if a.unix_ns <= end_ns and begin_ns <= b.unix_ns] or pairs
        return max(
            max(a.error_ns, b.error_ns) + abs(b.ahead_ns - a.ahead_ns) * _was_set(a, b)
            for a, b in near
        )

    @property
    def drift_ppm(self) -> float | None:
        """Microseconds that this clock gains in a second; None if less than the errors show."""
        first, last = self.readings[0], self.readings[-1]
        gained, took = last.ahead_ns - first.ahead_ns, last.unix_ns - first.unix_ns
        if took <= 0 or abs(gained) <= first.error_ns + last.error_ns:
            return None
        return 1e6 * gained / took


def _was_set(a: Reading, b: Reading) -> bool:
    drifted = MOST_DRIFT * abs(b.unix_ns - a.unix_ns) + a.error_ns + b.error_ns
    return abs(b.ahead_ns - a.ahead_ns) > drifted


def clock_name() -> str:
    """What tells this kernel's clock from others: its boot, else the host's name."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()


# ------------------------------------------------------------------ measured, on the ranks


class Clocks:
    """The nodes' clocks, as rank 0 finds them. All ranks make one, and call ``read`` together."""

    def __init__(self, world: World) -> None:
        self.world = world
        clocks: dict[str, tuple[str, list[int]]] = {}  # host and ranks
        for rank, (name, host) in enumerate(world.gather((clock_name(), socket.gethostname()))):
            clocks.setdefault(name, (host, []))[1].append(rank)
        self.hosts, self.ranks = zip(*clocks.values(), strict=True)
        self.readings: list[list[Reading]] = [[] for _ in clocks]

    def read(self, when: str) -> None:
        """Measure the clock of each node but rank 0's. It takes some milliseconds for each."""
        if len(self.ranks) == 1:
            return
        self.readings[0].append(Reading(when, time.time_ns(), 0, 0))
        for ranks, readings in zip(self.ranks[1:], self.readings[1:], strict=True):
            if self.world.rank == 0:
                pings = _ask(self.world, ranks[0])
                readings.append(Reading(when, pings[-1].left_ns, *offset(pings)))
            elif self.world.rank == ranks[0]:
                _answer(self.world)

    def keep(self, folder: Path) -> None:
        """Rank 0 writes what was measured so far. On one node there is nothing to correct."""
        if self.world.rank:
            return
        if len(self.ranks) == 1:
            (folder / FILE).unlink(missing_ok=True)  # of an attempt on more nodes, before a restart
            return
        parts = zip(self.hosts, self.ranks, self.readings, strict=True)
        nodes = [Node(i, host, tuple(r), tuple(s)) for i, (host, r, s) in enumerate(parts)]
        write_json(folder / FILE, {"schema": SCHEMA, "nodes": [asdict(node) for node in nodes]})


def _ask(world: World, rank: int) -> list[Ping]:
    import torch
    import torch.distributed as dist

    from shardlab import comm

    group = comm.host_group(world.group)
    answer, pings = torch.zeros(2, dtype=torch.int64), []
    for _ in range(PINGS):
        sent = time.time_ns()
        dist.send(answer, group=group, group_dst=rank)
        dist.recv(answer, group=group, group_src=rank)
        pings.append(Ping(sent, int(answer[0]), int(answer[1]), time.time_ns()))
    return pings


def _answer(world: World) -> None:
    import torch
    import torch.distributed as dist

    from shardlab import comm

    group = comm.host_group(world.group)
    answer = torch.zeros(2, dtype=torch.int64)
    for _ in range(PINGS):
        dist.recv(answer, group=group, group_src=0)
        answer[0] = time.time_ns()
        answer[1] = time.time_ns()
        dist.send(answer, group=group, group_dst=0)


# ------------------------------------------------------------------ applied, in the analysis


@dataclass(frozen=True)
class Clock:
    """How a node's clock was corrected."""

    node: int
    host: str
    ranks: tuple[int, ...]
    ahead_us: float  # of rank 0's, in the middle of the recorded steps
    error_us: float  # the largest that the correction can be wrong by
    drift_ppm: float | None  # microseconds gained in a second, if the readings show any


@dataclass(frozen=True)
class _File:
    schema: Literal[1]
    nodes: tuple[Node, ...]


def load(run: Path) -> dict[int, Node]:
    """Each rank's node, as the run folder's ``clocks.json`` says; empty if there is none."""
    path = run / FILE
    try:
        found = convert(json.loads(path.read_text(encoding="utf-8")), _File)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(
            f"{path} cannot be read: {error}; without it, clocks are set by the ends of collectives"
        ) from None
    return {rank: node for node in found.nodes for rank in node.ranks}


def corrected(trace: Trace, nodes: Mapping[int, Node]) -> Trace:
    """The trace on rank 0's clock, if that of its node was measured."""
    node = nodes.get(trace.rank)
    if node is None or not trace.shardlab or not trace.steps:
        return trace
    base = trace.base_ns

    def moved(times: Ints) -> Ints:
        return times - node.ahead(times + base)

    events, edges = trace.events, moved(trace.edges).tolist()
    start = moved(events.start_ns)
    steps = zip(trace.steps, edges[::2], edges[1::2], strict=True)
    begin, end = trace.steps[0].start_ns + base, trace.steps[-1].end_ns + base
    middle = node.ahead(np.array([(begin + end) // 2]))
    clock = Clock(
        node.node,
        node.host,
        node.ranks,
        ahead_us=int(middle[0]) / 1000,
        error_us=node.error(begin, end) / 1000,
        drift_ppm=node.drift_ppm,
    )
    return replace(
        trace,
        events=replace(events, start_ns=start, dur_ns=moved(events.end_ns) - start),
        memory=replace(trace.memory, at_ns=moved(trace.memory.at_ns)),
        steps=tuple(replace(step, start_ns=a, end_ns=b) for step, a, b in steps),
        clock=clock,
    )


def between(a: Clock | None, b: Clock | None) -> int:
    """By how many nanoseconds times of two ranks may be wrong against each other."""
    if a is None or b is None or a.node == b.node:
        return 0
    return round((a.error_us + b.error_us) * 1000)
