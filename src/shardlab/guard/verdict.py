"""Who hangs, and on what: from where each rank was last seen to a sentence. Pure, no torch.

A collective ends when every rank of its group has entered it. So of ranks that stand still, those
that wait in a collective are victims, and the rank that has not entered it is the cause, unless it
waits in another one itself; unless ranks are in different collectives under the same number, in
which case they are out of step. A message is a collective of two ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardlab.errors import Halt
from shardlab.guard import stacks
from shardlab.guard.nodes import Nodes, names
from shardlab.pulse import DATA, LEFT, Call

BUSY = 0.5  # of a core: a rank that computes, and does not wait


@dataclass(frozen=True)
class Seen:
    """One rank, as it was last seen: what it reports about itself every tick."""

    rank: int
    phase: str
    step: int | None = None
    steps_done: int = 0
    beats: int = 0
    calls: int = 0  # collectives entered
    turns: dict[str, int] = field(default_factory=dict)  # by channel (pulse.Call)
    waits_for: Call | None = None
    cpu: float = 0.0  # cores that it used lately
    tick: int = 0  # number of the report
    tick_s: float = 1.0  # between reports
    pid: int = 0
    host: str = ""
    fd: int | None = None  # the file that has its stacks when it is asked for them by a signal
    # Only a rank that stands still reports these: the last collectives that it entered, its stacks
    # (the main thread first), and PyTorch's own record of its process group.
    recent: tuple[Call, ...] = ()
    threads: dict[str, stacks.Stack] = field(default_factory=dict)
    own: dict[str, int] | None = None
    # What the observer adds about a rank that does not report.
    answers: bool = True
    state: str | None = None  # what the system says about it

    @property
    def stack(self) -> stacks.Stack:
        """The stack of the thread that matters: the loading one while data is loaded ahead."""
        loaders = [s for name, s in self.threads.items() if name.startswith("shardlab-data")]
        if self.phase == DATA and loaders and any(not f.is_library for f in loaders[0][:-1]):
            return loaders[0]
        return next(iter(self.threads.values()), [])

    @property
    def place(self) -> str | None:
        return stacks.place_of(self.stack)

    @property
    def doing(self) -> str:
        """``it is in data loading, at data.py:12``."""
        if self.phase == LEFT:
            count = f"{self.steps_done} step{'' if self.steps_done == 1 else 's'}"
            return f"it has left the loop after {count}"
        where = f", at {self.place}" if self.place else ""
        return f"it is in {self.phase}{where}"

    def is_missing(self, call: Call) -> bool:
        """Whether the rank should have entered a call, and has not."""
        if not call.channel:
            return self.calls <= call.seq
        return self.rank in call.members and self.turns.get(call.channel, 0) <= call.turn

    @property
    def entered(self) -> int | None:
        """PyTorch's own count of the collectives that the rank has entered."""
        return None if self.own is None else self.own["entered"]


def judge(ranks: Sequence[Seen], stood_s: float, nodes: Nodes | None = None) -> Halt:
    """The verdict when no rank has moved for ``stood_s`` seconds."""
    nodes = nodes or Nodes()
    silent = [r for r in ranks if not r.answers]
    lone = first_difference({r.rank: r.recent for r in ranks})
    if silent:
        causes, sentence = silent, _about_silent(silent, nodes) + _waiters(ranks, silent)
    elif lone is not None:
        causes, sentence = [r for r in ranks if r.rank == lone.rank], lone.sentence
    else:
        causes, sentence = _about_missing(ranks)
    rank = causes[0].rank if causes else ranks[0].rank
    sentence = nodes.located(sentence)
    return Halt(
        "hung",
        f"hung for {stood_s:.0f} s: {sentence}",
        rank=rank,
        report=_report(ranks),
        details={
            "stood_s": round(stood_s, 1),
            "verdict": sentence,
            "causes": [r.rank for r in causes],
            **({"nodes": nodes.whole([r.rank for r in causes])} if nodes.are_several else {}),
            "ranks": [_as_row(r) for r in ranks],
        },
    )


