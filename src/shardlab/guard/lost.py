"""What is said when a node or its link is gone.

Rank 0 watches the ranks of a launcher's world through a store, which lies on the first node. A
node that is cut off from the store cannot hear rank 0's verdict, and comes to its own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from shardlab.errors import LOST_PEER, Halt
from shardlab.guard.nodes import Nodes
from shardlab.guard.verdict import Seen

SILENT_TICKS = 3  # reports in a row that a rank has not sent: then it is gone
TELL_S = 2.0  # how long writing to the run folder may take: it may be on the other side too


def is_lost_peer(error: BaseException) -> bool:
    """Whether an exception only says that another rank has gone."""
    return any(words in str(error).lower() for words in LOST_PEER)


def of_ranks(gone: Sequence[int], nodes: Nodes, error: BaseException) -> Halt:
    """Ranks that left without a word, while the others lost their connections to them."""
    whole = nodes.whole(gone)
    parts = [nodes.named(node) for node in whole]
    parts += [nodes.located(f"rank {r}") for r in gone if nodes.node_of[r] not in whole]
    verb = "is" if len(parts) == 1 else "are"
    # Gloo names the line of its own code before, and gives advice after.
    why = re.sub(r"^\[\S+\] ", "", str(error)).partition("\n")[0].partition(". ")[0]
    text = f"{' and '.join(parts)} {verb} gone without a word: killed, or the machine is down"
    return _halt(f"{text} ({why})", gone, whole)


def of_store(nodes: Nodes, endpoint: str, own: Seen, stood_s: float, why: str) -> Halt:
    """The verdict of a node that no longer reaches the store, which is on the node of rank 0."""
    far = nodes.node_of[0]
    doing = own.waits_for.full if own.waits_for else own.phase
    text = (
        f"{nodes.named(nodes.here)} has lost {nodes.named(far)} at {endpoint}: {why}; rank "
        f"{own.rank} has been in {doing} for {stood_s:.0f} s"
    )
    return _halt(text, nodes.on(far), [far])


def _halt(text: str, ranks: Sequence[int], nodes: Sequence[int]) -> Halt:
    return Halt("lost", text, ranks[0], details={"ranks": list(ranks), "nodes": list(nodes)})
