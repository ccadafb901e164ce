"""What a collective takes over links that need not be here: the costs of NCCL's rings and trees.

The latencies are those of NCCL's tuning (src/graph/tuning.cc), in three protocols: two for small
messages, which have short hops and a low rate, and one for large ones. As NCCL does, we take the
algorithm and the protocol that end first.
"""

from __future__ import annotations

import math

from shardlab.errors import unknown
from shardlab.plan.devices import Machine
from shardlab.plan.graph import Cost, Group

# Seconds before anything moves, and of one hop by kind of link: protocols LL, LL128, Simple.
BASE = (6.6e-6, 14.0e-6, 8.4e-6)
RING_HOP = {
    "nvlink": (0.6e-6, 1.9e-6, 3.4e-6),
    "pcie": (1.0e-6, 2.5e-6, 5.7e-6),
    "net": (2.7e-6, 4.0e-6, 14.0e-6),
}
TREE_HOP = {
    "nvlink": (0.6e-6, 1.25e-6, 4.0e-6),
    "pcie": (1.0e-6, 1.9e-6, 4.0e-6),
    "net": (5.0e-6, 8.5e-6, 14.0e-6),
}
# What a protocol leaves of the rate: LL sends a flag with each word, LL128 one with 120 bytes.
RATE = (0.25, 0.92, 1.0)
TREE_RATE = 0.92
RINGS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "broadcast": 1, "barrier": 2}
OPS = (*RINGS, "all_to_all", "send")


def spread(group: Group, per_node: int) -> tuple[int, int]:
    """How many of a group's ranks share a node, and on how many nodes it lies."""
    local = max(1, min(group.size, per_node // max(1, group.stride)))
    return local, math.ceil(group.size / local)


def cost(op: str, size: float, group: Group, machine: Machine) -> Cost:
    """``size``: bytes of the whole tensor, of all ranks' shards together. ``send`` goes from one
    rank to the next of the group. All groups of the same kind are taken to be at it at once, so
    a node's ports are shared by its ranks."""
    if op not in OPS:
        raise unknown("collective", op, OPS)
    n = group.size
    if n <= 1:
        return Cost(0.0)
    local, nodes = spread(group, machine.per_node)
    is_far = nodes > 1
    inside = machine.inside.bytes_per_s * machine.inside.reached
    of_one = machine.between.of_node(machine.per_node) / machine.per_node
    if op == "send":
        return Cost(BASE[2] + _hop(machine, is_far, 2), 0.0, size / (of_one if is_far else inside))
    if op == "all_to_all":
        away = size * (n - local) / n / of_one
        near = size * (local - 1) / n / inside
        hops = (local - 1) * _hop(machine, False, 2) + (n - local) * _hop(machine, True, 2)
        return Cost(BASE[2] + hops, 0.0, max(near, away))
    rate = min(inside, of_one * local) if is_far else inside
    rounds = RINGS[op]
    pieces = 1.0 if op == "broadcast" else (n - 1) / n  # of the tensor, that pass a rank in a round
    ways = []
    for protocol, share in enumerate(RATE):
        near, far = _hop(machine, False, protocol), _hop(machine, True, protocol)
        hops = rounds * ((n - nodes) * near + (nodes - 1) * far)
        wire = rounds * pieces * size / (rate * share)
        ways.append(Cost(BASE[protocol] + hops, 0.0, wire))
        if op not in ("all_gather", "reduce_scatter"):
            near = _hop(machine, False, protocol, TREE_HOP)
            far = _hop(machine, True, protocol, TREE_HOP)
            hops = rounds * ((local - 1) * near + math.ceil(math.log2(nodes)) * far)
            wire = rounds * size / (rate * share * TREE_RATE)
            ways.append(Cost(BASE[protocol] + hops, 0.0, wire))
    best = min(ways, key=lambda way: way.latency_s + way.wire_s)
    return Cost(best.latency_s) if op == "barrier" else best


def _hop(
    machine: Machine,
    is_far: bool,
    protocol: int,
    table: dict[str, tuple[float, float, float]] = RING_HOP,
) -> float:
    link = machine.between if is_far else machine.inside
    return table[link.kind][protocol] + link.latency_s
