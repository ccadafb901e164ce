"""What pipeline schedules cost: whether they end, a step's time, what is kept and sent. No torch.

In the formulas P is the number of ranks, M that of micro-batches and v that of stages on a rank
(``chunks``). F, I and W are the times that one stage needs for the forward, the input gradient and
the weight gradient of one micro-batch, B = I + W is a whole backward, and c is the time of a send.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardlab.strategies.pipeline.schedules import (
    Action,
    Lists,
    chunks_of,
    rounds_of,
    source,
    target,
)


def messages(lists: Lists) -> list[int]:
    """How many tensors each rank sends to others in a step."""
    where = _places(lists)
    sent = [0] * len(lists)
    for rank, actions in enumerate(lists):
        for action in actions:
            to = target(action, len(where))
            sent[rank] += to is not None and where[to] != rank
    return sent


def _places(lists: Lists) -> dict[int, int]:
    """The rank of each stage."""
    return {action.stage: rank for rank, actions in enumerate(lists) for action in actions}


# ------------------------------------------------------------------ the law


def check(lists: Lists) -> list[str]:
    """What is wrong with a schedule; nothing, if it is right.

    Every stage is on one rank and does each micro-batch's forward once, and its backward once,
    whole or in two parts. No rank waits without end, where sends are buffered and an action waits
    for what it needs. Between two ranks, activations arrive in the order in which they are used,
    and so do gradients: a channel for each of the two needs no labels.
    """
    if problems := _wrong_counts(lists):
        return problems
    played = _played(lists, [Times()] * len(_places(lists)))
    return _unfinished(lists, played) or _wrong_channels(lists)


def _wrong_counts(lists: Lists) -> list[str]:
    ranks: dict[int, set[int]] = {}
    kinds: dict[tuple[int, int], list[str]] = {}
    for rank, actions in enumerate(lists):
        for kind, stage, micro in actions:
            ranks.setdefault(stage, set()).add(rank)
            kinds.setdefault((stage, micro), []).append(kind)
    stages, micros = {stage for stage, _ in kinds}, {micro for _, micro in kinds}
    if not kinds or stages != set(range(len(stages))) or micros != set(range(len(micros))):
        return ["stages and micro-batches are not numbered from 0 without a gap"]
    problems = [
        f"stage {stage} is on ranks {', '.join(map(str, sorted(on)))}"
        for stage, on in ranks.items()
        if len(on) > 1
    ]
    for stage in sorted(stages):
        for micro in sorted(micros):
            found = sorted(kinds.get((stage, micro), []))
            if found not in (["B", "F"], ["F", "I", "W"]):
                problems.append(
                    f"stage {stage}, micro-batch {micro}: {' '.join(found) or 'nothing'} instead "
                    "of F and B, or F, I and W"
                )
    return problems


def _wrong_channels(lists: Lists) -> list[str]:
    where = _places(lists)
    sent: dict[tuple[bool, int, int], list[tuple[int, int]]] = {}
    taken: dict[tuple[bool, int, int], list[tuple[int, int]]] = {}
    for rank, actions in enumerate(lists):
        for action in actions:
            is_forward = action.kind == "F"
            to, of = target(action, len(where)), source(action, len(where))
            if to is not None and where[to] != rank:
                sent.setdefault((is_forward, rank, where[to]), []).append((to, action.micro))
            if of is not None and where[of] != rank:
                channel = (is_forward, where[of], rank)
                taken.setdefault(channel, []).append((action.stage, action.micro))
    return [
        f"rank {b} takes rank {a}'s {'activations' if is_forward else 'gradients'} in another "
        "order than they are sent"
        for (is_forward, a, b), those in sent.items()
        if taken[is_forward, a, b] != those
    ]


# ------------------------------------------------------------------ simulation


@dataclass(frozen=True)
class Times:
    """What one stage needs for one micro-batch, and a message from it; in any unit."""

    forward: float = 1.0
    input: float = 1.0
    weight: float = 1.0
    send: float = 0.0

    @property
    def backward(self) -> float:
        return self.input + self.weight

    def of(self, kind: str) -> float:
        return {"F": self.forward, "B": self.backward, "I": self.input, "W": self.weight}[kind]


class Span(NamedTuple):
    start: float
    end: float


def timeline(lists: Lists, times: Times | Sequence[Times]) -> list[list[Span]]:
    """When each action starts and ends. ``times``: of every stage, or of each one by itself.

    An action starts when the one before it on its rank has ended and what it needs has arrived,
    ``send`` after it was made. Sending does not keep a rank from working.
    """
    stages = len(_places(lists))
    played = _played(lists, [times] * stages if isinstance(times, Times) else times)
    if problems := _unfinished(lists, played):
        raise ValueError(problems[0])
    return played


def _played(lists: Lists, times: Sequence[Times]) -> list[list[Span]]:
    """The spans of all actions, as far as the ranks come."""
    where = _places(lists)
    ended: dict[Action, float] = {}  # an input gradient stands here as a backward
    played: list[list[Span]] = [[] for _ in lists]
    moves = True
    while moves:
        moves = False
        for rank, actions in enumerate(lists):
            spans = played[rank]
            while len(spans) < len(actions):
                action = actions[len(spans)]
                needed = _needed(action, len(where))
                start = spans[-1].end if spans else 0.0
                if needed is not None:
                    if needed not in ended:
                        break
                    is_sent = where[needed.stage] != rank
                    start = max(start, ended[needed] + is_sent * times[needed.stage].send)
                spans.append(Span(start, start + times[action.stage].of(action.kind)))
                ended[_made(action)] = spans[-1].end
                moves = True
    return played


def _unfinished(lists: Lists, played: Sequence[Sequence[Span]]) -> list[str]:
    return [
        f"rank {rank} waits for ever before {kind} of stage {stage}, micro-batch {micro}"
        for rank, (actions, spans) in enumerate(zip(lists, played, strict=True))
        for kind, stage, micro in actions[len(spans) : len(spans) + 1]
    ]


def _needed(action: Action, stages: int) -> Action | None:
    kind, stage, micro = action
    if (of := source(action, stages)) is not None:
        return Action("F" if kind == "F" else "B", of, micro)
    if kind == "W":
        return Action("B", stage, micro)
    return None if kind == "F" else Action("F", stage, micro)  # the loss is the last stage's


def _made(action: Action) -> Action:
    return action._replace(kind="B") if action.kind == "I" else action


def bubble(lists: Lists, times: Times | Sequence[Times]) -> float:
    """The ranks' idle time in a step, divided by the time that they work. 0.25 makes a step a
    quarter longer than the work of an average rank."""
    played = timeline(lists, times)
    worked = sum(span.end - span.start for spans in played for span in spans)
    return (len(lists) * end(played) - worked) / worked


def end(played: Sequence[Sequence[Span]]) -> float:
    """When the last rank is done."""
    return max(spans[-1].end for spans in played)


def live(lists: Lists) -> list[int]:
    """The most activations of a stage that each rank keeps at a time. One is kept from its forward
    until its backward, or its weight gradient, has run."""
    peaks = []
    for actions in lists:
        now = peak = 0
        for action in actions:
            now += {"F": 1, "I": 0}.get(action.kind, -1)
            peak = max(peak, now)
        peaks.append(peak)
    return peaks


# ------------------------------------------------------------------ closed forms


class Case(NamedTuple):
    ranks: int
    micro: int
    chunks: int
    times: Times  # of every stage: they are equal


class Formula(NamedTuple):
    """What is known of a schedule without a simulation."""

    text: str  # a rank's idle time in a step …
    idle: Callable[[Case], float]  # … and its value
    needs_free_sends: bool  # whether it is known only for sends that take no time
    live: Callable[[Case, int], int]  # the activations that a rank keeps

    @property
    def known_for(self) -> str:
        return "c = 0" if self.needs_free_sends else "all times"


def _idle_1f1b(c: Case) -> float:
    """In the steady state a rank with k others behind it has k + 1 micro-batches on their way there
    and back, so k + 1 of them pay for 2k sends; the first rank has the most."""
    paid = c.ranks - 1 + (c.micro - 1) * (c.ranks - 1) // c.ranks
    return (c.ranks - 1) * (c.times.forward + c.times.backward) + 2 * c.times.send * paid


def _idle_interleaved(c: Case) -> float:
    filling = c.ranks - 1 + (c.chunks - 1) * max(0, c.ranks - c.micro)
    return filling * (c.times.forward + c.times.backward)


def _live_interleaved(c: Case, rank: int) -> int:
    ahead = (c.chunks - 1) * rounds_of(c.ranks, c.micro)[0] + 1
    return min(c.chunks * c.micro, 2 * (c.ranks - 1 - rank) + ahead)


def _idle_zero_bubble(c: Case) -> float:
    t, filled = c.times, min(c.ranks, c.micro) - 1
    return (c.ranks - 1) * (t.forward + t.input) - filled * min(t.forward, t.input, t.weight)


FORMULAS = {
    "gpipe": Formula(
        "(P−1)·(F+B+2c)",
        lambda c: (c.ranks - 1) * (c.times.forward + c.times.backward + 2 * c.times.send),
        needs_free_sends=False,
        live=lambda c, _rank: c.micro,
    ),
    "1f1b": Formula(
        "(P−1)·(F+B) + 2c·(P−1 + ⌊(M−1)(P−1)/P⌋)",
        _idle_1f1b,
        needs_free_sends=False,
        live=lambda c, rank: min(c.micro, c.ranks - rank),
    ),
    "interleaved": Formula(
        "(P−1 + (v−1)·max(0, P−M))·(F+B)",
        _idle_interleaved,
        needs_free_sends=True,
        live=_live_interleaved,
    ),
    "zero_bubble": Formula(
        "(P−1)·(F+I) − (min(P,M)−1)·min(F,I,W)",
        _idle_zero_bubble,
        needs_free_sends=True,
        live=lambda c, _rank: min(c.ranks, c.micro),
    ),
}


class Claim(NamedTuple):
    """What a schedule promises; each rank's numbers in the order of ranks. ``bubble`` is None where
    no formula is known."""

    bubble: float | None
    live: list[int]
    messages: list[int]


def claim(name: str, ranks: int, micro: int, times: Times, chunks: int | None = None) -> Claim:
    """What a schedule promises. ``times``: of every stage, which are equal."""
    formula, case = FORMULAS[name], Case(ranks, micro, chunks_of(name, chunks), times)
    work = micro * case.chunks * (times.forward + times.backward)
    is_known = not (formula.needs_free_sends and times.send)
    # A rank sends an activation and a gradient for each of its stages. The first rank and the last
    # have an end of the pipeline.
    sent = [
        micro * (2 * case.chunks - (rank == 0) - (rank == ranks - 1)) if ranks > 1 else 0
        for rank in range(ranks)
    ]
    return Claim(
        formula.idle(case) / work if is_known else None,
        [formula.live(case, rank) for rank in range(ranks)],
        sent,
    )
