"""Who hangs, and on what: from where each rank was last seen to a sentence. Pure, no torch.

A collective ends when every rank has entered it. So of ranks that stand still, those that wait in
a collective are victims, and who has not entered it is the cause; unless ranks are in different
collectives under the same number, in which case they are out of step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardlab.errors import Halt
from shardlab.guard import stacks
from shardlab.pulse import DATA, LEFT, Call

BUSY = 0.5  # of a core: a rank that computes, and does not wait


@dataclass(frozen=True)
class Seen:
    """One rank, as it was last seen."""

    rank: int
    phase: str
    step: int | None = None
    steps_done: int = 0
    beats: int = 0
    calls: int = 0  # collectives entered
    waits_for: Call | None = None
    recent: tuple[Call, ...] = ()  # the last ones that it entered
    threads: Mapping[str, stacks.Stack] = field(default_factory=dict)  # the main one first
    answers: bool = True
    state: str | None = None  # what the system says of one that does not answer
    cpu: float = 0.0  # cores that it used lately
    own: Mapping[str, Any] | None = None  # PyTorch's own record of its process group

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


def judge(ranks: Sequence[Seen], stood_s: float) -> Halt:
    """The verdict on ranks none of which has moved for so long."""
    silent = [r for r in ranks if not r.answers]
    lone = first_difference({r.rank: r.recent for r in ranks})
    if silent:
        causes, sentence = silent, _of_silent(ranks, silent)
    elif lone is not None:
        causes = [r for r in ranks if r.rank == lone.rank]
        sentence = lone.sentence
    else:
        causes, sentence = _of_missing(ranks)
    rank = causes[0].rank if causes else ranks[0].rank
    return Halt(
        "hung",
        f"hung for {stood_s:.0f} s: {sentence}",
        rank=rank,
        report=_report(ranks),
        details={
            "stood_s": round(stood_s, 1),
            "verdict": sentence,
            "causes": [r.rank for r in causes],
            "ranks": [_as_row(r) for r in ranks],
        },
    )


def _of_silent(ranks: Sequence[Seen], silent: Sequence[Seen]) -> str:
    parts = []
    for r in silent:
        where = f"; {r.doing}" if r.threads else f"; it was last seen in {r.phase}"
        why = r.state or ("Python cannot run there" if r.threads else None)
        parts.append(f"rank {r.rank} does not answer{f': {why}' if why else ''}{where}")
    return "; ".join(parts) + _waiters(ranks, silent)


def _of_missing(ranks: Sequence[Seen]) -> tuple[list[Seen], str]:
    waiting = [r for r in ranks if r.waits_for is not None]
    if waiting:
        first = min((r.waits_for for r in waiting if r.waits_for), key=lambda call: call.seq)
        missing = [r for r in ranks if r.calls <= first.seq]
        if missing:
            who = "; ".join(f"rank {r.rank} never entered {first.full}: {r.doing}" for r in missing)
            return missing, who + _waiters(ranks, missing)
        outside = [r for r in ranks if r.waits_for is None]
        if outside:  # it has launched the collective, and is stuck where it does not wait for it
            who = "; ".join(f"rank {r.rank} is stuck: {r.doing}" for r in outside)
            return outside, who + _waiters(ranks, outside)
        return [], (
            f"every rank has entered {first.full} and waits, and it does not end: the network "
            "between them, or a rank that is out of step with PyTorch's own collectives"
        )
    behind = _behind(ranks)
    others = [r for r in ranks if r not in behind]
    counts = [_entered(r) for r in ranks]
    if None not in counts and len(set(counts)) > 1:
        most = max(n for n in counts if n is not None)
        who = "; ".join(
            f"rank {r.rank} never entered the {nth(_entered(r) or 0)} of PyTorch's own collectives "
            f"(of {most}): {r.doing}"
            for r in behind
        )
        return behind, who + _waiters(ranks, behind)
    who = "; ".join(f"rank {r.rank} is stuck: {r.doing}" for r in behind)
    if not others:
        return behind, who
    rest = "; ".join(f"rank {r.rank}: {r.doing.removeprefix('it ')}" for r in others)
    return behind, f"{who}; {rest}; no collective of the ledger is under way"


def _entered(r: Seen) -> int | None:
    """PyTorch's own count of the collectives that a rank has entered."""
    return None if r.own is None else int(r.own["entered"])


