"""Pipeline schedules: in which order each rank works on which micro-batch. Pure, no torch.

A schedule is nothing but a list of actions for each rank. The executor runs the lists, the checker
proves that they cannot get stuck, and the simulator says how long they take and what they keep.
What is sent follows from the actions (``source`` and ``target``).

In the formulas P is the number of ranks, M that of micro-batches and v that of stages on a rank
(``chunks``). F, I and W are the times that one stage needs for the forward, the input gradient and
the weight gradient of one micro-batch, B = I + W is a whole backward, and c is the time of a send.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardlab.axes import Axes
from shardlab.errors import UsageError, unknown
from shardlab.text import count


class Action(NamedTuple):
    kind: str  # "F" forward, "B" whole backward, "I" input gradient, "W" weight gradient
    stage: int
    micro: int


NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
Lists = Sequence[Sequence[Action]]  # for each rank its actions, in order
Turn = tuple[str, int]  # kind and stage: on every stage the micro-batches come in their order
Order = Callable[[int, int, int, int], Iterable[Turn]]  # of (rank, ranks, micro, chunks)


# ------------------------------------------------------------------ the schedules


def gpipe(rank: int, ranks: int, micro: int, chunks: int) -> Iterator[Turn]:
    """All forwards, then all backwards. Every activation of the step is kept."""
    del ranks, chunks
    yield from [("F", rank)] * micro
    yield from [("B", rank)] * micro


def one_f_one_b(rank: int, ranks: int, micro: int, chunks: int) -> Iterator[Turn]:
    """One forward, one backward: as soon as a micro-batch has come back, its backward runs.

    Until the first one comes back, a rank runs as many forwards as there are ranks behind it. The
    bubble is GPipe's, but a rank keeps at most P activations, however many micro-batches there are.
    """
    del chunks
    ahead = min(micro, ranks - 1 - rank)
    yield from [("F", rank)] * ahead
    yield from [("F", rank), ("B", rank)] * (micro - ahead)
    yield from [("B", rank)] * ahead


def interleaved(rank: int, ranks: int, micro: int, chunks: int) -> Iterator[Turn]:
    """1F1B with several short stages on each rank, dealt round robin, as in Megatron-LM.

    A micro-batch goes around the ranks ``chunks`` times. The pipeline is filled by stages that are
    ``chunks`` times as short, so the bubble is, too; in return there are more messages and more
    activations. Micro-batches go in rounds of P: a round passes through a rank's first stage, then
    through its second. Where P does not divide M, some rounds are larger, and those come first.
    """
    rounds = _rounds(ranks, micro)
    forward = [chunk for size in rounds for chunk in range(chunks) for _ in range(size)]
    backward = [chunks - 1 - chunk for chunk in forward]
    ahead = min(len(forward), 2 * (ranks - 1 - rank) + (chunks - 1) * rounds[0])
    for i in range(len(forward) + ahead):
        if i < len(forward):
            yield "F", forward[i] * ranks + rank
        if i >= ahead:
            yield "B", backward[i - ahead] * ranks + rank


def _rounds(ranks: int, micro: int) -> list[int]:
    """As many rounds as have at least one micro-batch per rank, the larger ones first."""
    count = max(1, micro // ranks)
    return [micro // count + (i < micro % count) for i in range(count)]


def zero_bubble(rank: int, ranks: int, micro: int, chunks: int) -> Iterator[Turn]:
    """ZB-H1: 1F1B with a split backward. Only the input gradient is waited for by another rank; the
    weight gradient runs where the rank would be idle.

    Rank r puts its weight gradients off by r micro-batches and makes up for them at the end, while
    the last input gradients travel to rank 0. Each rank keeps as much as 1F1B's first rank.
    """
    del chunks
    ahead = min(micro, ranks - 1 - rank)
    yield from [("F", rank)] * ahead
    for i in range(micro):
        if i < micro - ahead:
            yield "F", rank
        yield "I", rank
        if i >= rank:
            yield "W", rank
    yield from [("W", rank)] * min(rank, micro)


class Kind(NamedTuple):
    order: Order
    chunks: range  # how many stages a rank may have; the first is the default
    idle: str  # a rank's idle time in a step, as ``claim`` computes it …
    known_for: str  # … and for which times it is known


SCHEDULES = {
    "gpipe": Kind(gpipe, range(1, 2), "(P−1)·(F+B+2c)", "all times"),
    "1f1b": Kind(one_f_one_b, range(1, 2), "(P−1)·(F+B) + 2c·(P−1 + ⌊(M−1)(P−1)/P⌋)", "all times"),
    "interleaved": Kind(interleaved, range(2, 1 << 30), "(P−1 + (v−1)·max(0, P−M))·(F+B)", "c = 0"),
    "zero_bubble": Kind(zero_bubble, range(1, 2), "(P−1)·(F+I) − (min(P,M)−1)·min(F,I,W)", "c = 0"),
}
ONLY_PYTORCH = {"zbv": range(2, 3)}  # schedules that only PyTorch runs, with the stages of a rank


def schedule(name: str, ranks: int, micro: int, chunks: int | None = None) -> list[list[Action]]:
    """For each rank its actions, in order. ``chunks``: stages per rank; None is the default."""
    if name not in SCHEDULES:
        raise unknown("schedule", name, SCHEDULES)
    chunks = chunks_of(name, chunks)
    for what, amount in (("rank", ranks), ("micro-batch", micro)):
        if amount < 1:
            raise UsageError(f"{name} needs at least 1 {what}, not {amount}")
    order = SCHEDULES[name].order
    return [list(_numbered(order(rank, ranks, micro, chunks))) for rank in range(ranks)]


def chunks_of(name: str, chunks: int | None = None) -> int:
    """How many stages a rank has under a schedule; a number that it cannot have is refused."""
    if name not in SCHEDULES and name not in ONLY_PYTORCH:
        raise unknown("schedule", name, SCHEDULES)
    allowed = ONLY_PYTORCH[name] if name in ONLY_PYTORCH else SCHEDULES[name].chunks
    if chunks is None or chunks in allowed:
        return allowed[0] if chunks is None else chunks
    if len(allowed) > 1:
        raise UsageError(f"{name} has 2 stages per rank or more, not {chunks}; with 1 it is 1f1b")
    stages = count(allowed[0], "stage")
    hint = "; interleaved can have that" if chunks > 1 else ""
    raise UsageError(f"{name} has {stages} per rank, not {chunks}{hint}")


def rank_of(stage: int, ranks: int, name: str) -> int:
    """The rank that has a stage. They are dealt round robin; those of PyTorch's zbv go down the
    ranks and up again."""
    turn, place = divmod(stage, ranks)
    return ranks - 1 - place if name == "zbv" and turn % 2 else place


def stages_of(axes: Axes, rank: int) -> list[int]:
    """The stages of a pipeline that a rank has; none without a pipeline."""
    if axes.pipeline == 1:
        return []
    count = axes.pipeline * chunks_of(axes.schedule, axes.chunks or None)
    place = axes.place(rank)["pipeline"]
    return [s for s in range(count) if rank_of(s, axes.pipeline, axes.schedule) == place]


def _numbered(turns: Iterable[Turn]) -> Iterator[Action]:
    """Each kind of action of a stage takes the micro-batches in their order."""
    made: dict[Turn, int] = {}
    for turn in turns:
        number = made.get(turn, 0)
        made[turn] = number + 1
        yield Action(*turn, number)


# ------------------------------------------------------------------ what is sent


def source(action: Action, stages: int) -> int | None:
    """The stage whose result the action works on: the activation of the stage before, or the
    gradient of the one behind. None if there is none."""
    kind, stage, _ = action
    if kind == "F":
        return stage - 1 if stage > 0 else None
    return stage + 1 if kind in "BI" and stage < stages - 1 else None


def target(action: Action, stages: int) -> int | None:
    """The stage that works on the action's result. If it is on the same rank, nothing is sent."""
    kind, stage, _ = action
    if kind == "F":
        return stage + 1 if stage < stages - 1 else None
    return stage - 1 if kind in "BI" and stage > 0 else None


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
    whole or in two parts. Nobody waits for ever, where sends are buffered and an action waits for
    what it needs. Between two ranks, activations arrive in the order in which they are used, and
    so do gradients: a channel for each of the two needs no labels.
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

    def of(self, kind: str) -> float:
        return {
            "F": self.forward,
            "B": self.input + self.weight,
            "I": self.input,
            "W": self.weight,
        }[kind]


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


