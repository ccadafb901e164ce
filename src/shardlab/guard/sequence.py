"""Whether all ranks are at the same collective, checked before it is launched or every few steps.

Ranks pair collectives by order alone. A rank that skips one is paired with the wrong one from then
on: over Gloo, where the sizes agree, without any error. So in the first steps each collective is
compared with the other ranks' *before* it is launched, and no wrong result is ever computed. That
costs a fraction of a millisecond each; later, only a fingerprint of everything called so far is
compared, every few steps. Ranks are compared with those that they share a group with: in a mesh of
several axes, stages of a pipeline call different collectives in groups of their own. What a message
is for its sender is compared with what it is for its receiver, when it is there and before it is
used; the sender does not wait.
"""

from __future__ import annotations

import json
import uuid
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from typing import Any

from shardlab import comm
from shardlab.errors import Halt
from shardlab.guard import verdict
from shardlab.guard.side_store import await_all, side_store
from shardlab.guard.verdict import Difference
from shardlab.ledger import LEDGER, REMEMBERED, members
from shardlab.pulse import Call
from shardlab.world import World

STATE = "out of step"


class Sequence:
    """Compares this rank's collectives with the other ranks'. Every rank makes one, together."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.ledger = LEDGER
        # Keys of an earlier run in the same world must not be taken for ours.
        self.store = side_store(f"sequence/{world.share(uuid.uuid4().hex)}")
        self.asked: dict[str, int] = defaultdict(int)

    def exchange(self, what: str, value: Any, ranks: list[int] | None = None) -> dict[int, Any]:
        """Every rank's value, by rank. Waits until the last rank has given its own."""
        ranks = list(range(self.world.size)) if ranks is None else ranks
        self.asked[what] += 1
        key = f"{what}/{self.asked[what]}"
        self.store.set(f"{key}/{self.world.rank}", json.dumps(value))
        answers = await_all(self.store, [f"{key}/{rank}" for rank in ranks])
        return {rank: json.loads(answer) for rank, answer in zip(ranks, answers, strict=True)}

    def check(self, call: Call, group: comm.Group) -> None:
        """Before a collective is launched: is it the same one on every rank of its group?"""
        ranks = members(group)
        if len(ranks) == 1:
            return
        if call.is_message:
            self._check_message(call)
            return
        found = self.exchange(f"group {ranks}", call, ranks)
        # Under this rank's numbers: a rank that is not in another group counts fewer calls, and
        # one that was not compared from the beginning on has another turn.
        at = call.seq, call.turn
        calls = {r: [Call(*c)._replace(seq=at[0], turn=at[1])] for r, c in found.items()}
        difference = verdict.first_difference(calls)
        if difference is not None:
            raise halt(self._known_before(difference), "no result was computed from it")

    def _check_message(self, call: Call) -> None:
        """The sender leaves word of a message; the receiver, who has it, looks that up."""
        sender, _ = call.members
        key = f"message {call.channel}/{call.turn}"
        if self.world.rank == sender:
            self.store.set(key, json.dumps(call))
            return
        sent = Call(*json.loads(await_all(self.store, [key])[0]))
        self.store.delete_key(key)
        if sent.kind != call.kind:
            raise halt(Difference(sender, call, sent, skipped=False), "it was not used")

    def _known_before(self, difference: Difference) -> Difference:
        """What came next the last time shows whether the rank skipped a call."""
        channel = difference.theirs.channel
        history = [call for call in self.ledger.recent if call.channel == channel][:-1]
        for call, after in reversed(list(pairwise(history))):
            if call.what == difference.theirs.what:
                return replace(difference, skipped=after.what == difference.its.what)
        return difference

    def compare(self) -> None:
        """Compare everything called so far, by the fingerprints of the groups."""
        ledger = self.ledger
        prints = self.exchange("fingerprint", ledger.channels)
        if all(
            prints[rank].get(channel) == print
            for found in prints.values()
            for channel, print in found.items()
            for rank in Call(0, None, "", "", channel).members
        ):
            return
        found = self.exchange("recent", list(ledger.recent))
        recent = {rank: [Call(*c) for c in calls] for rank, calls in found.items()}
        difference = verdict.first_difference(recent)
        if difference is None:
            counts = {
                rank: sum(calls for calls, _ in found.values()) for rank, found in prints.items()
            }
            text = ", ".join(f"rank {rank}: {calls}" for rank, calls in counts.items())
            raise Halt(
                STATE,
                f"the ranks are out of step: they called different collectives ({text}), "
                f"further back than the last {REMEMBERED}; use guard.check_every 1",
                details={"collectives": counts},
            )
        raise halt(difference, "results since then are wrong")


def halt(difference: Difference, consequence: str) -> Halt:
    return Halt(
        STATE,
        f"{difference.sentence} ({consequence})",
        rank=difference.rank,
        details={
            "rank": difference.rank,
            "its": difference.its._asdict(),
            "theirs": difference.theirs._asdict(),
            "skipped": difference.skipped,
        },
    )