def _about_silent(silent: Sequence[Seen], nodes: Nodes) -> str:
    parts = []
    whole = nodes.whole([r.rank for r in silent])
    for node in whole:
        phases = dict.fromkeys(r.phase for r in silent if nodes.node_of[r.rank] == node)
        parts.append(
            f"{nodes.named(node)} does not answer: the machine, or the link to it, may be down; it "
            f"was last seen in {', '.join(phases)}"
        )
    for r in silent:
        if whole and nodes.node_of[r.rank] in whole:
            continue
        where = f"; {r.doing}" if r.threads else f"; it was last seen in {r.phase}"
        why = r.state or ("Python cannot run there" if r.threads else None)
        rank = nodes.located(f"rank {r.rank}")
        parts.append(f"{rank} does not answer{f': {why}' if why else ''}{where}")
    return "; ".join(parts)


def _about_missing(ranks: Sequence[Seen]) -> tuple[list[Seen], str]:
    """The causes, and a sentence about them, where every rank answers."""
    waiting = [r.waits_for for r in ranks if r.waits_for is not None]
    what, ending = "is stuck", ""
    if waiting:
        waiting.sort(key=lambda call: call.place)
        # A rank that is missed and waits elsewhere is a victim too: somebody is missed there.
        missed = ((c, [r for r in ranks if r.is_missing(c) and not r.waits_for]) for c in waiting)
        first, causes = next((pair for pair in missed if pair[1]), (waiting[0], []))
        if causes:
            what = _left_undone(first)
        elif any(r.is_missing(call) for call in waiting for r in ranks):
            return [], _in_a_circle(ranks)
        else:  # a rank that has launched the collective is stuck before it waits for it
            causes = [r for r in ranks if r.waits_for is None]
        if not causes:
            return [], (
                f"every rank has entered {first.full} and waits, and it does not end: the network "
                "between them, or a rank that is out of step with PyTorch's own collectives"
            )
        ending = _waiters(ranks, causes)
    else:
        causes = _behind(ranks)
        counts = [r.entered for r in ranks if r.entered is not None]
        others = [r for r in ranks if r not in causes]
        if len(counts) == len(ranks) and len(set(counts)) > 1:
            what = (
                f"never entered the {nth(min(counts) + 1)} of PyTorch's own collectives "
                f"(of {max(counts)})"
            )
            ending = _waiters(ranks, causes)
        elif others:
            rest = "; ".join(f"rank {r.rank}: {r.doing.removeprefix('it ')}" for r in others)
            ending = f"; {rest}; no collective of the ledger is under way"
    return causes, "; ".join(f"rank {r.rank} {what}: {r.doing}" for r in causes) + ending


def _left_undone(call: Call) -> str:
    if not call.is_message:
        return f"never entered {call.full}"
    sender, receiver = call.members
    if call.name.startswith("recv"):
        return f"never sent what rank {receiver} waits for in {call.full}"
    return f"never received what rank {sender} waits to send in {call.full}"


def _in_a_circle(ranks: Sequence[Seen]) -> str:
    """Every rank waits, for calls that others, which wait too, have not entered."""
    parts = []
    for r in ranks:
        missed = [] if r.waits_for is None else [o.rank for o in ranks if o.is_missing(r.waits_for)]
        if r.waits_for is not None and missed:
            parts.append(f"rank {r.rank} waits for {names(missed)} in {r.waits_for.full}")
    return f"the ranks wait for each other: {'; '.join(parts)}"


def nth(number: int) -> str:
    """``4th``."""
    last = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10)
    return f"{number}{last or 'th'}"


def _behind(ranks: Sequence[Seen]) -> list[Seen]:
    """The likely causes where no collective of ours shows them: the ranks that have done least, or
    compute while others wait, or are in their own code while others are in PyTorch's."""
    for signs in zip(*map(_signs, ranks), strict=True):
        if len(set(signs)) > 1:
            return [r for r, value in zip(ranks, signs, strict=True) if value == max(signs)]
    return list(ranks)


def _signs(r: Seen) -> tuple[float, ...]:
    """What makes a rank a likely cause, the best sign first."""
    return (
        -(r.entered or 0),
        -r.steps_done,
        r.phase == DATA,
        -r.beats,
        r.cpu > BUSY,
        bool(r.stack) and not r.stack[0].is_library,
    )


