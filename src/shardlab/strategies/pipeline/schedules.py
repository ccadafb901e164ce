"""Pipeline schedules: in which order each rank works on which micro-batch. Pure, no torch.

A schedule is nothing but a list of actions for each rank, which the executor runs. What is sent
follows from the actions (``source`` and ``target``). ``schedule_analysis.py`` checks that the lists
cannot get stuck, and computes how long a step takes and what the ranks keep.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
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
    rounds = rounds_of(ranks, micro)
    forward = [chunk for size in rounds for chunk in range(chunks) for _ in range(size)]
    backward = [chunks - 1 - chunk for chunk in forward]
    ahead = min(len(forward), 2 * (ranks - 1 - rank) + (chunks - 1) * rounds[0])
    for i in range(len(forward) + ahead):
        if i < len(forward):
            yield "F", forward[i] * ranks + rank
        if i >= ahead:
            yield "B", backward[i - ahead] * ranks + rank


def rounds_of(ranks: int, micro: int) -> list[int]:
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


SCHEDULES = {
    "gpipe": Kind(gpipe, range(1, 2)),
    "1f1b": Kind(one_f_one_b, range(1, 2)),
    "interleaved": Kind(interleaved, range(2, 1 << 30)),
    "zero_bubble": Kind(zero_bubble, range(1, 2)),
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