def nth(count: int) -> str:
    """After so many, the next: ``4th``."""
    number = count + 1
    last = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10)
    return f"{number}{last or 'th'}"


def _behind(ranks: Sequence[Seen]) -> list[Seen]:
    """Without a collective of ours to tell: who has done least, or computes while others wait, or
    is in code of its own while others are in PyTorch's."""
    for sign in (
        lambda r: -(_entered(r) or 0),
        lambda r: -r.steps_done,
        lambda r: r.phase == DATA,
        lambda r: -r.beats,
        lambda r: r.cpu > BUSY,
        lambda r: bool(r.stack) and not r.stack[0].is_library,
    ):
        signs = [sign(r) for r in ranks]
        if len(set(signs)) > 1:
            return [r for r, value in zip(ranks, signs, strict=True) if value == max(signs)]
    return list(ranks)


def _waiters(ranks: Sequence[Seen], causes: Sequence[Seen]) -> str:
    numbers = [r.rank for r in ranks if r not in causes]
    if not numbers:
        return ""
    it = "it" if len(causes) == 1 else "them"
    return f"; {names(numbers)} {'waits' if len(numbers) == 1 else 'wait'} for {it}"


def names(ranks: Sequence[int]) -> str:
    """``rank 0``; ``ranks 0, 2, 3``."""
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}"


# ------------------------------------------------------------------ out of step


@dataclass(frozen=True)
class Difference:
    """The first collective in which a rank did something else than the others."""

    rank: int
    theirs: Call  # what most ranks entered under that number
    its: Call

    skipped: bool  # its next are the others' next but one: it left one out

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


def same(a: Call, b: Call) -> bool:
    """Whether two ranks' collectives of one number belong together.

    The label tells those of one shape apart; only where there is none, the line does (one
    collective may be called from two lines, by rank).
    """
    return a.what == b.what and (bool(a.label) or a.site == b.site)


def first_difference(recent: Mapping[int, Iterable[Call]]) -> Difference | None:
    """Over the numbers that several ranks still remember."""
    by_rank = {rank: {call.seq: call for call in calls} for rank, calls in recent.items()}
    numbers = sorted({seq for calls in by_rank.values() for seq in calls})
    for seq in numbers:
        here = {rank: calls[seq] for rank, calls in by_rank.items() if seq in calls}
        kinds = Counter(c.what if c.label else f"{c.what} {c.site}" for c in here.values())
        if len(kinds) < 2:
            continue
        # Of two equally many, rank 0's is taken for right.
        kind = max(kinds, key=lambda k: (kinds[k], k == _kind(here[min(here)])))
        theirs = next(c for c in here.values() if _kind(c) == kind)
        rank = next(r for r, c in here.items() if _kind(c) != kind)
        right = next(r for r, c in here.items() if _kind(c) == kind)
        return _lone(rank, right, seq, by_rank, theirs)
    return None


def _kind(call: Call) -> str:
    return call.what if call.label else f"{call.what} {call.site}"


def _lone(
    rank: int, right: int, seq: int, by_rank: Mapping[int, Mapping[int, Call]], theirs: Call
) -> Difference:
    """Which of the two left one out, if either did, is told by what came next."""
    its = by_rank[rank][seq]
    after, its_after = by_rank[right].get(seq + 1), by_rank[rank].get(seq + 1)
    if after is not None and same(after, its):
        return Difference(rank, theirs, its, skipped=True)
    if its_after is not None and same(its_after, theirs) and len(by_rank) == 2:
        return Difference(right, its, theirs, skipped=True)
    return Difference(rank, theirs, its, skipped=False)


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