class Claim(NamedTuple):
    """What is known of a schedule without a simulation; each rank's numbers in the order of ranks.

    ``bubble`` is None where no formula is known: most are for sends that take no time.
    """

    bubble: float | None
    live: list[int]
    messages: list[int]


def claim(name: str, ranks: int, micro: int, times: Times, chunks: int | None = None) -> Claim:
    """What a schedule promises. ``times``: of every stage, which are equal."""
    chunks = chunks_of(name, chunks)
    everyone = range(ranks)
    forward, backward, send = times.forward, times.input + times.weight, times.send
    idle: float | None = None
    if name == "gpipe":
        idle = (ranks - 1) * (forward + backward + 2 * send)
        kept = [micro for _ in everyone]
    elif name == "1f1b":
        # In the steady state a rank with k others behind it has k + 1 micro-batches on their way
        # there and back, so k + 1 of them pay for 2k sends; the first rank has the most.
        paid = ranks - 1 + (micro - 1) * (ranks - 1) // ranks
        idle = (ranks - 1) * (forward + backward) + 2 * send * paid
        kept = [min(micro, ranks - rank) for rank in everyone]
    elif name == "interleaved":
        if send == 0:
            filling = ranks - 1 + (chunks - 1) * max(0, ranks - micro)
            idle = filling * (forward + backward)
        ahead = (chunks - 1) * _rounds(ranks, micro)[0] + 1
        kept = [min(chunks * micro, 2 * (ranks - 1 - rank) + ahead) for rank in everyone]
    else:
        if send == 0:
            hidden = (min(ranks, micro) - 1) * min(forward, times.input, times.weight)
            idle = (ranks - 1) * (forward + times.input) - hidden
        kept = [min(micro, ranks) for _ in everyone]
    work = micro * chunks * (forward + backward)
    # A rank sends an activation and a gradient for each of its stages. The first rank and the last
    # have an end of the pipeline.
    sent = [
        micro * (2 * chunks - (rank == 0) - (rank == ranks - 1)) if ranks > 1 else 0
        for rank in everyone
    ]
    return Claim(None if idle is None else idle / work, kept, sent)
