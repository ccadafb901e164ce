"""Which ranks are on which node, and how messages say so. No torch.

On a single machine there is nothing to say, and messages stay as they are.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from shardlab.errors import Halt, RankFailure

RANK = re.compile(r"\brank (\d+)\b")


@dataclass(frozen=True)
class Nodes:
    """The nodes of a world; on a single machine there are none."""

    node_of: tuple[int, ...] = ()  # by rank
    host_of: tuple[str, ...] = ()  # by node
    here: int = 0  # the node of this process

    @property
    def are_several(self) -> bool:
        return len(self.host_of) > 1

    def on(self, node: int) -> list[int]:
        """The ranks of a node."""
        return [rank for rank, its in enumerate(self.node_of) if its == node]

    def where(self, rank: int) -> str:
        """``node 1, HOST``; empty on a single machine."""
        if not self.are_several or not 0 <= rank < len(self.node_of):
            return ""
        node = self.node_of[rank]
        return f"node {node}, {self.host_of[node]}"

    def named(self, node: int) -> str:
        """``node 1 (HOST, ranks 2, 3)``."""
        return f"node {node} ({self.host_of[node]}, {names(self.on(node))})"

    def whole(self, ranks: Collection[int]) -> list[int]:
        """The nodes all of whose ranks are among these, if there are others."""
        found = [n for n in range(len(self.host_of)) if set(self.on(n)) <= set(ranks)]
        return [] if len(found) == len(self.host_of) else found

    def located(self, text: str) -> str:
        """The text with the node behind each rank where it comes first: ``rank 3 (node 1, HOST)``;
        a text that names a node already is left as it is."""
        if not self.are_several or re.search(r"\bnode \d", text):
            return text
        for rank in dict.fromkeys(RANK.findall(text)):
            if where := self.where(int(rank)):
                text = re.sub(rf"\brank {rank}\b", f"rank {rank} ({where})", text, count=1)
        return text

    def locate(self, failure: RankFailure) -> None:
        """Add to a failure on which node its rank is. What an exception of the user's code says is
        left as it is: not every rank in it is one of ours."""
        failure.where = self.where(failure.rank)
        if isinstance(failure, Halt):
            failure.message = self.located(failure.message)


def names(ranks: Sequence[int]) -> str:
    """``rank 0``; ``ranks 0, 2, 3``."""
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}"


CURRENT = Nodes()  # those of this process's world


def of(places: Sequence[tuple[int | None, str]], rank: int) -> Nodes:
    """The nodes, given each rank's node and host. mpirun does not number the nodes: then each host
    is a node, in the order of the ranks."""
    keys = [host if node is None else node for node, host in places]
    order = list(dict.fromkeys(keys)) if None in [n for n, _ in places] else sorted(set(keys))
    hosts = [next(h for key, (_, h) in zip(keys, places, strict=True) if key == k) for k in order]
    node_of = tuple(order.index(key) for key in keys)
    return Nodes(node_of, tuple(hosts), node_of[rank])
