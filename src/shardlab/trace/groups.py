"""Which process group a collective over Gloo is of: its event does not say, its thread does.

A trace lists its rank's groups in the order in which they were made (``pg_config``). Each made a
thread for its connections, then two that do its work, so:

- all collectives of one thread are of one group;
- threads with neighbouring numbers are of one group, and a later group has higher numbers;
- the ranks of a group have the same collectives in a step, and those overlap in time.

What contradicts these is ruled out. A thread whose group is still open is not guessed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, pairwise
from typing import Any, NamedTuple

from shardlab.trace.model import Trace

Members = tuple[int, ...]
Choice = tuple[Members, ...]  # a group for each thread, in the threads' order
# By rank and thread, their group; None: not known.
Found = Mapping[tuple[int, int], Members | None]
THREADS = 2  # of a group, unless its options say otherwise
MOST_CHOICES = 1000  # per rank: more are not tried


class Call(NamedTuple):
    """A collective on one rank, on the common clock. ``what`` is equal on all its ranks."""

    thread: int
    step: int | None
    what: str
    start_ns: int
    end_ns: int
    ends_together: bool


def listed(trace: Trace) -> list[Members]:
    """The rank's groups, in the order in which they were made; empty if the trace has no list."""
    about = trace.metadata.get("distributedInfo")
    groups = about.get("pg_config") if isinstance(about, Mapping) else None
    found = []
    for group in groups if isinstance(groups, Sequence) else ():
        ranks = group.get("ranks") if isinstance(group, Mapping) else None
        if not isinstance(ranks, list) or not all(isinstance(rank, int) for rank in ranks):
            return []  # an unknown form of the list
        found.append(tuple(sorted(ranks)))
    return [members for members in found if trace.rank in members]


def of_threads(
    groups: Mapping[int, Sequence[Members]],
    calls: Mapping[int, Sequence[Call]],
    slack_ns: int | None,
) -> Found:
    """The group of each thread, by rank. ``slack_ns``: by how much times of two ranks may differ;
    None: they cannot be compared."""
    threads = {rank: sorted({call.thread for call in mine}) for rank, mine in calls.items()}
    choices = {
        rank: list(islice(_choices(mine, groups[rank]), MOST_CHOICES + 1))
        for rank, mine in threads.items()
    }
    for rank, mine in choices.items():
        if len(mine) > MOST_CHOICES:
            choices[rank] = []
    agree = _Agreement(threads, calls, slack_ns)
    changed = all(choices.values())
    while changed:
        changed = False
        for rank, mine in choices.items():
            others = [other for other in choices if other != rank]
            left = [
                choice
                for choice in mine
                if all(
                    any(agree(rank, choice, other, theirs) for theirs in choices[other])
                    for other in others
                )
            ]
            changed = changed or len(left) < len(mine)
            choices[rank] = left
    result: dict[tuple[int, int], Members | None] = {}
    for rank, own in threads.items():
        for i, thread in enumerate(own):
            possible = {choice[i] for choice in choices[rank]}
            result[rank, thread] = possible.pop() if len(possible) == 1 else None
    return result


def _choices(threads: Sequence[int], groups: Sequence[Members]) -> Iterator[Choice]:
    """Every way to divide a rank's threads among its groups, each once."""
    runs = [[thread] for thread in threads[:1]]
    for before, thread in pairwise(threads):
        if thread == before + 1:
            runs[-1].append(thread)
        else:
            runs.append([thread])

    def place(i: int, group: int, used: int) -> Iterator[Choice]:
        if i == len(runs):
            yield ()
            return
        for g in range(group, len(groups)):
            held = len(runs[i]) + (used if g == group else 0)
            if held <= THREADS:
                for rest in place(i + 1, g, held):
                    yield (groups[g],) * len(runs[i]) + rest

    # Groups of the same ranks need not be told apart.
    yield from dict.fromkeys(islice(place(0, 0, 0), 10 * MOST_CHOICES))


class _Agreement:
    """Whether the choices of two ranks can both be true."""

    def __init__(
        self,
        threads: Mapping[int, Sequence[int]],
        calls: Mapping[int, Sequence[Call]],
        slack_ns: int | None,
    ) -> None:
        self._threads, self._calls, self._slack = threads, calls, slack_ns
        self._known: dict[Any, bool] = {}

    def __call__(self, a: int, of_a: Choice, b: int, of_b: Choice) -> bool:
        shared = {members for members in (*of_a, *of_b) if a in members and b in members}
        return all(self._same(a, of_a, b, of_b, members) for members in shared)

    def _same(self, a: int, of_a: Choice, b: int, of_b: Choice, members: Members) -> bool:
        mine, theirs = (
            frozenset(t for t, m in zip(self._threads[rank], choice, strict=True) if m == members)
            for rank, choice in ((a, of_a), (b, of_b))
        )
        key = a, mine, b, theirs
        if key not in self._known:
            self._known[key] = self._match(self._series(a, mine), self._series(b, theirs))
        return self._known[key]

    def _series(self, rank: int, threads: frozenset[int]) -> dict[Any, list[Call]]:
        found: dict[Any, list[Call]] = defaultdict(list)
        for call in self._calls[rank]:
            if call.thread in threads and call.step is not None:
                found[call.step, call.what].append(call)
        return found

    def _match(self, mine: Mapping[Any, list[Call]], theirs: Mapping[Any, list[Call]]) -> bool:
        if {k: len(calls) for k, calls in mine.items()} != {k: len(c) for k, c in theirs.items()}:
            return False
        return self._slack is None or all(
            max(p.start_ns, q.start_ns) <= min(p.end_ns, q.end_ns) + self._slack
            for key, calls in mine.items()
            for p, q in zip(calls, theirs[key], strict=True)
            if p.ends_together
        )
