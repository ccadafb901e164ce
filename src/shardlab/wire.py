"""The bytes that collectives send: by the best algorithm, and by the backend's own. No torch."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence


def wire_bytes(op: str, size: int, ranks: int) -> float:
    """Bytes one rank must send for a collective on ``size`` bytes, by the best algorithm."""
    share = (ranks - 1) / ranks
    factor = {
        "all_reduce": 2 * share,
        "all_gather": share,
        "reduce_scatter": share,
        "all_to_all": share,  # each rank sends every other its part of the tensor
        "broadcast": share,  # averaged over ranks: the tensor enters each rank but the source
        "reduce": share,  # and leaves each but one
        "gather": share,
        "scatter": share,
        "barrier": 0.0,
        "send": 1.0,  # from one rank to one other; it is counted where it is sent
        "recv": 0.0,
    }
    return factor[op] * size


def bus_bytes(op: str, size: int, ranks: int) -> float:
    """Bytes for the bus bandwidth, as nccl-tests count it: what one link must carry.

    A tensor of one root crosses a link whole, although not every rank sends it.
    """
    is_whole = op in ("broadcast", "reduce", "send", "recv")
    return float(size) if is_whole else wire_bytes(op, size, ranks)


def ranks_per_node(places: Sequence[tuple[int, int]]) -> int:
    """From each rank's (local rank, ranks on its node): how many ranks each node has.

    0 stands for one node, and for nodes that cannot be told from the rank's number: with other
    numbers of ranks, or whose ranks are not neighbours.
    """
    count = places[0][1]
    is_even = all(place == (rank % count, count) for rank, place in enumerate(places))
    return count if is_even and count < len(places) and len(places) % count == 0 else 0


@functools.cache
def link_shares(
    op: str, nodes: tuple[int, ...], rank: int, backend: str = "gloo", ours: bool = True
) -> tuple[float, float]:
    """What one rank sends inside its node, and to other nodes, in units of the tensor's size.

    ``nodes``: the node of each rank of the group; ``rank``: this rank's place in it. (0.5, 2.0) is
    half of the tensor to its own node and twice the tensor to others. Of a message ("send" and
    "recv") the sender and the receiver are the group.
    """
    sent = [0.0, 0.0]
    for sender, receiver, share in _messages(op, len(nodes), backend, ours):
        if sender == rank:
            sent[nodes[sender] != nodes[receiver]] += share
    return sent[0], sent[1]


def _messages(op: str, n: int, backend: str, ours: bool) -> Iterator[tuple[int, int, float]]:
    """Who sends whom how much of a collective's tensor: sender, receiver, share.

    These are the algorithms that Gloo has; interface counters of two and three hosts agree
    (tests/strategies/test_wire.py). Over Gloo our all_gather is a broadcast from each rank and our
    reduce_scatter an all-to-all; PyTorch's own (``ours=False``) are a ring and an all-reduce. For
    NCCL, which chooses between rings and trees, it is a ring in the order of the ranks.
    """
    is_gloo = backend == "gloo"
    step = -1 if is_gloo else 1  # the way around the ring
    if op == "all_to_all" or (op == "reduce_scatter" and is_gloo and ours):
        yield from ((a, b, 1 / n) for a in range(n) for b in range(n) if a != b)
    elif op in ("broadcast", "all_gather") and is_gloo and (ours or op == "broadcast"):
        roots = range(n) if op == "all_gather" else range(1)
        for root in roots:  # a binomial tree: each rank that has it sends it to one more
            for has in (1 << i for i in range(n.bit_length())):
                for a in range(min(has, max(0, n - has))):
                    yield (root + a) % n, (root + a + has) % n, 1 / len(roots)
    elif op in ("send", "recv"):
        yield 0, 1, 1.0
    elif op == "broadcast":
        yield from ((a, a + 1, 1.0) for a in range(n - 1))
    elif op != "barrier":
        rounds = 2 if op == "all_reduce" or (op == "reduce_scatter" and is_gloo) else 1
        yield from ((a, (a + step) % n, rounds * (n - 1) / n) for a in range(n) if n > 1)
