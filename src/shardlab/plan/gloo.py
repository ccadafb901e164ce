"""What a collective takes over Gloo: measured between two ranks, carried over to more and to links.

Between two ranks every collective is measured at several sizes: how long it takes, and how long it
keeps the cores busy; once on one machine, and once over a link of a known rate. Gloo's algorithms
say what changes with the number of ranks: how much each sends, in how many rounds, and how often it
must wait for the link's latency.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardlab.errors import UsageError
from shardlab.plan.graph import Cost, Group, Start
from shardlab.wire import wire_bytes

# Our all-gather over Gloo is a broadcast by each rank, all at once: "broadcasts".
OPS = ("all_reduce", "broadcast", "broadcasts", "all_to_all", "all_gather", "reduce_scatter")
CHANNELS = 2  # threads of PyTorch's Gloo: collectives that are under way at once
# Gloo has no reduce-scatter: PyTorch sums the whole tensor everywhere, and copies a part of it.
SENDS = {"reduce_scatter": "all_reduce", "broadcasts": "all_gather"}
# Two go through a buffer of the tensor's size. What that takes beyond the collective that they are
# made of does not depend on the number of ranks.
MADE_OF = {"all_gather": "all_to_all", "reduce_scatter": "all_reduce"}
SEGMENT = 2**20  # bytes of a ring's messages at most
# The next two rules are read from benchmarks/gloo_delay.py. A ring has two segments under way, and
# each further one waits for this many journeys over the link.
SEGMENT_TRIPS = 0.75
# These often use one direction of a link at a time. With a delay that is longer than the ranks are
# apart they use both, unless others are under way.
BOTH_WAYS = ("broadcasts", "all_to_all", "all_gather")
APART_S = 1e-3


def kind_of(start: Start) -> str:
    """Under which of OPS a collective's prices stand."""
    if start.op == "all_gather" and start.sent == "broadcast":
        return "broadcasts"
    return start.sent or start.op


def sent_by(op: str, size: float, ranks: int) -> float:
    """Bytes that each rank sends."""
    return wire_bytes(SENDS.get(op, op), round(size), ranks)


def rounds(op: str, ranks: int) -> int:
    """Messages that a rank sends one after another: in a ring, along a tree, or to each other."""
    if op in ("all_reduce", "reduce_scatter"):
        return 2 * (ranks - 1)
    depth = math.ceil(math.log2(ranks))
    return {"broadcast": depth, "broadcasts": ranks * depth}.get(op, ranks - 1)


def trips(op: str, size: float, ranks: int) -> float:
    """One-way journeys over the link that follow each other. Gloo's receiver says that it is ready
    before the sender sends, so a round takes two; messages to different ranks go side by side. A
    ring sends each rank's part in two segments at least, and both are under way at once."""
    if op == "broadcasts":
        return 2.0 * rounds("broadcast", ranks) * math.ceil(ranks / CHANNELS)
    if op in ("all_reduce", "reduce_scatter"):
        segments = max(2, math.ceil(size / ranks / SEGMENT))
        return rounds(op, ranks) * (2 + SEGMENT_TRIPS * (segments - 2))
    return 2.0 * (1 if op == "all_to_all" else rounds(op, ranks))


@dataclass(frozen=True)
class Curve:
    """Seconds by the bytes that a rank sends: straight lines between what was measured."""

    sent: Sequence[float]
    seconds: Sequence[float]

    def at(self, sent: float) -> float:
        if sent <= self.sent[-1]:
            return float(np.interp(sent, self.sent, self.seconds))
        slope = (self.seconds[-1] - self.seconds[-2]) / (self.sent[-1] - self.sent[-2])
        return self.seconds[-1] + slope * (sent - self.sent[-1])


Curves = Mapping[str, Curve]  # by collective


@dataclass(frozen=True)
class Prices:
    wall: Curves  # until the slower rank has it
    host: Curves  # of the cores, for each rank


@dataclass(frozen=True)
class Measured:
    """Two ranks on one machine, or joined by a link."""

    alone: Prices
    queued: Prices  # with others under way
    rate: float | None = None  # bytes per second of the link