def _waiters(ranks: Sequence[Seen], causes: Sequence[Seen]) -> str:
    numbers = [r.rank for r in ranks if r not in causes]
    if not numbers:
        return ""
    it = "it" if len(causes) == 1 else "them"
    return f"; {names(numbers)} {'waits' if len(numbers) == 1 else 'wait'} for {it}"


# ------------------------------------------------------------------ out of step


@dataclass(frozen=True)
class Difference:
    """The first collective in which a rank did something else than the others."""

    rank: int
    theirs: Call  # what most ranks entered under that number
    its: Call
    skipped: bool  # the rank skipped one call

    @property
    def sentence(self) -> str:
        t = self.theirs
        label = f" '{t.label}'" if t.label else ""
        step = "" if t.step is None else f", step {t.step}"
        its = f"its #{self.its.seq} is {self.its.what} at {self.its.site}"
        if self.skipped:
            return f"rank {self.rank} skipped {t.name}{label} at {t.site}{step}: {its}"
        return (
            f"rank {self.rank} is out of step at #{t.seq}{step}: {its}, "
            f"and the others' is {t.what} at {t.site}"
        )


def odd_ones(values: Mapping[int, Hashable]) -> tuple[list[int], list[int]]:
    """The ranks whose value is not the most common one, and the others. In a tie the value that
    comes first, which is that of the lowest rank, counts as right."""
    right = Counter(values.values()).most_common(1)[0][0]
    odd = [rank for rank, value in values.items() if value != right]
    return odd, [rank for rank in values if rank not in odd]


def first_difference(recent: Mapping[int, Iterable[Call]]) -> Difference | None:
    """The first number under which ranks that still remember it entered different collectives.
    Each channel has numbers of its own."""
    by_rank = {
        rank: {(call.channel, call.place): call for call in calls} for rank, calls in recent.items()
    }
    first: dict[tuple[str, int], int] = {}  # the lowest number that any rank gives to a call
    for calls in by_rank.values():
        for at, call in calls.items():
            first[at] = min(call.seq, first.get(at, call.seq))
    for at in sorted(first, key=lambda at: (first[at], at)):
        found = {r: c[at].kind for r, c in by_rank.items() if at in c}
        odd, others = odd_ones(found)
        if not odd:
            continue
        rank, right = odd[0], others[0]
        its, theirs = by_rank[rank][at], by_rank[right][at]
        # What came next shows which of the two skipped a call, if either did.
        after = at[0], at[1] + 1
        its_next, their_next = by_rank[rank].get(after), by_rank[right].get(after)
        is_skip = their_next is not None and their_next.kind == its.kind
        is_other = its_next is not None and its_next.kind == theirs.kind and len(found) == 2
        if is_other and not is_skip:
            return Difference(right, its, theirs, skipped=True)
        return Difference(rank, theirs, its, is_skip)
    return None


# ------------------------------------------------------------------ for people and for programs


def _report(ranks: Sequence[Seen]) -> str:
    parts = []
    for r in ranks:
        waits = f"; waits in {r.waits_for.full}" if r.waits_for else ""
        parts.append(f"rank {r.rank}: {r.doing.removeprefix('it ')}{waits}")
        if r.own:
            parts.append(f"  PyTorch's own record: {r.own}")
        for name, stack in r.threads.items():
            if any(not f.is_library and not f.is_launcher for f in stack):  # others only wait
                parts.append(f"  {name}:\n{stacks.text_of(stack)}")
        if not r.threads:
            parts.append(f"  (no stack: it does not answer{f', {r.state}' if r.state else ''})")
    return "\n".join(parts) + "\n"


def _as_row(r: Seen) -> dict[str, Any]:
    return {
        "rank": r.rank,
        "phase": r.phase,
        "step": r.step,
        "steps_done": r.steps_done,
        "collectives": r.calls,
        "waits_for": None if r.waits_for is None else r.waits_for._asdict(),
        "answers": r.answers,
        "state": r.state,
        "place": r.place,
        "cpu": round(r.cpu, 2),
        "own": r.own,
        "stacks": {
            name: [f"{f.file}:{f.line} in {f.function}" for f in stack]
            for name, stack in r.threads.items()
        },
    }
