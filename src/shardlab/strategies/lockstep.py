"""Checks before each collective that all ranks make the same ones in the same order.

PyTorch's fully_shard makes a collective where a block runs, and the ring of context parallelism
where attention does. Ranks pair their collectives by order alone: if one rank leaves a block out,
the next collectives pair the wrong tensors, abort or hang.

The guard of a run (``guard.sequence``) does not replace this: it compares calls beforehand in the
first steps alone, and a user's own loop has no guard. What the data decides may show in any step.
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from shardlab import comm
from shardlab.errors import UsageError

# How long a rank that left the course of its last step waits for the others, or as long as that
# step took. They were together at the last collective: the wait is for the work since then.
PATIENCE_S = 5.0
FIRST_S = 300.0  # in the first step, in which every rank says where it is: it may compile
_made: defaultdict[tuple[int, ...], Iterator[int]] = defaultdict(itertools.count)

Call = tuple[str, ...]


class Lockstep:
    """Compares this rank's calls with those of its last step; nothing is sent while they are equal.

    In the first step, and wherever a step differs from the one before, the ranks tell each other
    their next call through the store and continue if it is the same. That is enough: ranks that
    all repeat a course on which they had agreed make the same calls. It costs the first step
    about a millisecond for each collective, and a step that repeats the last one nothing.
    """

    def __init__(self, group: comm.Group, needs: str) -> None:
        self.needs = needs
        self.rank, self.ranks = group.rank(), group.size()
        members = tuple(dist.get_process_group_ranks(group))
        name = f"shardlab/lockstep/{members}/{next(_made[members])}"
        self.store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
        self.agreed: dict[str, list[Call]] = {}  # the last course, of each kind
        self.expected: list[Call] = []
        self.course: list[Call] | None = None  # none: outside a step
        self.number = 0  # of the course
        self.longest_s = 0.0  # that a course took

    @contextmanager
    def on_course(self, kind: str) -> Iterator[None]:
        """A step, or an evaluation: each is compared with the last of its kind."""
        self.expected, self.course = self.agreed.get(kind, []), []
        self.number += 1
        began = time.monotonic()
        try:
            yield
            self.before("end", kind)
            self.agreed[kind] = self.course
            self.longest_s = max(self.longest_s, time.monotonic() - began)
        finally:
            self.course = None

    def before(self, *call: str) -> None:
        """Refuse if another rank's next call is another one."""
        if self.course is None:
            return
        place = len(self.course)
        self.course.append(call)
        if self.expected[place : place + 1] != [call]:
            self._agree(place, call)

    def _agree(self, place: int, call: Call) -> None:
        keys = [f"{self.number}/{place}/{rank}" for rank in range(self.ranks)]
        said = " ".join(call)
        self.store.set(keys[self.rank], said)
        # Without a course to follow every rank says where it is, and comes here or to an error.
        patience_s = max(PATIENCE_S, self.longest_s) if self.expected else FIRST_S
        limit = time.monotonic() + patience_s
        while not self.store.check(keys):  # its own wait() would print a warning
            if time.monotonic() > limit:  # the others wait for us on the last step's course
                raise self._refusal(said, "did not")
            time.sleep(0.0005)
        for rank, key in enumerate(keys):
            if (other := self.store.get(key).decode()) != said:
                raise self._refusal(said, f"came to '{other}' (rank {rank})")

    def _refusal(self, here: str, there: str) -> UsageError:
        return UsageError(
            f"{self.needs} in the same order in every step, and rank {self.rank} came to '{here}' "
            f"where the others {there}; use zero1 or zero2"
        )