@dataclass(frozen=True)
class Gloo:
    near: Measured  # on one machine
    far: Measured  # over a link whose rate is known

    def cost(
        self,
        op: str,
        size: float,
        group: Group,
        is_queued: bool = False,
        rate: float | None = None,
        latency_s: float = 0.0,
    ) -> Cost:
        """``rate``: bytes per second of each rank's own link; None: the ranks share a machine."""
        ranks = group.size
        if ranks <= 1:
            return Cost(0.0)
        if op == "barrier":
            op, size = "all_reduce", 4.0
        if op in ("send", "recv"):  # to the next of a ring, or of a pipeline, and from the last
            op, size, ranks = "all_to_all", 2.0 * size, 2
        if op not in OPS:
            raise UsageError(f"no cost of {op} over Gloo; there is one of {', '.join(OPS)}")
        where = self.near if rate is None else self.far
        prices = where.queued if is_queued else where.alone
        host = _carried_over(prices.host, op, size, ranks)
        channels = min(ranks, CHANNELS) if op == "broadcasts" else 1  # each is a call of its own
        if rate is None:
            return Cost(0.0, host, _carried_over(prices.wall, op, size, ranks), channels)
        assert self.far.rate is not None
        # How much of the time is the link's was seen at one rate; at another it changes with that.
        curve = prices.wall[op]
        of_link = (curve.at(sent_by(op, size, ranks)) - curve.at(0.0)) * self.far.rate / rate
        if op in BOTH_WAYS and latency_s > APART_S and not is_queued:
            of_link = min(of_link, sent_by(op, size, ranks) / rate)
        fixed = curve.at(0.0) * rounds(op, ranks) / rounds(op, 2)
        return Cost(latency_s * trips(op, size, ranks), host, fixed + of_link, channels)


def _carried_over(curves: Curves, op: str, size: float, ranks: int) -> float:
    """From two ranks to more: bytes by what each sends, the fixed part by the rounds."""
    source = MADE_OF.get(op, op)
    curve = curves[source]
    more = curve.at(0.0) * (rounds(source, ranks) / rounds(source, 2) - 1)
    moving = more + curve.at(sent_by(op, size, ranks))
    if source == op:
        return moving
    of_two = sent_by(op, size, 2)
    return moving + max(0.0, curves[op].at(of_two) - curve.at(of_two))


def measured(points: Sequence[Mapping[str, Any]], rate: float | None = None) -> Measured:
    """From the points of ``calibrate.on_rank``, of one process or of several."""

    def curves(key: str) -> dict[str, Curve]:
        found = {}
        for op in OPS:
            sizes = sorted({p["bytes"] for p in points})
            seconds = [
                typical([p[key] for p in points if (p["op"], p["bytes"]) == (op, size)])
                for size in sizes
            ]
            found[op] = Curve([sent_by(op, size, 2) for size in sizes], rising(seconds))
        return found

    alone, queued = (
        Prices(curves(f"{kind}wall_s"), curves(f"{kind}host_s")) for kind in ("", "queued_")
    )
    return Measured(alone, queued, rate)


def typical(seconds: Sequence[float]) -> float:
    """The mean without the least and the greatest quarter. A step has many messages, of which some
    take long, so their mean counts; but a few rounds are disturbed by others."""
    cut = len(seconds) // 4
    return statistics.fmean(sorted(seconds)[cut : len(seconds) - cut])


def rising(values: Sequence[float]) -> list[float]:
    """The nearest numbers of which none is less than the one before: a larger tensor does not take
    less time, so where it seems to, both get their mean."""
    groups: list[list[float]] = []
    for value in values:
        groups.append([value])
        while len(groups) > 1 and statistics.fmean(groups[-2]) > statistics.fmean(groups[-1]):
            last = groups.pop()
            groups[-1] += last
    return [statistics.fmean(group) for group in groups for _ in group]


# Seconds of the link for each byte that a rank sends, as a multiple of 1 / rate: measured at
# 1 Gbit/s (benchmarks/plan_error.py). A broadcast goes one way only, and Gloo's all-to-all keeps
# one direction waiting for the other.
OF_LINK = {
    "all_reduce": 1.0, "broadcast": 2.0, "broadcasts": 1.95, "all_to_all": 1.95, "all_gather": 1.5,
    "reduce_scatter": 1.03,
}  # fmt: skip
MORE_HOST = 1.3  # times that a message over a link keeps the cores busy longer than on one machine


def over_a_link(near: Measured, rate: float = 125e6) -> Measured:
    """What a link would cost, where none was measured."""

    def prices(here: Prices) -> Prices:
        wall, host = {}, {}
        for op, factor in OF_LINK.items():
            sent, fixed = here.wall[op].sent, here.wall[op].seconds[0] * MORE_HOST
            wall[op] = Curve(sent, [fixed + factor * size / rate for size in sent])
            host[op] = Curve(sent, [seconds * MORE_HOST for seconds in here.host[op].seconds])
        return Prices(wall, host)

    return Measured(prices(near.alone), prices(near.queued), rate)
